"""Every second of the engine's steps is charged to a sequence, once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest

from engine.types import BASELINE, StepRecord
from tests.engine.harness import Run, all_drafters, make_engine, prompt, request


def _ticking() -> Callable[[], float]:
    """Each look at it is a different time after the last."""
    ticks = itertools.accumulate(0.001 * (1 + n % 7) for n in itertools.count())
    return lambda: next(ticks)


def _of_steps(records: list[StepRecord]) -> Counter[tuple[str, str]]:
    """By method and part, as /metrics counts them."""
    total: Counter[tuple[str, str]] = Counter()
    for record in records:
        drafted = 0
        for work in record.drafts:
            tokens = work.num_sequences + work.num_draft_tokens
            drafted += tokens
            total[work.method, "draft"] += work.seconds
            total[work.method, "forward"] += record.forward_s * tokens / record.num_tokens
            total[work.method, "verify"] += record.verify_s * tokens / record.num_tokens
        share = (record.num_tokens - drafted) / record.num_tokens
        total[BASELINE, "forward"] += record.forward_s * share
        total[BASELINE, "verify"] += record.verify_s * share
    return total


@pytest.mark.parametrize("num_blocks", [256, 18], ids=["roomy", "with preemptions"])
def test_what_sequences_are_charged_adds_up_to_the_steps(num_blocks: int) -> None:
    prompts = {
        policy: prompt(seed, 10 + 9 * seed) for seed, policy in enumerate(("baseline", "ngram", "draft"))
    }
    engine = make_engine(all_drafters({}), clock=_ticking(), num_blocks=num_blocks, max_batch_tokens=24)
    for policy, ids in prompts.items():
        engine.add(request(policy, ids, policy=policy))
    engine.add(request("left", prompt(9, 12), policy="ngram"))
    run = Run()
    while engine.has_work:
        run.add_step(engine)
        if len(run.records) == 9:
            engine.abort("left")
    charged: Counter[tuple[str, str]] = Counter()
    for finished in run.finished.values():
        assert finished.stats is not None
        for use in finished.stats.device:
            charged[use.method, "draft"] += use.draft_s
            charged[use.method, "forward"] += use.forward_s
            charged[use.method, "verify"] += use.verify_s
    expected = {key: seconds for key, seconds in _of_steps(run.records).items() if seconds}
    assert {key: seconds for key, seconds in charged.items() if seconds} == pytest.approx(expected)
    assert {method for method, _ in expected} == {BASELINE, "ngram", "draft"}
    if num_blocks == 18:
        assert sum(record.num_preemptions for record in run.records) > 0


def test_prompt_time_and_decoded_tokens_are_told_apart() -> None:
    engine = make_engine(all_drafters({}), clock=_ticking(), max_batch_tokens=16)
    engine.add(request("a", prompt(1, 40)))
    run = Run()
    while engine.has_work:
        run.add_step(engine)
    stats = run.finished["a"].stats
    assert stats is not None
    (use,) = stats.device
    assert use.num_tokens == stats.num_output_tokens - 1  # the first came with the prompt's last chunk
    prefill = [r.forward_s + r.verify_s for r in run.records if r.num_prefill_tokens]
    assert len(prefill) == 3
    assert use.prefill_s == pytest.approx(sum(prefill))
    assert use.seconds == pytest.approx(sum(r.forward_s + r.verify_s for r in run.records))
