"""From what a request asks of its answer's form to the engine's `GrammarSpec`. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.types import GrammarSpec, SchemaSource
from specgate.backends.embedded.tool_format import ToolFormat
from specgate.types import GenerationRequest

MAX_CALLS = 32
"""Calls in one answer: a model that repeats itself comes to an end."""

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_TEXT = r"/(.|\n)*/"


def answer_grammar(request: GenerationRequest, form: ToolFormat | None) -> GrammarSpec | None:
    """None where the answer is free. `form`: the model's, if the request offers it tools."""
    schema = answer_schema(request.response_format)
    if form is None:
        return None if schema is None else GrammarSpec("start: @schema_0", (schema,), schema.param)
    choice = request.tool_choice
    tools = [
        (place, tool["function"])
        for place, tool in enumerate(request.tools)
        if not choice.names or tool["function"]["name"] in choice.names
    ]
    schemas = [
        _source(function.get("parameters") or _NO_PARAMETERS, f"tools[{place}].function.parameters")
        for place, function in tools
    ]
    names = [function["name"] for _, function in tools]
    is_free = choice.mode == "auto" and schema is None
    rules = _call_rules(form, names, is_parallel=choice.is_parallel, is_free=is_free)
    if choice.mode == "auto" and schema is not None:
        rules = [f"start: calls | @schema_{len(schemas)}", *rules]
        schemas.append(schema)
    else:
        rules = ["start: text | calls" if is_free else "start: calls", *rules]
    return GrammarSpec("\n".join(rules), tuple(schemas), "tools")


def answer_schema(response_format: Mapping[str, Any] | None) -> SchemaSource | None:
    """The JSON schema that an answer must fit; None for plain text."""
    kind = "text" if response_format is None else response_format["type"]
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return _source({"type": "object"}, "response_format")
    wanted = response_format["json_schema"]
    return _source(wanted.get("schema") or {"type": "object"}, "response_format.json_schema.schema")


def _source(schema: Any, param: str) -> SchemaSource:
    return SchemaSource(json.dumps(schema, ensure_ascii=False, separators=(",", ":")), param)


def _call_rules(form: ToolFormat, names: Sequence[str], *, is_parallel: bool, is_free: bool) -> list[str]:
    """Rules `calls` and, for free text, `text`: any that holds no trigger, but for the name of one that is
    a special token, which text may spell."""
    heads = [f"{form.open}{name}{form.middle}" for name in names]
    rules: list[str] = []
    prefix, skipped = "", ""
    if form.trigger_token is not None:
        prefix, skipped = f"<[{form.trigger_token}]>", form.trigger
    if is_free:
        if form.is_anchored:
            unlike = json.dumps(form.trigger, ensure_ascii=False)
            rules += ["text: TEXT", f"TEXT: {_ANY_TEXT} & ~STARTS", f"STARTS: {unlike} {_ANY_TEXT}"]
        elif form.trigger_token is not None:
            rules += ["text: TEXT", f"TEXT: {_ANY_TEXT}"]
            prefix = f"text {prefix}"
        else:
            rules += [
                "text: TEXT",
                f"TEXT: {_ANY_TEXT}",
                f"trigger[lazy]: TEXT {_literal(form.trigger)}",
            ]
            prefix, skipped = "trigger", form.trigger
    firsts, nexts = [], []
    for i, head in enumerate(heads):
        first = _literal((form.begin + head).removeprefix(skipped))
        rules.append(f"first_{i}: {first} @schema_{i} {_literal(form.tail)}")
        firsts.append(f"first_{i}")
        if is_parallel and form.between is not None:
            rules.append(f"next_{i}: {_literal(form.between + head)} @schema_{i} {_literal(form.tail)}")
            nexts.append(f"next_{i}")
    more = f" ( {' | '.join(nexts)} ){{0,{MAX_CALLS - 1}}}" if nexts else ""
    rules.append(f"calls: {prefix} ( {' | '.join(firsts)} ){more} {_literal(form.close)}")
    return rules


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
