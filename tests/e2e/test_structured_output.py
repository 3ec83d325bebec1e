"""Formats and tools over HTTP, by the official client: valid, streamed, and alike under every policy."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.e2e.server import Server, events

pytestmark = pytest.mark.e2e

POLICIES = ("baseline", "ngram", "draft")
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris? Say C or F."}]


class Mood(BaseModel):
    """A form that even a random model can fill within few tokens."""

    colours: tuple[Literal["red", "green"], Literal["blue", "black"]]
    is_good: bool
    size: Literal[1, 22, 333]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Berlin"]
    unit: Literal["C", "F"] | None


class Now(BaseModel):
    """The time."""


TOOLS: list[Any] = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Now)]
MOOD: Any = {
    "type": "json_schema",
    "json_schema": {"name": "mood", "strict": True, "schema": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "is_good": {"type": "boolean"},
                       "scores": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 4}},
        "required": ["name", "is_good", "scores"], "additionalProperties": False,
    }},
}  # fmt: skip


def under(policy: str, **fields: Any) -> dict[str, Any]:
    """Fields that fix the policy."""
    return {"extra_body": {"specgate": {"policy": policy}}, "messages": ASK} | fields


def test_parsed_into_a_pydantic_model(tiny: Server) -> None:
    for policy in POLICIES:
        answer = tiny.client().chat.completions.parse(
            model="tiny", response_format=Mood, temperature=0, max_tokens=200, **under(policy)
        )
        assert isinstance(answer.choices[0].message.parsed, Mood)
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_format_is_kept_alike_under_every_policy(tiny: Server, temperature: float) -> None:
    seen = set()
    for policy in POLICIES:
        answer = tiny.client().chat.completions.create(
            model="tiny",
            response_format=MOOD,
            temperature=temperature,
            seed=4,
            max_tokens=300,
            **under(policy),
        )
        assert answer.choices[0].finish_reason == "stop"
        seen.add(answer.choices[0].message.content)
        assert (answer.model_extra["specgate"]["num_draft_tokens"] > 0) == (policy != "baseline")
    (text,) = seen
    value = json.loads(text or "")
    assert list(value) == ["name", "is_good", "scores"]
    assert len(value["scores"]) <= 4


def test_calls_whole_and_streamed(tiny: Server) -> None:
    fields: dict[str, Any] = {
        "model": "tiny", "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
        "temperature": 0, "max_tokens": 300,
    }  # fmt: skip
    client = tiny.client()
    whole = client.chat.completions.create(**fields, **under("ngram")).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    with client.chat.completions.stream(**fields, **under("draft")) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.delta") >= 1
    assert "tool_calls.function.arguments.done" in kinds
    (streamed,) = final.message.tool_calls or []
    assert (streamed.function.name, streamed.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )
    assert streamed.id != call.id  # another answer's call
    assert isinstance(streamed.function.parsed_arguments, Weather | Now)
    assert final.finish_reason == "tool_calls"


def test_streamed_chunks_have_the_official_shape(tiny: Server) -> None:
    body = {
        "model": "tiny", "messages": ASK, "tools": TOOLS, "stream": True, "temperature": 0, "max_tokens": 300,
        "tool_choice": {"type": "function", "function": {"name": "Weather"}},
    }  # fmt: skip
    with httpx.stream("POST", f"{tiny.url}/v1/chat/completions", json=body, timeout=60) as response:
        found = [json.loads(data) for data in events(response) if data != "[DONE]"]
    deltas = [choice["delta"] for chunk in found for choice in chunk["choices"]]
    calls = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert deltas[0]["role"] == "assistant"
    assert set(calls[0]) == {"index", "id", "type", "function"}
    assert calls[0]["function"] == {"name": "Weather", "arguments": ""}
    assert all(set(piece) == {"index", "function"} for piece in calls[1:])
    assert len(calls) > 3  # arguments come as they are written
    Weather.model_validate_json("".join(piece["function"]["arguments"] for piece in calls))
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert not any(delta.get("content") for delta in deltas)


def test_a_conversation_with_results(tiny: Server) -> None:
    client = tiny.client()
    first = client.chat.completions.parse(
        model="tiny", messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=300, seed=1,
        parallel_tool_calls=False,
    ).choices[0]  # fmt: skip
    calls = first.message.tool_calls or []
    assert calls
    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "18"} for call in calls]
    history = [*ASK, first.message, *results]
    answer = client.chat.completions.create(
        model="tiny", messages=history, tools=TOOLS, tool_choice="none", max_tokens=5
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 100


def test_what_no_grammar_can_express_is_refused_by_its_place(tiny: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for fields, param in (
        ({"response_format": form}, "response_format.json_schema.schema"),
        ({"tools": [tool]}, "tools[0].function.parameters"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                tiny.client().chat.completions.create(model="tiny", messages=ASK, stream=stream, **fields)
            assert caught.value.param == param
            assert f"{param}.properties.a: " in caught.value.message
            assert "uniqueItems" in caught.value.message
    assert tiny.is_ready()


@pytest.mark.model
def test_the_default_model_calls_and_fills_alike_under_every_policy(smollm2: Server) -> None:
    client = smollm2.client()
    calls, texts = set(), set()
    for policy in POLICIES:
        called = client.chat.completions.create(
            model="smollm2", tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=0,
            max_tokens=80, **under(policy),
        ).choices[0]  # fmt: skip
        assert called.finish_reason == "tool_calls"
        calls |= {(call.function.name, call.function.arguments) for call in called.message.tool_calls or []}
        filled = client.chat.completions.create(
            model="smollm2", response_format=MOOD, temperature=0, max_tokens=80, **under(policy)
        ).choices[0]
        assert filled.finish_reason == "stop"
        texts.add(filled.message.content)
    ((name, arguments),) = calls
    assert name == "Weather"
    assert Weather.model_validate_json(arguments).city == "Paris"
    (text,) = texts
    assert set(json.loads(text or "")) == {"name", "is_good", "scores"}
