"""A real server with a tiny model, driven by the official `openai` client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

MESSAGES: list[Any] = [{"role": "user", "content": "one two three one two three one two"}]
REPEAT = {"40": 90, "50": 90}  # a text of two tokens repeats itself soon, so that n-grams match
POLICIES = ("baseline", "ngram", "draft")


def chat(server: Server, **fields: Any) -> Any:
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0} | fields
    body["extra_body"] = {"ignore_eos": True} | body.get("extra_body", {})
    return server.client().chat.completions.create(**body)


def complete(server: Server, **fields: Any) -> Any:
    body = {
        "model": server.model,
        "prompt": "one two three one two",
        "max_tokens": 24,
        "temperature": 0,
    } | fields
    body["extra_body"] = {"ignore_eos": True}
    return server.client().completions.create(**body)


def test_models(tiny: Server) -> None:
    assert [model.id for model in tiny.client().models.list()] == ["tiny"]
    assert tiny.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        tiny.client().models.retrieve("other")


def test_chat_whole_and_streamed_agree(tiny: Server) -> None:
    whole = chat(tiny)
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    chunks = list(chat(tiny, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == choice.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "length"
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completions_whole_and_streamed_agree(tiny: Server) -> None:
    whole = complete(tiny)
    assert whole.usage.completion_tokens == 24
    chunks = list(complete(tiny, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("policy", POLICIES)
def test_chat_logprobs(tiny: Server, policy: str) -> None:
    answer = chat(tiny, logprobs=True, top_logprobs=3, extra_body={"specgate": {"policy": policy}})
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    raw = b"".join(bytes(entry.bytes) for entry in entries)
    assert raw.decode(errors="replace") == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].bytes == entry.bytes  # greedy takes the best
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0] < 0
    baseline = chat(tiny, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [entry.bytes for entry in entries] == [entry.bytes for entry in baseline]
    assert [entry.logprob for entry in entries] == pytest.approx(
        [entry.logprob for entry in baseline], abs=1e-3
    )


def test_streamed_logprobs_are_those_of_the_whole(tiny: Server) -> None:
    whole = chat(tiny, logprobs=True).choices[0].logprobs.content
    chunks = [chunk.choices[0] for chunk in chat(tiny, logprobs=True, stream=True) if chunk.choices]
    streamed = [entry for choice in chunks if choice.logprobs for entry in choice.logprobs.content]
    assert [(e.token, e.bytes) for e in streamed] == [(e.token, e.bytes) for e in whole]


def test_n_answers_of_a_seeded_request_differ_and_repeat(tiny: Server) -> None:
    first = chat(tiny, n=2, temperature=1, seed=7)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert first.usage.completion_tokens == 48
    again = chat(tiny, n=2, temperature=1, seed=7)
    assert [choice.message.content for choice in again.choices] == texts
    streamed = ["", ""]
    for chunk in chat(tiny, n=2, temperature=1, seed=7, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_a_seed_gives_the_same_text_under_every_policy(tiny: Server) -> None:
    texts = {
        chat(tiny, temperature=0.9, top_p=0.9, seed=3, extra_headers={"X-SpecGate-Policy": policy})
        .choices[0]
        .message.content
        for policy in POLICIES
    }
    assert len(texts) == 1


def test_echo(tiny: Server) -> None:
    plain = complete(tiny)
    echoed = complete(tiny, echo=True, logprobs=1)
    assert echoed.choices[0].text == "one two three one two" + plain.choices[0].text
    logprobs = echoed.choices[0].logprobs
    assert len(logprobs.tokens) == echoed.usage.prompt_tokens + echoed.usage.completion_tokens
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    scored = complete(tiny, echo=True, logprobs=1, max_tokens=0)
    assert scored.choices[0].text == "one two three one two"
    assert scored.choices[0].logprobs.token_logprobs == pytest.approx(
        logprobs.token_logprobs[: scored.usage.prompt_tokens], abs=1e-3, nan_ok=True
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["header", "body"])
def test_overrides(tiny: Server, policy: str, way: str) -> None:
    extra: dict[str, Any] = (
        {"extra_headers": {"X-SpecGate-Policy": policy}}
        if way == "header"
        else {"extra_body": {"specgate": {"policy": policy, "num_speculative_tokens": 2}}}
    )
    if policy == "baseline" and way == "body":
        extra["extra_body"]["specgate"].pop("num_speculative_tokens")
    raw = tiny.client().chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=24, temperature=0, logit_bias=REPEAT, **extra
    )
    assert raw.headers["x-specgate-policy"] == policy
    assert raw.headers["x-specgate-reason"] == "override"
    own = raw.parse().model_dump()["specgate"]
    assert (own["policy"], own["reason"]) == (policy, "override")
    assert (own["num_draft_tokens"] > 0) == (policy != "baseline")
    assert own["num_target_steps"] + own["num_accepted_tokens"] in (24, 25)
    if way == "body" and policy == "draft":
        assert own["num_draft_tokens"] <= 2 * own["num_drafts"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_body": {"specgate": {"policy": "wizard"}}}, "policy"),
        ({"temperature": 9}, "temperature"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"messages": [{"role": "user", "content": "long " * 9000}]}, "messages"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"functions": [{"name": "f", "parameters": {}}]}, "functions"),
    ],
)
def test_bad_requests_name_the_field(tiny: Server, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(tiny, **fields)
    assert param in str(caught.value.param)


def test_tokenize_and_detokenize(tiny: Server) -> None:
    import httpx

    text = "naïve 你好 🎉"
    tokens = httpx.post(f"{tiny.url}/tokenize", json={"model": "tiny", "prompt": text}).json()["tokens"]
    back = httpx.post(f"{tiny.url}/detokenize", json={"model": "tiny", "tokens": tokens}).json()
    assert back["prompt"] == text
