"""What a client makes of a stream, however it is cut into pieces."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgate.bench.record import Job, RawAnswer, Record, read_answer

JOB = Job("cell/1", "p7", "chat", "chat/completions", {}, arrival_s=2.5)
SPECGATE = {"policy": "ngram", "num_drafts": 2, "timings": {"queue_wait_ms": 12.5}, "policy_changes": []}


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def content(text: str | None, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])


EVENTS = [
    event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]),
    content("Grü"),
    content("ße 世"),
    content("界", "length"),
    event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 5}, specgate=SPECGATE),
    b"data: [DONE]\n\n",
]
STREAM = b"".join(EVENTS)


def answer(pieces: list[tuple[float, bytes]], status: int = 200, due_s: float = 10.0) -> RawAnswer:
    headers = {"X-SpecGate-Policy": "ngram", "X-SpecGate-Reason": "rule", "X-SpecGate-Task": "chat"}
    return RawAnswer(JOB, due_s, 10.25, 14.5, status, headers, pieces)


def test_times_count_from_when_the_request_was_due() -> None:
    pieces = [(11.0, EVENTS[0]), (12.0, EVENTS[1]), (14.0, b"".join(EVENTS[2:]))]
    record = read_answer(answer(pieces), "auto")
    assert record.error is None
    assert record.send_lag_ms == pytest.approx(250.0)
    assert record.ttft_ms == pytest.approx(2000.0)  # 12 - 10, though it was sent at 10.25
    assert record.e2e_ms == pytest.approx(4500.0)
    assert record.tpot_ms == pytest.approx((4500.0 - 2000.0) / 4)
    assert record.itl_ms == pytest.approx((2000.0, 0.0))
    assert (record.num_events, record.num_output_tokens, record.num_prompt_tokens) == (3, 5, 9)
    assert record.text == "Grüße 世界"
    assert record.text_sha256 == hashlib.sha256("Grüße 世界".encode()).hexdigest()
    assert (record.policy, record.reason, record.task_predicted) == ("ngram", "rule", "chat")
    assert (record.queue_wait_ms, record.finish_reason, record.arrival_s) == (12.5, "length", 2.5)


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_pieces_may_be_cut_anywhere(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [(10.0 + i, STREAM[a:b]) for i, (a, b) in enumerate(itertools.pairwise(edges))]
    record = read_answer(answer(pieces), "auto")
    whole = read_answer(answer([(10.0, STREAM)]), "auto")
    assert record.error is None
    assert (record.text, record.num_output_tokens, record.specgate) == (
        whole.text, whole.num_output_tokens, whole.specgate,
    )  # fmt: skip
    assert list(record.emitted_s) == sorted(record.emitted_s)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (answer([(1.0, b'{"error": {"message": "queue full"}}')], 429), "429 queue full"),
        (answer([(1.0, b"<html>")], 502), "502 <html>"),
        (answer([(1.0, STREAM.replace(b"data: [DONE]\n\n", b""))]), "without [DONE]"),
        (answer([(1.0, event(error={"message": "engine lost"}))]), "in mid-stream: engine lost"),
        (answer([(1.0, b"data: {nonsense\n\n")]), "no OpenAI chunk"),
        (answer([(1.0, b"data: [1]\n\n")]), "no OpenAI chunk"),
        (RawAnswer(JOB, 0.0, fault="the connection failed"), "the connection failed"),
        (RawAnswer(JOB, 0.0), "no answer"),
    ],
)
def test_anything_but_a_whole_answer_is_an_error(raw: RawAnswer, expected: str) -> None:
    record = read_answer(raw, "auto")
    assert not record.is_ok
    assert record.error is not None
    assert expected in record.error


def test_a_stream_of_completions_and_a_single_token() -> None:
    stream = event(choices=[{"text": "x", "finish_reason": "stop"}]) + event(
        choices=[], usage={"completion_tokens": 1}
    )
    record = read_answer(answer([(11.0, stream + b"data: [DONE]\n\n")]), "default")
    assert (record.text, record.tpot_ms, record.is_ok) == ("x", None, True)


def record(policy: str, num: int, *changes: tuple[int, str]) -> Record:
    told = {"policy_changes": [{"token_index": at, "policy": name} for at, name in changes]}
    return Record("j", "p", "chat", "auto", 0.0, 0.0, num_output_tokens=num, policy=policy, specgate=told)


@pytest.mark.parametrize(
    ("given_record", "expected"),
    [
        (record("ngram", 10), {"ngram": 10}),
        (record("ngram", 10, (4, "baseline")), {"ngram": 4, "baseline": 6}),
        (record("ngram", 10, (4, "baseline"), (7, "ngram")), {"ngram": 7, "baseline": 3}),
        (record("ngram", 10, (0, "draft"), (99, "ngram")), {"draft": 10}),
        (record("ngram", 0), {}),
    ],
)
def test_tokens_by_policy_follow_the_changes(given_record: Record, expected: dict[str, int]) -> None:
    assert given_record.policy_tokens() == expected
