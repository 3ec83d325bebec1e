"""How a model writes tool calls: learnt from its chat template, or a form of our own.

Nothing here knows a model by name. The template is asked to render an assistant's tool call, and
what it writes is the format: what stands before a call, around its name and arguments, between two
calls and after the last. Hermes and Qwen (`<tool_call>`), Llama 3 (bare JSON with `parameters`),
Mistral (`[TOOL_CALLS]` and a list) and SmolLM2 (a list in `<tool_call>`) come out of it.

A template that does not show tools to the model gets `GENERIC`, with a system prompt that explains it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str | None]
"""(messages, tools, whether the assistant's turn begins at the end) to text; None: it refuses them."""

_NAMES = ("probe_first", "probe_second")
_CALL = (
    r'\{\s*"name"\s*:\s*"%s"\s*,\s*"(?P<key>arguments|parameters)"\s*:\s*(?P<value>\{\s*"probe"\s*:\s*1\s*\})'
)
_TAIL = re.compile(r'(\s*,\s*"id"\s*:\s*"[^"]*")?(?P<tail>\s*\})')  # the model writes no ids
_TRIGGER = re.compile(r"\s*(<[^<>\s]+>|\[[A-Z_]+\]|\S+)")
_MAX_BEGIN = 64  # characters; more is no mark but a text


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is `open NAME middle ARGUMENTS tail`; an answer with calls is
    `begin CALL (between CALL)* close`.

    In free text `trigger`, the first part of all that, makes it a call: anywhere, or if `is_anchored`
    only at the start of the answer. `trigger_token` is set where the trigger is a special token: then
    that token alone makes it a call, not its name in ordinary text.
    """

    begin: str
    trigger: str
    open: str = '{"name": "'
    middle: str = '", "arguments": '
    tail: str = "}"
    between: str | None = None  # None: one call only
    close: str = ""
    is_anchored: bool = False
    trigger_token: int | None = None
    id_length: int | None = None  # ids that the template insists on; None: any

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls (name, arguments as JSON) as the model writes them."""
        texts = [f"{self.open}{name}{self.middle}{arguments}{self.tail}" for name, arguments in calls]
        return self.begin + (self.between or "").join(texts) + self.close


GENERIC = ToolFormat(
    begin="<tool_call>\n",
    trigger="<tool_call>",
    between="\n</tool_call>\n<tool_call>\n",
    close="\n</tool_call>",
)


def shows_tools(render: Render) -> bool:
    """Whether the template tells the model of its tools."""
    text = render([_user()], [_tool(name) for name in _NAMES], True)
    return text is not None and _NAMES[0] in text


def learn_format(render: Render, special_tokens: Mapping[str, int]) -> ToolFormat | None:
    """The format of a template that shows tools, or None if it is not one of JSON objects."""
    tools = [_tool(name) for name in _NAMES]
    start = render([_user()], tools, True)
    single = render([_user(), _calls(_NAMES[:1])], tools, False)
    if start is None or single is None:
        return None
    num_same = next((i for i, (a, b) in enumerate(zip(start, single, strict=False)) if a != b), len(start))
    first = re.compile(_CALL % _NAMES[0]).search(single, num_same)
    tail = _TAIL.match(single, first.end()) if first else None
    if first is None or tail is None:
        return None
    begin = single[num_same : first.start()]
    written = single[first.start() : first.start("value")]
    opening, _, middle = written.partition(_NAMES[0])
    trigger = _TRIGGER.match(begin)
    if len(begin) > _MAX_BEGIN:
        return None
    text = trigger[0].lstrip() if trigger else opening
    return ToolFormat(
        begin=begin.lstrip() if trigger else "",
        trigger=text,
        open=opening,
        middle=middle,
        tail=tail["tail"],
        between=_between(render([_user(), _calls(_NAMES)], tools, False)),
        close=_until_special(single[tail.end() :], special_tokens),
        is_anchored=trigger is None,
        trigger_token=special_tokens.get(text),
        id_length=_id_length(render, tools),
    )


def _between(double: str | None) -> str | None:
    if double is None:
        return None
    first = re.search(_CALL % _NAMES[0], double)
    second = re.compile(_CALL % _NAMES[1]).search(double, first.end() if first else 0)
    tail = _TAIL.match(double, first.end()) if first else None
    return double[tail.end() : second.start()] if tail and second else None


def _until_special(text: str, special_tokens: Collection[str]) -> str:
    """Up to where the template ends the turn."""
    places = [place for token in special_tokens if token and (place := text.find(token)) >= 0]
    return text[: min(places, default=len(text))].rstrip()


def _id_length(render: Render, tools: Sequence[Mapping[str, Any]]) -> int | None:
    """9 for templates that refuse ids of other lengths (Mistral)."""
    return None if render([_user(), _calls(_NAMES[:1], "call_with_a_long_id")], tools, False) else 9


def _user() -> dict[str, Any]:
    return {"role": "user", "content": "probe"}


def _calls(names: Sequence[str], call_id: str = "abcdefgh") -> dict[str, Any]:
    """An assistant's turn that calls the named functions; ids have nine characters."""
    calls = [
        {"id": f"{call_id}{i}", "type": "function", "function": {"name": name, "arguments": '{"probe": 1}'}}
        for i, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"probe": {"type": "integer", "description": "p"}}}
    function = {"name": name, "description": "d", "parameters": parameters}
    return {"type": "function", "function": function}


# --- templates that know no tools --------------------------------------------------------------


def explained(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The messages with tools, calls and results written out in `GENERIC`'s form, as plain text."""
    out: list[dict[str, Any]] = []
    for message in messages:
        plain = _plain(message)
        if out and message.get("role") == "tool" and out[-1]["role"] == "user":
            out[-1]["content"] += "\n" + plain["content"]
        else:
            out.append(plain)
    if not tools:
        return out
    prompt = _system_prompt(tools)
    if out and out[0]["role"] == "system":
        out[0]["content"] += "\n\n" + prompt
    else:
        out.insert(0, {"role": "system", "content": prompt})
    return out


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = str(message.get("content") or "")
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        functions = [call["function"] for call in calls]
        text = GENERIC.written([(f["name"], f.get("arguments") or "{}") for f in functions])
        return {"role": "assistant", "content": f"{content}\n{text}" if content else text}
    return dict(message)


def _system_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = GENERIC.written([("NAME", '{"PARAMETER": VALUE}')])
    return (
        f"These functions can be called, one a line, as JSON:\n<tools>\n{listed}\n</tools>\n"
        f"To call one, answer with its name and arguments in this form:\n{example}\n"
        "If none is needed, answer as usual."
    )
