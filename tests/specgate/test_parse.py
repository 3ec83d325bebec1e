"""The request parser: conversions, and no input it does not answer with a 400 at worst."""

from __future__ import annotations

import json
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from specgate.api.parse import Caller, Parser, decode_json
from specgate.api.schema import INERT, UNSUPPORTED, chat_schema, completions_schema
from specgate.config import RequestsConfig
from specgate.errors import BadRequest
from specgate.types import GenerationRequest

LIMITS = RequestsConfig(allow_overrides=True)
PARSER = Parser(LIMITS)
CALLER = Caller("id-1")
BASE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def chat(**fields: Any) -> GenerationRequest:
    return PARSER.chat(BASE | fields, CALLER)


def test_every_field_of_the_official_client_is_known_by_name() -> None:
    chat_fields = set(typing.get_type_hints(chat_create_params.CompletionCreateParamsBase)) | {"stream"}
    assert chat_fields <= set(chat_schema(LIMITS)["properties"])
    legacy = set(typing.get_type_hints(completion_create_params.CompletionCreateParamsBase)) | {"stream"}
    assert legacy <= set(completions_schema(LIMITS)["properties"])
    known = set(chat_schema(LIMITS)["properties"]) | set(completions_schema(LIMITS)["properties"])
    assert known >= INERT
    assert known >= UNSUPPORTED
    assert not INERT & UNSUPPORTED


def test_sampling_fields_arrive_as_the_engine_wants_them() -> None:
    request = chat(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, repetition_penalty=1.1, presence_penalty=1,
        frequency_penalty=-1, logit_bias={"5": -100}, seed=-1, max_completion_tokens=9, min_tokens=2,
        stop="END", stop_token_ids=[7, 7], ignore_eos=True, n=2, logprobs=True, top_logprobs=3,
    )  # fmt: skip
    s = request.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty) == (0.0, 0.5, 0, 0.1, 1.1)
    assert (s.presence_penalty, s.frequency_penalty, s.logit_bias) == (1.0, -1.0, {5: -100.0})
    assert s.seed is not None
    assert s.seed >= 0
    assert (s.max_tokens, s.min_tokens, s.stop_token_ids, s.ignore_eos) == (9, 2, (7,), True)
    assert (request.stop, request.n, s.num_logprobs) == (("END",), 2, 3)
    assert chat(logprobs=True).sampling.num_logprobs == 0
    assert chat().sampling.num_logprobs is None
    assert (chat(top_p=0).sampling.top_k, chat(top_p=0).sampling.top_p) == (1, 1.0)


def test_messages_are_made_ready_for_templates() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": "be kind", "name": None},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            ], "audio": None},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
            {"role": "assistant", "content": "ok", "refusal": None, "annotations": [], "function_call": None},
        ]
    )  # fmt: skip
    assert request.messages is not None
    assert request.messages[0] == {"role": "system", "content": "be kind"}
    assert request.messages[1]["content"] == "a\nb"
    assert request.messages[2]["content"] == ""
    assert request.messages[2]["tool_calls"][0]["function"]["name"] == "f"
    assert request.messages[4] == {"role": "assistant", "content": "ok"}


def test_unsupported_fields_are_kept_by_name() -> None:
    functions = [{"name": "f"}]
    assert chat(functions=functions, function_call="auto").unsupported == ("functions", "function_call")
    assert chat(function_call="auto").unsupported == ()
    assert chat(reasoning_effort="low").unsupported == ("reasoning_effort",)


def test_the_header_wins_over_the_body() -> None:
    body = {"specgate": {"policy": "draft"}}
    with_header = PARSER.chat(BASE | body, Caller("x", policy_header=" NGRAM "))
    assert with_header.overrides.policy == "ngram"
    assert PARSER.chat(BASE | body, Caller("x", policy_header="auto")).overrides.policy is None
    assert PARSER.chat(BASE | body, Caller("x")).overrides.policy == "draft"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
_names = sorted(
    {*chat_schema(LIMITS)["properties"], *completions_schema(LIMITS)["properties"], "messags", "", "é\x00"}
)
_likely = st.sampled_from(
    [
        0, 1, -1, 2**63, 1e308, True, "", "x", [], [[]], [""], [1, "a"], {}, {"type": "text"},
        {"policy": "ngram"}, [{"role": "user", "content": "x"}], [{"role": "assistant"}],
        [{"type": "function"}], {"5": 1}, "user", None,
    ]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    fields=st.dictionaries(st.sampled_from(_names), _likely | _json, max_size=6),
    has_base=st.booleans(),
    is_chat=st.booleans(),
    header=st.none() | st.text(max_size=12),
)
def test_any_fields_give_a_request_or_a_400(
    fields: dict[str, Any], has_base: bool, is_chat: bool, header: str | None
) -> None:
    base = (
        ({"model": "m", "messages": BASE["messages"]} if is_chat else {"model": "m", "prompt": "x"})
        if has_base
        else {}
    )
    parse = PARSER.chat if is_chat else PARSER.completions
    try:
        body = decode_json(json.dumps(base | fields).encode(), 64)
        request = parse(body, Caller("x", policy_header=header))
    except BadRequest as error:
        msgspec.json.encode(error.body())
    else:
        assert request.model == body["model"]
        assert request.n >= 1
        assert 0 <= request.sampling.temperature <= 2
        assert 0 < request.sampling.top_p <= 1


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200) | st.text(max_size=100).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_any_bytes_give_an_object_or_a_400(data: bytes) -> None:
    try:
        body = decode_json(data, 8)
    except BadRequest:
        return
    assert isinstance(body, dict)


@pytest.mark.parametrize("depth", [8, 9])
def test_depth_is_counted_exactly(depth: int) -> None:
    data = b'{"a":' * depth + b"1" + b"}" * depth
    if depth <= 8:
        assert decode_json(data, 8)
    else:
        with pytest.raises(BadRequest, match="deeper than 8"):
            decode_json(data, 8)
