"""Text level: every policy gives baseline's text, stops and counts, streamed as it should be."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, events, parsed

pytestmark = pytest.mark.e2e

POLICIES: list[dict[str, Any]] = [
    {"policy": "baseline"},
    {"policy": "ngram", "num_speculative_tokens": 1},
    {"policy": "ngram", "num_speculative_tokens": 4},
    {"policy": "draft", "num_speculative_tokens": 3},
    {"policy": "draft", "num_speculative_tokens": 8},
]
IDS = [f"{policy['policy']}{policy.get('num_speculative_tokens', '')}" for policy in POLICIES]
PROMPTS = [
    "word " * 48,
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n",
    "今天天气很好，今天天气很好，",
    "🎉 naïve café 🎉",
]


def body(server: Server, prompt: str, policy: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": 48,
        "temperature": 0,
        "ignore_eos": True,
        "specgate": policy,
    } | fields


def whole(server: Server, prompt: str, policy: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = httpx.post(
        f"{server.url}/v1/completions", json=body(server, prompt, policy, **fields), timeout=90
    )
    assert response.status_code == 200, response.text
    return dict(response.json())


def essence(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What must not depend on the policy."""
    choice = answer["choices"][0]
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return choice["text"], choice["finish_reason"], choice.get("stop_reason"), usage


def readable() -> dict[str, int]:
    """A bias that forbids what is not plain text by itself: a random model talks in bytes."""
    from engine.models.tiny_files import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    texts = {i: tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())}
    return {str(token): -100 for token, text in texts.items() if not text.isascii() or text.startswith("<|")}


def test_greedy_text_alone_and_mixed(tiny: Server) -> None:
    alone = {prompt: essence(whole(tiny, prompt, POLICIES[0])) for prompt in PROMPTS}
    jobs = [(prompt, policy) for prompt in PROMPTS for policy in POLICIES] * 2
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda job: whole(tiny, *job), jobs))
    drafted = 0
    for (prompt, _), answer in zip(jobs, answers, strict=True):
        assert essence(answer) == alone[prompt]
        drafted += answer["specgate"]["num_draft_tokens"]
    assert drafted > 0


@pytest.mark.parametrize("policy", POLICIES[1:], ids=IDS[1:])
def test_stop_strings_end_at_the_same_token(tiny: Server, policy: dict[str, Any]) -> None:
    bias = readable()
    full = whole(tiny, PROMPTS[0], POLICIES[0], logit_bias=bias)["choices"][0]["text"]
    for place in range(0, len(full) - 3, 5):
        stop = full[place : place + 3]
        asked = {"logit_bias": bias, "stop": [stop, "not there"], "logprobs": 0}
        expected = whole(tiny, PROMPTS[0], POLICIES[0], **asked)
        answer = whole(tiny, PROMPTS[0], policy, **asked)
        assert essence(answer) == essence(expected)
        choice = answer["choices"][0]
        assert choice["text"] == full[: full.index(stop)]
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"]
        assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"] + stop)


@pytest.mark.parametrize(
    "fields", [{"min_tokens": 9}, {"max_tokens": 1}, {"stop_token_ids": [40, 50, 60, 70, 80]}]
)
def test_limits_end_at_the_same_token(tiny: Server, fields: dict[str, Any]) -> None:
    fields = {"ignore_eos": False} | fields
    for prompt in PROMPTS[:2]:
        expected = essence(whole(tiny, prompt, POLICIES[0], **fields))
        for policy in POLICIES[1:]:
            assert essence(whole(tiny, prompt, policy, **fields)) == expected


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
@pytest.mark.parametrize("stop", [None, ["n", "ab"]])
def test_streams(tiny: Server, policy: dict[str, Any], stop: list[str] | None) -> None:
    """Whole characters, nothing of a stop string, one finish, the usage chunk, [DONE], headers."""
    for prompt in PROMPTS:
        expected = whole(tiny, prompt, POLICIES[0], stop=stop)
        asked = body(tiny, prompt, policy, stop=stop, stream=True, stream_options={"include_usage": True})
        with httpx.stream("POST", f"{tiny.url}/v1/completions", json=asked, timeout=90) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-accel-buffering"] == "no"
            *data, usage, done = list(events(response))
        assert done == "[DONE]"
        last = parsed(usage)
        assert last["choices"] == []
        choices = [choice for chunk in map(parsed, data) for choice in chunk["choices"]]
        assert "".join(choice["text"] for choice in choices) == expected["choices"][0]["text"]
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [
            expected["choices"][0]["finish_reason"]
        ]
        for name in ("prompt_tokens", "completion_tokens"):
            assert last["usage"][name] == expected["usage"][name]
        own = last["specgate"]
        assert own["policy"] == policy["policy"]
        total = own["num_target_steps"] + own["num_accepted_tokens"] - last["usage"]["completion_tokens"]
        assert total in (0, 1)
