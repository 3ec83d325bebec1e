"""Chat templates in the manner of four model families, cut down to what tools need."""

HERMES = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}"
    "{% if m.content %}{{ '\n' + m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM = (
    "{% if tools %}<|im_start|>system\n<tools>{{ tools | tojson }}</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% if m.tool_calls %}<tool_call>["
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]</tool_call>"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{% set f = m.tool_calls[0].function %}"
    '{{ \'<|im_start|>assistant\n\n{"name": "\' + f.name + \'", "parameters": \' }}'
    "{{ f.arguments | tojson }}{{ '}<|im_end|>' }}{% else %}{{ '<|im_start|>' + m.role + '\n\n' }}"
    "{% if loop.first and tools %}{% for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}"
    "{% endif %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have 9 characters') }}{% endif %}{% set out = c.function | tojson %}"
    "{{ out[:-1] + ', \"id\": \"' + c.id + '\"}' }}{{ ', ' if not loop.last }}{% endfor %}]<|im_end|>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
PYTHONIC = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments }}){% endfor %}"
    "{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
NATIVE = {"hermes": HERMES, "smollm": SMOLLM, "llama": LLAMA, "mistral": MISTRAL}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]")
