"""The start-up sweep on a small engine: what it teaches, its budget, and that it leaves nothing behind."""

from __future__ import annotations

import itertools

from engine.types import StepRecord
from specgate.backends.embedded.sweep import sweep
from specgate.step_learning import StepLearner, kind_of
from tests.engine.harness import GREEDY, all_drafters, drive, make_engine, prompt, request


def run(budget_s: float = 1e9, tick_s: float = 0.0) -> tuple[list[StepRecord], list[float]]:
    engine = make_engine(drafters={name: all_drafters({})[name] for name in ("ngram", "draft")})
    before = engine.planner
    ticks = itertools.count()
    records: list[StepRecord] = []
    shares: list[float] = []
    num = sweep(
        engine, budget_s, lambda: next(ticks) * tick_s, records.append, lambda _, share: shares.append(share)
    )
    assert num == len(records)
    assert engine.planner is before
    engine.check_idle()
    answer = drive(engine, [request("after", prompt(1, 20), GREEDY)])
    assert answer.finished["after"].token_ids
    return records, shares


def test_it_covers_prompts_batches_and_every_drafter() -> None:
    records, _ = run()
    kinds = {kind_of(record) for record in records}
    assert {"prefill", "baseline", "ngram", "draft"} <= kinds
    assert len({record.num_decode_sequences for record in records}) >= 4
    assert any(record.num_sampled_rows for record in records)
    assert all(record.is_warm_up for record in records)
    learner = StepLearner()
    for record in records:
        learner.observe(record)
    known = learner.model.coefficients()
    assert known.num_steps > 20
    assert set(known.drafters) >= {"ngram", "draft"}
    assert known.drafters["draft"].calls_per_token > 0
    assert any(work.num_fill_tokens for record in records for work in record.drafts)


def test_the_budget_ends_it_and_progress_is_told() -> None:
    records, shares = run(budget_s=10.0, tick_s=1.0)
    assert len(records) == 10
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
