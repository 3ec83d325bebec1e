"""`response_format`, `tools` and `tool_choice`: what is meant is understood, what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from specgate.api.parse import Caller, Parser
from specgate.config import RequestsConfig
from specgate.errors import BadRequest
from specgate.types import GenerationRequest, ToolChoice
from tests.specgate.gateway import running

PARSER = Parser(RequestsConfig(max_schema_bytes=600))
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA} | fields}


def chat(**fields: Any) -> GenerationRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    return PARSER.chat(body, Caller("id"))


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, ToolChoice()),
        ({"tool_choice": "auto"}, ToolChoice()),
        ({"tools": []}, ToolChoice()),
        ({"tools": [tool()]}, ToolChoice("auto")),
        ({"tools": [tool()], "tool_choice": "none"}, ToolChoice("none")),
        ({"tools": [tool()], "tool_choice": "required"}, ToolChoice("required")),
        ({"tools": [tool()], "parallel_tool_calls": False}, ToolChoice("auto", is_parallel=False)),
        ({"tools": [tool(), tool("g")], "tool_choice": named("g")}, ToolChoice("required", ("g",), False)),
        (
            {
                "tools": [tool(), tool("g"), tool("h")],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [named("g"), named("h")]},
                },
            },
            ToolChoice("auto", ("g", "h")),
        ),
    ],
)
def test_choices(fields: dict[str, Any], choice: ToolChoice) -> None:
    request = chat(**fields)
    assert request.tool_choice == choice
    assert request.tools == tuple(fields.get("tools", ()))
    assert request.unsupported == ()


def test_formats() -> None:
    assert chat().response_format is None
    for form in (
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n"}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    ):
        assert chat(response_format=form).response_format == form


def schema_of(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


LONG = {"type": "string", "enum": ["x" * 600]}
FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
    ({"response_format": {}}, "response_format.type", "required"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    (
        {"response_format": {"type": "json_object", "json_schema": {"name": "n"}}},
        "response_format.json_schema",
        "needs",
    ),
    (schema_of(schema=SCHEMA), "response_format.json_schema.name", "letters"),
    (schema_of(name="a b"), "response_format.json_schema.name", "letters"),
    (schema_of(name="n", schema=[]), "response_format.json_schema.schema", "an object"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "json_schema"),
    (schema_of(name="n", schemas={}), "response_format.json_schema.schemas", "'schema'"),
    (schema_of(name="n", strict="yes"), "response_format.json_schema.strict", "true or false"),
    (schema_of(name="n", schema=LONG), "response_format.json_schema.schema", "at most 600"),
    ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools[0].type", "only 'function'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name", "before"),
    ({"tools": [tool("a.b")]}, "tools[0].function.name", "letters"),
    ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type", "'object'"),
    ({"tools": [tool(strict=1)]}, "tools[0].function.strict", "true or false"),
    ({"tools": [tool(parameters={"type": "object", "x": LONG})]}, "tools", "at most 600"),
    ({"tool_choice": "required"}, "tool_choice", "offers none"),
    ({"tool_choice": named("f")}, "tool_choice", "offers none"),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "required"),
    ({"tools": [tool()], "tool_choice": named("g")}, "tool_choice", "'g'"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
    ({"tools": [tool()], "tool_choice": {"type": "tool"}}, "tool_choice.type", "allowed_tools"),
    (
        {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "all"}}},
        "tool_choice.allowed_tools.mode",
        "required",
    ),
]


@pytest.mark.parametrize(("fields", "param", "hint"), FAULTS)
def test_faults_are_named(fields: dict[str, Any], param: str, hint: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert hint in caught.value.message


async def test_a_scripted_model_says_that_it_fits_no_format() -> None:
    async with running() as server:
        refused = await server.chat(tools=[tool()])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
        assert (await server.chat(tools=[tool()], tool_choice="none")).status_code == 200


def test_earlier_calls_and_results_are_as_templates_know_them() -> None:
    function = {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}}
    request = chat(
        messages=[
            {"role": "assistant", "content": None, "parsed": None,
             "tool_calls": [{"id": "c1", "type": "function", "index": 0, "function": function}]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "18"}]},
        ]
    )  # fmt: skip
    kept = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "function": kept}
    assert request.messages == (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "18"},
    )
    with pytest.raises(BadRequest) as caught:
        chat(messages=[{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}])
    assert caught.value.param == "messages[0].tool_calls[0]"
