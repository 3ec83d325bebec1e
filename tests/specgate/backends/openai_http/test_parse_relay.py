"""Whatever a body holds, a request to a proxied model is read or refused, never a fault of ours."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgate.api.parse import Caller
from specgate.api.parse_relay import RelayParser
from specgate.backends.openai_http.outgoing import outgoing_body
from specgate.config import RequestsConfig
from specgate.errors import ApiError, BadRequest, Forbidden
from specgate.features import LearnedEstimator, request_text
from specgate.rate_limits import estimated_tokens

PARSER = RelayParser(RequestsConfig(allow_overrides=True))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10**6) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool", "x"])}, optional={
    "content": JSON, "tool_calls": JSON, "name": JSON})  # fmt: skip
FIELDS = ("stream", "n", "max_tokens", "temperature", "top_p", "tools", "response_format", "stop", "user",
          "seed", "stream_options", "logprobs", "priority", "ignore_eos", "odd")  # fmt: skip
BODIES = st.fixed_dictionaries(
    {"model": st.just("m")},
    optional={
        "messages": st.lists(MESSAGE, min_size=1, max_size=3),
        "prompt": JSON | st.text(max_size=20) | st.lists(st.text(max_size=5), min_size=1, max_size=3),
        "suffix": JSON,
        **dict.fromkeys(FIELDS, JSON),
    },
)


@settings(max_examples=300, deadline=None)
@given(BODIES)
def test_every_body_is_read_or_refused(body: dict[str, Any]) -> None:
    raw = msgspec.json.encode(body)
    caller = Caller("id", raw=raw)
    for parse in (PARSER.chat, PARSER.completions):
        try:
            request = parse(body, caller)
        except (BadRequest, Forbidden):
            continue
        request_text(request)
        assert estimated_tokens(request) >= 0
        sent = msgspec.json.decode(outgoing_body(request, "m", asks_usage=True))
        own = {"stream_options"} if request.is_stream else set()
        assert {k: v for k, v in sent.items() if k not in own} == {
            k: v for k, v in body.items() if k not in own
        }


def test_the_task_is_read_from_what_can_be_read() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    text = {"type": "text", "text": "Translate this into French: the cat sat on the mat."}
    body = {"model": "m", "messages": [{"role": "user", "content": [image, text]}], "tools": [{"any": 1}]}
    request = PARSER.chat(body, Caller("id"))
    assert request.user_text.strip() == text["text"]
    assert request.unsupported == ()
    assert LearnedEstimator().task(request).label in ("translation", "tool_call")


def test_our_own_field_is_judged_strictly() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for own in ({"policy": 3}, {"polcy": "auto"}, {"num_speculative_tokens": 3}):
        with pytest.raises(ApiError) as caught:
            PARSER.chat(body | {"specgate": own}, Caller("id"))
        assert caught.value.status == 400
    strict = RelayParser(RequestsConfig())
    with pytest.raises(Forbidden):
        strict.chat(body, Caller("id", policy_header="ngram"))
