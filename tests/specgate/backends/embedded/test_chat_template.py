"""Chat templates: what they see, what they may do, and what callers are told when they fail."""

from __future__ import annotations

import time
from typing import Any

import pytest

from specgate.backends.embedded.chat_template import ChatTemplate, TemplateFailed

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **kwargs: Any) -> str:
    tools = kwargs.pop("tools", ())
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, lambda: 0.0).render(
        messages, tools, kwargs
    )


def test_prompt_ends_where_the_answer_begins() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_special_tokens_tools_and_variables() -> None:
    source = "{{ bos_token }}{{ tools | tojson }}{% if enable_thinking %}think{% endif %}{{ eos_token }}"
    tools = [{"type": "function", "function": {"name": "查", "description": "<b>"}}]
    expected = '<s>[{"type": "function", "function": {"name": "查", "description": "<b>"}}]think</s>'
    assert render(source, tools=tools, enable_thinking=True) == expected
    assert render("{{ tools is none }}") == "True"


def test_content_parts_and_tool_calls_are_shaped_for_templates() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{{ messages[0].content }}{{ messages[0].tool_calls[0].function.arguments.x + 1 }}"
    assert render(source, messages) == "2"
    broken = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{oops"}}]}]
    assert render("{{ messages[0].tool_calls[0].function.arguments }}", broken) == "{oops"


def test_globals_and_tags_of_transformers() -> None:
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y", time.localtime(0.0))
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "cannot be applied"),
        ("{{ messages[5].content.x }}", "cannot be applied"),
        ("{{ 1 / 0 }}", "cannot be applied"),
    ],
)
def test_failures_are_told(source: str, words: str) -> None:
    with pytest.raises(TemplateFailed, match=words) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_wrong_input_is_told() -> None:
    with pytest.raises(TemplateFailed, match="image_url"):
        render(CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    with pytest.raises(TemplateFailed, match="must not set 'documents'") as caught:
        render(CHATML, documents=[])
    assert caught.value.param == "chat_template_kwargs"
    with pytest.raises(TemplateFailed, match="cannot be read"):
        render("{% for %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ self.__init__.__globals__ }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_templates_are_kept_in_their_sandbox(source: str) -> None:
    with pytest.raises(TemplateFailed):
        render(source)
