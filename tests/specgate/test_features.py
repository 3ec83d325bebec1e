"""Requests and records arrive at the models as they were meant."""

from __future__ import annotations

import subprocess
import sys

from engine.types import DraftWork, MethodCounts, SamplingParams, StepRecord
from specgate import features
from specgate.types import GenerationRequest, LoadView, TaskEstimate


def request(**changes: object) -> GenerationRequest:
    base: dict[str, object] = {
        "request_id": "r",
        "endpoint": "chat",
        "model": "m",
        "sampling": SamplingParams(temperature=0.7, top_p=0.9, max_tokens=99),
    }
    return GenerationRequest(**{**base, **changes})  # type: ignore[arg-type]


def test_chat_requests() -> None:
    text = features.request_text(
        request(
            messages=({"role": "system", "content": "S"}, {"role": "user", "content": "Hello"}),
            tools=({"type": "function"},),
            response_format={"type": "json_object"},
            has_explicit_max_tokens=True,
        )
    )
    assert (text.system, text.user, text.num_tools, text.has_response_format) == ("S", "Hello", 1, True)
    assert text.max_tokens == 99
    plain = features.request_text(request(messages=(), response_format={"type": "text"}))
    assert not plain.has_response_format
    assert plain.max_tokens is None


def test_completions_as_text_and_as_token_ids() -> None:
    text = features.request_text(request(prompt="def f(", suffix="return"))
    assert (text.user, text.suffix, text.is_raw_prompt) == ("def f(", "return", True)
    ids = request(prompt=(1, 2, 3))
    assert features.request_text(ids).user == ""
    assert features.request_text(ids, "decoded").user == "decoded"


def test_length_features() -> None:
    asks = request(messages=({"role": "user", "content": "Tell me about bees in 50 words"},), tenant="t")
    found = features.length_features(asks, TaskEstimate("chat", 0.9), 12)
    assert (found.task, found.num_prompt_tokens, found.max_tokens, found.caller) == ("chat", 12, None, "t")
    assert found.asked_tokens is not None
    assert features.length_features(asks, None, 12).task is None
    system = request(
        messages=({"role": "system", "content": "一句话回答"}, {"role": "user", "content": "hi"})
    )
    assert features.asked_length(system) is not None


def test_acceptance() -> None:
    key = features.acceptance_key("draft", None, request())
    assert (key.policy, key.task, key.band) == ("draft", None, "warm")
    counts = features.acceptance_counts(MethodCounts("draft", 5, 4, 8, (3, 1), (4, 4)))
    assert (counts.num_steps, counts.num_drafts) == (5, 4)
    assert (counts.accepted_per_position, counts.drafted_per_position) == ((3, 1), (4, 4))


def test_wait_features() -> None:
    found = features.wait_features(
        LoadView(num_running=2, num_waiting=1, num_queued=3, requests_per_s=0.5), 40, 8, 0.2
    )
    assert (found.num_running, found.num_waiting, found.num_queued, found.prefill_s) == (2, 1, 3, 0.2)


def test_step_records() -> None:
    record = StepRecord(
        step=1,
        started_s=0.0,
        seconds=0.05,
        kind="verify",
        num_sequences=2,
        num_decode_sequences=2,
        num_tokens=6,
        num_prefill_tokens=0,
        num_kv_tokens=300,
        num_logits_rows=6,
        num_sampled_rows=3,
        num_emitted_tokens=4,
        schedule_s=0.0,
        draft_s=0.01,
        forward_s=0.03,
        verify_s=0.01,
        drafts=(DraftWork("draft", 2, 2, 4, 3, 300, 0.01),),
    )
    x, y = features.step_features(record)
    assert (x.num_sequences, x.num_tokens, x.num_kv_tokens, x.num_sampled_rows) == (2, 6, 300, 3)
    assert (x.drafts[0].num_calls, x.drafts[0].num_draft_tokens) == (2, 4)
    assert (y.seconds, y.draft_s) == (0.05, (0.01,))


def test_no_torch_and_no_scikit_learn_are_imported() -> None:
    code = (
        "import sys, specgate.features, router_models.task_class as t; t.TaskClassifier();"
        "bad = {'torch', 'sklearn', 'scipy', 'yaml', 'aiohttp'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
