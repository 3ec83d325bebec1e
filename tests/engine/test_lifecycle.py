"""Aborts, preemption, prefix sharing, echo, step records: what a request lives through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.engine import Engine
from engine.spec.drafter import DraftContext
from engine.spec.stub import StubDrafter, known_continuations
from engine.spec.tree import DraftTree
from engine.types import FinishReason
from tests.engine.harness import (
    GREEDY,
    VOCAB,
    Run,
    all_drafters,
    drive,
    make_engine,
    prompt,
    reference_greedy,
    reference_logits,
    request,
    target,
)

PROMPT = prompt(31, 22)


class LoggingDrafter(StubDrafter):
    """An always-right drafter that writes down its life cycle."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], name: str = "stub") -> None:
        known = {ids: reference_greedy(target(), ids, GREEDY.max_tokens) for ids in prompts}
        super().__init__(known_continuations(known), VOCAB, name=name)
        self.log: list[tuple[object, ...]] = []

    def begin(self, seq_id: str, token_ids: Sequence[int]) -> None:
        self.log.append(("begin", seq_id, len(token_ids)))

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        self.log += [("propose", context.seq_id, context.max_draft_tokens) for context in contexts]
        return super().propose(contexts)

    def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        self.log.append(("observe", seq_id, len(token_ids), num_accepted))

    def end(self, seq_id: str) -> None:
        self.log.append(("end", seq_id))


def test_a_drafter_begins_with_the_first_decode_and_ends_with_the_request() -> None:
    stub = LoggingDrafter([PROMPT])
    drive(make_engine({"stub": stub}), [request("a", PROMPT, replace(GREEDY, max_tokens=9), "stub")])
    assert stub.log == [
        ("begin", "a", 23),
        ("propose", "a", 4),
        ("observe", "a", 5, 4),
        ("propose", "a", 2),  # 3 tokens to go: 2 and the bonus
        ("observe", "a", 3, 2),
        ("end", "a"),
    ]


def test_a_request_that_never_drafts_costs_its_drafter_nothing() -> None:
    stub = LoggingDrafter([PROMPT])
    none = request("b", PROMPT, policy="stub", num_speculative_tokens=0)
    drive(make_engine({"stub": stub}), [request("a", PROMPT), none])
    assert stub.log == []


def test_preemption_ends_the_draft_and_keeps_the_answer() -> None:
    prompts = [prompt(40 + n, 8) for n in range(3)]
    stub = LoggingDrafter(prompts)
    engine = make_engine({"stub": stub}, num_blocks=13)
    run = drive(engine, [request(f"{n}", ids, GREEDY, "stub", 2) for n, ids in enumerate(prompts)])
    preempted = [key for key, item in run.finished.items() if item.stats and item.stats.num_preemptions]
    assert preempted
    for n, ids in enumerate(prompts):
        assert run.finished[f"{n}"].token_ids == reference_greedy(target(), ids, GREEDY.max_tokens)
    for key in preempted:
        events = [event[0] for event in stub.log if event[1] == key and event[0] in ("begin", "end")]
        assert events == ["begin", "end"] * (len(events) // 2)
        assert len(events) > 2


@pytest.mark.parametrize("num_steps", range(9))
def test_abort_at_any_moment(num_steps: int) -> None:
    """Waiting, prefilling, decoding, in the middle of verify windows: the others do not notice."""
    prompts = [prompt(50 + n, 20) for n in range(4)]
    stub = LoggingDrafter(prompts)
    engine = make_engine({"stub": stub}, max_batch_tokens=9, max_sequences=2)
    run = Run()
    for n, ids in enumerate(prompts):
        engine.add(request(f"{n}", ids, policy="stub"))
    for _ in range(num_steps):
        run.add_step(engine)
    left = {"1", "2"} - {key for key, item in run.finished.items() if item.finish_reason}
    assert [engine.abort(key) for key in sorted(left)] == [True] * len(left)
    assert not any(engine.abort(key) for key in left)  # twice is once
    engine.check_integrity()
    while engine.has_work:
        run.add_step(engine)
    engine.check_idle()
    for n, ids in enumerate(prompts):
        item = run.finished[f"{n}"]
        expected = reference_greedy(target(), ids, GREEDY.max_tokens)
        if f"{n}" in left:
            assert item.finish_reason is FinishReason.ABORT
            assert item.token_ids == expected[: len(item.token_ids)]
            assert item.stats is not None
            assert item.stats.num_output_tokens == len(item.token_ids)
        else:
            assert item.token_ids == expected
    begun = [event for event in stub.log if event[0] == "begin"]
    assert len(begun) == len([event for event in stub.log if event[0] == "end"])


def test_abort_of_the_last_request_is_still_told() -> None:
    engine = make_engine()
    engine.add(request("a", PROMPT))
    engine.abort("a")
    assert engine.has_work
    result = engine.step()
    assert [output.finish_reason for output in result.outputs] == [FinishReason.ABORT]
    assert result.record is None
    engine.check_idle()
    assert not engine.has_work
    assert not engine.abort("nobody")


def cached_tokens(engine: Engine, ids: tuple[int, ...], **fields: str) -> int:
    item = drive(engine, [request("x", ids, **fields)]).finished["x"]
    assert item.token_ids == reference_greedy(target(), ids, GREEDY.max_tokens)
    assert item.stats is not None
    return item.stats.num_cached_tokens


def test_a_cached_prefix_is_used_and_counted() -> None:
    engine = make_engine(all_drafters({}))
    assert cached_tokens(engine, PROMPT) == 0
    assert cached_tokens(engine, PROMPT) == 20  # whole blocks of 4 of 22 tokens
    assert cached_tokens(engine, PROMPT[:20]) == 16  # a full hit leaves a block to compute
    assert cached_tokens(engine, PROMPT[:21]) == 20
    assert cached_tokens(engine, PROMPT[:9] + (60,) * 9) == 8
    answer = tuple(reference_greedy(target(), PROMPT, GREEDY.max_tokens))
    follow_up = PROMPT + answer + prompt(1, 5)
    assert cached_tokens(engine, follow_up) == 44  # the answer's blocks too: 45 of 46 were computed
    assert cached_tokens(engine, PROMPT, policy="draft") == 20


def test_prefixes_are_not_shared_between_salts() -> None:
    engine = make_engine(all_drafters({}))
    assert cached_tokens(engine, PROMPT, cache_salt="tenant a", policy="draft") == 0
    assert cached_tokens(engine, PROMPT, cache_salt="tenant b", policy="draft") == 0
    assert cached_tokens(engine, PROMPT) == 0
    assert cached_tokens(engine, PROMPT, cache_salt="tenant a") == 20
    assert cached_tokens(engine, PROMPT, cache_salt="tenant b") == 20


def test_rejected_draft_tokens_never_enter_the_prefix_cache() -> None:
    """A prompt equal to text with a rejected draft in it must not hit beyond what was accepted."""
    expected = reference_greedy(target(), PROMPT, GREEDY.max_tokens)
    engine = make_engine(all_drafters({PROMPT: expected}))
    drive(engine, [request("a", PROMPT, replace(GREEDY, max_tokens=3), "wrong")])
    drafted = tuple((token + 1) % VOCAB for token in expected[1:])
    assert cached_tokens(engine, (*PROMPT, expected[0], *drafted[:9])) == 20
    assert cached_tokens(engine, PROMPT + tuple(expected[:9])) == 24  # 22 + 2 were computed and stand


@pytest.mark.parametrize("policy", ["baseline", "right2", "ngram", "draft"])
@pytest.mark.parametrize("budget", [5, 512])
def test_echo_gives_the_prompts_logprobs(policy: str, budget: int) -> None:
    """Also when the prompt is cached, chunked, or the request preempted."""
    prompts = [PROMPT, PROMPT[:1], prompt(33, 9)]
    known = {ids: reference_greedy(target(), ids, GREEDY.max_tokens) for ids in prompts}
    engine = make_engine(all_drafters(known), max_batch_tokens=budget, num_blocks=18)
    drive(engine, [request("fill the cache", PROMPT)])
    params = replace(GREEDY, num_logprobs=2, has_prompt_logprobs=True)
    run = drive(engine, [request(f"{n}", ids, params, policy) for n, ids in enumerate(prompts)])
    for n, ids in enumerate(prompts):
        item = run.finished[f"{n}"]
        assert item.token_ids == known[ids]
        assert item.prompt_logprobs[0] is None
        rows = reference_logits(target(), ids).log_softmax(-1)
        assert len(item.prompt_logprobs) == len(ids)
        for row, token, entry in zip(rows, ids[1:], item.prompt_logprobs[1:], strict=False):
            assert entry is not None
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert [t for t, _ in entry.top] == row.topk(2).indices.tolist()


def test_echo_survives_a_preemption_within_its_prompt() -> None:
    ids = prompt(34, 24)
    params = replace(GREEDY, max_tokens=2, num_logprobs=0, has_prompt_logprobs=True)
    engine = make_engine(num_blocks=8, max_batch_tokens=2)
    run = drive(engine, [request("grows", PROMPT[:3]), request("echo", ids, params)])
    item = run.finished["echo"]
    assert item.stats is not None
    assert item.stats.num_preemptions == 1
    assert len(item.token_ids) == 2
    assert [entry.token_id for entry in item.prompt_logprobs[1:] if entry] == list(ids[1:])


def test_echo_alone_generates_nothing() -> None:
    params = replace(GREEDY, max_tokens=0, num_logprobs=0, has_prompt_logprobs=True)
    item = drive(make_engine(), [request("a", PROMPT, params)]).finished["a"]
    assert item.token_ids == []
    assert item.finish_reason is FinishReason.LENGTH
    assert len(item.prompt_logprobs) == len(PROMPT)
    assert item.stats is not None
    assert item.stats.num_target_steps == 0


def test_step_records_add_up() -> None:
    ticks = iter(range(10**6))
    prompts = [prompt(60 + n, 11) for n in range(3)]
    known = {ids: reference_greedy(target(), ids, GREEDY.max_tokens) for ids in prompts}
    engine = make_engine(all_drafters(known), clock=lambda: float(next(ticks)), max_batch_tokens=24)
    sampled = replace(GREEDY, temperature=1.0, seed=4)
    requests = [
        request("0", prompts[0], policy="right1"),
        request("1", prompts[1], sampled, "ngram"),
        request("2", prompts[2], policy="draft"),
        request("3", prompts[2]),
    ]
    run = drive(engine, requests)
    records, finished = run.records, run.finished.values()
    stats = [item.stats for item in finished if item.stats is not None]
    assert [record.step for record in records] == list(range(len(records)))
    assert sum(r.num_emitted_tokens for r in records) == sum(s.num_output_tokens for s in stats)
    assert sum(r.num_prefill_tokens for r in records) == sum(
        s.num_prompt_tokens - s.num_cached_tokens for s in stats
    )
    works = [work for record in records for work in record.drafts]
    assert sum(w.num_draft_tokens for w in works) == sum(s.num_draft_tokens for s in stats) > 0
    assert sum(w.num_accepted_tokens for w in works) == sum(s.num_accepted_tokens for s in stats) > 0
    assert any(w.num_calls > 0 and w.num_kv_tokens > 0 for w in works if w.method == "draft")
    assert sum(s.draft_s for s in stats) == pytest.approx(sum(w.seconds for w in works))
    assert sum(s.num_target_steps for s in stats) == sum(
        r.num_logits_rows - sum(w.num_draft_tokens for w in r.drafts) for r in records
    )
    for record in records:
        parts = record.schedule_s + record.draft_s + record.forward_s + record.verify_s
        assert record.seconds == parts > 0
        drafted = sum(w.num_draft_tokens for w in record.drafts)
        assert record.num_tokens == record.num_prefill_tokens + record.num_decode_sequences + drafted
        assert record.num_kv_tokens >= record.num_tokens
        assert drafted <= record.num_window_kv_tokens <= drafted * record.num_kv_tokens
        if record.num_sequences == 1:
            assert record.num_window_kv_tokens == drafted * record.num_kv_tokens
        assert record.num_sampled_rows <= record.num_logits_rows
        assert record.kernels
    assert sum(r.num_sampled_rows for r in records) >= finished_rows(run, "1")


def finished_rows(run: Run, key: str) -> int:
    stats = run.finished[key].stats
    assert stats is not None
    return stats.num_target_steps + stats.num_draft_tokens


def test_queue_wait_is_from_arrival_to_the_first_step() -> None:
    now = [0.0]
    engine = make_engine(clock=lambda: now[0], max_sequences=1)
    for name in ("a", "b"):
        engine.add(request(name, PROMPT, replace(GREEDY, max_tokens=2)))
    run = Run()
    for now[0] in (5.0, 6.0, 9.0, 10.0):
        run.add_step(engine)
    waits = {key: item.stats.queue_wait_s for key, item in run.finished.items() if item.stats}
    assert waits == {"a": 5.0, "b": 9.0}


class KVWatch(TorchDispatchMode):
    """Counts torch operations that copy out of the KV cache; kernels read it in place."""

    def __init__(self, *caches: torch.Tensor) -> None:
        super().__init__()
        self.storages = {cache.untyped_storage().data_ptr() for cache in caches}
        self.copies: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        reads = any(isinstance(a, torch.Tensor) and self.is_cache(a) for a in args)
        if reads and isinstance(out, torch.Tensor) and out.numel() > 1 and not self.is_cache(out):
            self.copies.append(str(func))
        return out

    def is_cache(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.storages


def test_one_forward_a_step_and_no_copy_of_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    forward, num_forwards = type(model).forward, 0

    def counted(self: object, *args: object) -> torch.Tensor:
        nonlocal num_forwards
        num_forwards += self is model
        return forward(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(type(model), "forward", counted)
    known = {PROMPT: reference_greedy(model, PROMPT, GREEDY.max_tokens)}
    engine = make_engine(all_drafters(known), max_batch_tokens=32)
    policies = ("baseline", "right", "wrong", "ngram", "draft")
    requests = [request(policy, PROMPT + prompt(n, n), policy=policy) for n, policy in enumerate(policies)]
    num_forwards = 0
    cache = engine._runner.cache
    with KVWatch(cache.key, cache.value) as watch:
        run = drive(engine, requests)
    assert num_forwards == len(run.records) > 0
    if "attention=c" not in run.records[0].kernels:
        pytest.skip("without the C kernels, keys and values are gathered by design")
    assert watch.copies == []
    with watch:
        cache.key[:, [0, 1]].sum()
    assert watch.copies  # it does see a gather
