"""Chat messages to prompt text, by the template that comes with the model.

Templates are Jinja, written for the environment of Hugging Face transformers, and come from
model files: they run in an immutable sandbox with only the globals such templates use.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateFailed(Exception):
    """The template refused its input, or is itself at fault. The message says which and why."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class _Refusal(jinja2.TemplateError):
    """A template called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; here its body is plain output."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 defines it so)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_RESERVED = ("messages", "tools", "documents", "raise_exception", "strftime_now")


class ChatTemplate:
    """One model's template, compiled once.

    `special_tokens` are the names templates use (`bos_token`, `eos_token`, ...); `wall` gives
    seconds since the epoch for `strftime_now`. Raises TemplateFailed if the source is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], wall: Callable[[], float]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.fromtimestamp(wall()).strftime(
            form
        )
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the model's chat template cannot be read: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, ending where the assistant's answer begins.

        `kwargs` are further variables for the template (`enable_thinking`, ...); they may also set
        `add_generation_prompt`. Raises TemplateFailed.
        """
        extra = dict(kwargs or {})
        for name in _RESERVED:
            if name in extra:
                raise TemplateFailed(f"chat_template_kwargs must not set '{name}'", "chat_template_kwargs")
        variables = {"add_generation_prompt": True, **self._special_tokens, **extra}
        try:
            return self._template.render(
                messages=[_for_template(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                **variables,
            )
        except _Refusal as refusal:
            raise TemplateFailed(f"the model's chat template refuses the messages: {refusal}") from refusal
        except _TEMPLATE_FAULTS as error:
            raise TemplateFailed(
                f"the model's chat template cannot be applied to the messages: {error}"
            ) from error


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content as one string, tool arguments as objects."""
    shaped = dict(message)
    content = shaped.get("content")
    if isinstance(content, list | tuple):
        shaped["content"] = "\n".join(_part_text(part) for part in content)
    elif content is None:
        shaped["content"] = ""
    if calls := shaped.get("tool_calls"):
        shaped["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return shaped


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise TemplateFailed(f"content parts must be of type 'text'; this model cannot read '{kind}'")


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call  # the template shows it as the text it is
    return {**call, "function": {**function, "arguments": arguments}}
