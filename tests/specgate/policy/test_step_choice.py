"""The optimiser against trying everything, on problems small enough for that."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_models.types import DraftCoefficients, StepCoefficients
from specgate.policy.few_rows import FewRows
from specgate.policy.step_choice import Prices, Rows, Settled, solve


def prices(
    token_s: float,
    call_s: float,
    above_s: float | None = None,
    knee: float | None = None,
    lead_s: float = 0.0,
    start_s: float = 0.0,
    calls: float = 1.0,
    asked: float = 1.0,
) -> Prices:
    step = StepCoefficients(
        c0_s=0.02, c_seq_s=1e-4, c_tok_s=token_s, c_kv_s=0.0, c_sample_s=0.0,
        c_tok_above_s=token_s if above_s is None else above_s, knee_tokens=knee, p0_s=0.02, p_tok_s=1e-3,
        p_dec_s=1e-3, p_kv_s=0.0, c_lead_s=lead_s,
        drafters={
            "ngram": DraftCoefficients(d_seq_s=5e-5),
            "draft": DraftCoefficients(
                d0_s=call_s, d_tok_s=1e-4, calls_per_token=calls, d_lead_s=start_s, asked_share=asked
            ),
        },
        num_steps=100,
    )  # fmt: skip
    return Prices.of(step, [("ngram", 2), ("draft", 3)], 0.0)


def make_rows(accept: list[tuple[float, float, float]], to: Prices) -> Rows:
    """One sequence per (chance of a match, n-gram acceptance, draft acceptance)."""
    n = len(accept)
    tokens, drafted, extra = np.ones((n, 6)), np.zeros((n, 6)), np.zeros((n, 6))
    for i, (match, a, b) in enumerate(accept):
        for arm, (rate, chance) in zip(to.arms, ((match, a), (1.0, b)), strict=True):
            for depth in range(1, arm.depth + 1):
                column = arm.first + depth - 1
                tokens[i, column] = 1 + rate * sum(chance**j for j in range(1, depth + 1))
                drafted[i, column] = rate * depth
                extra[i, column] = arm.seq_s + arm.token_s * rate * depth
    return Rows(tokens, drafted, extra, np.zeros((n, 6)))


def best_by_trying(rows: Rows, to: Prices, settled: Settled) -> float:
    n = len(rows.tokens)
    plans = (rows.cost(to, columns, settled) for columns in itertools.product(range(6), repeat=n))
    return max(plan.rate for plan in plans)


chance = st.floats(0.0, 1.0)


@settings(max_examples=40, deadline=None)
@given(
    accept=st.lists(st.tuples(chance, chance, chance), min_size=1, max_size=3),
    token_s=st.floats(1e-5, 0.02),
    call_s=st.floats(1e-4, 0.03),
    lead_s=st.one_of(st.just(0.0), st.floats(0.0, 0.02)),
    start_s=st.one_of(st.just(0.0), st.floats(0.0, 0.02)),
)
def test_no_plan_is_better(
    accept: list[tuple[float, float, float]], token_s: float, call_s: float, lead_s: float, start_s: float
) -> None:
    to = prices(token_s, call_s, lead_s=lead_s, start_s=start_s)
    rows = make_rows(accept, to)
    settled = Settled(to.plain_s(len(accept), 0.0, 0.0), len(accept))
    assert solve(rows, to, settled, 0.0, 12).rate >= best_by_trying(rows, to, settled) * (1 - 1e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    accept=st.lists(st.tuples(chance, chance, chance), min_size=1, max_size=3),
    call_s=st.floats(1e-4, 0.02),
    start_s=st.floats(0.0, 0.01),
    asked=st.floats(0.1, 1.0),
    stays=st.floats(0.3, 1.0),
)
def test_calls_that_are_made_now_and_then_cost_little_more_than_the_best_plan(
    accept: list[tuple[float, float, float]], call_s: float, start_s: float, asked: float, stays: float
) -> None:
    """Who gains little is left out where the calls made for it cost more."""
    to = prices(1e-3, call_s, lead_s=0.001, start_s=start_s, calls=asked * stays, asked=asked)
    rows = make_rows(accept, to)
    settled = Settled(to.plain_s(len(accept), 0.0, 0.0), len(accept))
    assert solve(rows, to, settled, 0.0, 12).rate >= best_by_trying(rows, to, settled) * 0.99


def test_one_who_gains_little_does_not_spoil_the_draft_of_one_who_gains_much() -> None:
    """Both drafting one token each was all that was found once: worse than no drafts at all."""
    to = prices(1e-3, 0.0114, lead_s=0.001, calls=0.3)
    rows = make_rows([(0.0, 0.0, 1.0), (0.0, 0.0, 0.16), (0.0, 0.0, 0.0)], to)
    settled = Settled(to.plain_s(3, 0.0, 0.0), 3)
    found = solve(rows, to, settled, 0.0, 12)
    few = FewRows(*(part.tolist() for part in (rows.tokens, rows.drafted, rows.extra_s, rows.penalty)))
    assert list(found.column) == list(solve(few, to, settled, 0.0, 12).column) == [5, 0, 0]


def test_a_draft_model_that_is_rarely_asked_is_asked_in_nearly_every_step_of_a_batch() -> None:
    to = prices(1e-3, 0.004, start_s=0.001, calls=0.2, asked=0.25)
    plain_s = [to.calls_s([5] * num, ()) for num in (1, 2, 16)]
    assert plain_s[0] == pytest.approx(0.2 * 3 * 0.004 + 0.25 * 0.001)
    assert plain_s[1] == pytest.approx(0.36 * 3 * 0.004 + 0.4375 * 0.001)
    assert plain_s[2] == pytest.approx(3 * 0.004 + 0.001, rel=0.04)
    together = to.calls_s([5] * 3, [(0, 0), (3, 13)])
    assert together == pytest.approx(plain_s[2])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    accept=st.lists(st.tuples(chance, chance, st.floats(0.0, 0.9)), min_size=2, max_size=2),
    token_s=st.floats(1e-5, 0.004),
    above_s=st.floats(1e-5, 0.02),
    knee=st.floats(2.0, 9.0),
)
def test_the_sharpest_knee_costs_a_fifth_at_most(
    accept: list[tuple[float, float, float]], token_s: float, above_s: float, knee: float
) -> None:
    to = prices(token_s, 0.003, above_s, knee)
    rows = make_rows(accept, to)
    settled = Settled(to.plain_s(len(accept), 0.0, 0.0), len(accept))
    assert solve(rows, to, settled, 0.0, 12).rate >= 0.8 * best_by_trying(rows, to, settled)


def test_calls_that_are_paid_for_anyway_are_free_for_the_others() -> None:
    to = prices(1e-4, 0.03)
    rows = make_rows([(0.0, 0.0, 0.8)], to)
    alone = solve(rows, to, Settled(to.plain_s(1, 0, 0), 1), 0.0, 6)
    beside = solve(rows, to, Settled(to.plain_s(2, 0, 0), 2, 3.0, 2.5, 0.0, shared=((0, 0), (3, 1))), 0.0, 6)
    assert alone.column == [0]
    assert beside.column == [5]


def test_a_change_of_method_must_be_worth_its_penalty_and_plain_decoding_never_is_penalised() -> None:
    to = prices(1e-3, 0.002)
    rows = make_rows([(0.9, 0.6, 0.62)], to)
    settled = Settled(to.plain_s(1, 0, 0), 1)
    free = solve(rows, to, settled, 0.0, 6).column[0]
    held = Rows(rows.tokens, rows.drafted, rows.extra_s, np.full((1, 6), 10.0))
    held.penalty[0, 0] = 0.0
    assert free > 0
    assert solve(held, to, settled, 0.0, 6).column == [0]


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_the_price_of_tokens_rises_with_the_batch(batch: int) -> None:
    to = prices(2e-3, 0.004)
    rows = make_rows([(1.0, 0.7, 0.7)] * batch, to)
    plan = solve(rows, to, Settled(to.plain_s(batch, 0, 0), batch), 0.0, 8)
    assert plan.rate >= batch / (to.plain_s(batch, 0, 0) + to.tokens_s(batch))
    if batch == 32:
        assert plan.num_drafted < 1.5 * batch  # deep drafts are for idle machines


def test_a_draft_that_is_rarely_found_pays_for_the_jump_only_when_it_is() -> None:
    """One token is cheap, the second dear, all further ones nearly free (a matrix instead of a vector)."""
    to = prices(0.05, 0.003, above_s=0.001, knee=2)
    rows = make_rows([(0.08, 0.9, 0.0)], to)
    settled = Settled(to.plain_s(1, 0, 0), 1)
    plan = solve(rows, to, settled, 0.0, 8)
    jump_s = to.tokens_s(1 + 2) - to.tokens_s(1)
    expected_s = settled.plain_s + to.tokens_s(1) + 0.08 * jump_s + to.arms[0].seq_s
    assert plan.column == [2]
    assert plan.seconds == pytest.approx(expected_s)
