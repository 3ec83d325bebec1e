"""What is computed number by number for a few sequences is what numpy computes for many."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import PolicyAssignment
from router_models.types import DraftCoefficients, StepCoefficients
from specgate.policy import few_rows
from specgate.policy.few_rows import FewRows
from specgate.policy.reasons import Reason
from specgate.policy.seats import Seat, Table
from specgate.policy.shut import Shut, ShutList
from specgate.policy.step_choice import Prices, Rows, Settled, solve
from tests.specgate.policy.guard_samples import model_view, step_view

NUM_COLUMNS = 8  # plain, two of n-gram, three and two of draft models
small = st.floats(0.0, 0.02)
shares = st.one_of(st.just(1.0), st.floats(0.05, 1.0))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Prices, FewRows, Settled]:
    names = ("ngram", "draft", "large")
    drafters = {
        name: DraftCoefficients(
            d0_s=draw(small),
            d_tok_s=draw(small),
            calls_per_token=0.0 if name == "ngram" else draw(shares),
            asked_share=draw(shares),
            d_lead_s=draw(small),
        )
        for name in names
    }
    step = StepCoefficients(
        c0_s=0.02, c_seq_s=1e-4, c_tok_s=draw(small), c_kv_s=0.0, c_sample_s=0.0, c_tok_above_s=0.0,
        knee_tokens=None, p0_s=0.02, p_tok_s=1e-3, p_dec_s=1e-3, p_kv_s=0.0, c_lead_s=draw(small),
        drafters=drafters, num_steps=100,
    )  # fmt: skip
    prices = Prices.of(step, list(zip(names, (2, 3, 2), strict=True)), 0.0)
    num = draw(st.integers(1, few_rows.MOST))

    def table(plain: float, values: st.SearchStrategy[float]) -> list[list[float]]:
        row = st.lists(values, min_size=NUM_COLUMNS - 1, max_size=NUM_COLUMNS - 1)
        return [[plain, *draw(row)] for _ in range(num)]

    penalties = st.one_of(st.just(0.0), st.floats(0, 1), st.just(1e9))
    rows = FewRows(
        table(1.0, st.floats(1, 4)), table(0.0, st.floats(0, 3)), table(0.0, small), table(0.0, penalties)
    )
    nobody = (0, 0)
    shared = draw(st.sampled_from([(), (nobody,) * 3, (nobody, (1, 2), nobody), (nobody, (3, 1), (2, 4))]))
    return prices, rows, Settled(prices.plain_s(num, 90.0, 0.0), num, 1.0, 1.0, 0.001, shared=shared)


def as_arrays(rows: FewRows) -> Rows:
    return Rows(*(np.array(getattr(rows, field.name)) for field in dataclasses.fields(rows)))


@settings(max_examples=400, deadline=None)
@given(problems(), st.floats(1.0, 400.0))
def test_choices_and_costs_are_those_of_the_arrays(
    problem: tuple[Prices, FewRows, Settled], rate: float
) -> None:
    prices, few, settled = problem
    many = as_arrays(few)
    chosen = few.choose(prices, settled.shared, rate, prices.token_s)
    assert chosen == many.choose(prices, settled.shared, rate, prices.token_s)
    told, expected = few.cost(prices, chosen, settled), many.cost(prices, chosen, settled)
    assert told.column == expected.column
    assert dataclasses.astuple(told)[1:] == pytest.approx(dataclasses.astuple(expected)[1:])
    assert solve(few, prices, settled, 0.0, 6).rate == pytest.approx(
        solve(many, prices, settled, 0.0, 6).rate, rel=2e-3
    )


counts = st.integers(0, 40).flatmap(
    lambda steps: st.integers(0, steps).flatmap(
        lambda drafts: st.integers(drafts, 4 * drafts).flatmap(
            lambda tokens: st.tuples(st.just(steps), st.just(drafts), st.just(tokens), st.integers(0, tokens))
        )
    )
)


def filled(told: Sequence[dict[str, Any]], shut: ShutList) -> tuple[Table, list[Seat]]:
    table = Table(model_view("ngram", "draft"))
    table.need(2 * few_rows.MOST)
    seats = []
    for row, about in enumerate(told):
        name = f"s{row}"
        sequence = step_view(**{name: PolicyAssignment("ngram", 3)}).sequences[0]
        sequence = dataclasses.replace(sequence, temperature=about["temperature"], num_tokens=about["kv"])
        seat = Seat(sequence, row, table.num_arms)
        table.place(seat)
        if about["is_unknown"]:
            seat.curves = [seat.curves[0], None]
        table.enforce(seat, about["column"])
        seat.counts = [list(c) for c in about["counts"]]
        seat.loaded = list(about["loaded"])
        seat.changed_step, seat.num_changes = about["changed_step"], about["num_changes"]
        seat.is_planned = about["is_planned"]
        seats.append(seat)
    return table, seats


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries({
            "temperature": st.sampled_from([0.0, 0.7]), "kv": st.integers(1, 2000),
            "column": st.integers(0, 8),
            "counts": st.tuples(counts, counts), "loaded": st.tuples(st.booleans(), st.booleans()),
            "changed_step": st.integers(0, 100), "num_changes": st.integers(0, 4),
            "is_planned": st.booleans(), "is_unknown": st.booleans(),
        }),
        min_size=few_rows.MOST + 1, max_size=2 * few_rows.MOST,
    ),
    st.booleans(),
)  # fmt: skip
def test_rows_filled_one_by_one_are_those_filled_together(told: list[dict[str, Any]], is_shut: bool) -> None:
    shut = ShutList([Shut("draft", Reason.LATENCY_GUARD, "chat")] if is_shut else [])
    together, seats = filled(told, shut)
    together.fill(seats, shut, 100)
    alone, others = filled(told, shut)
    for seat in others:
        alone.fill([seat], shut, 100)
    rows, one_by_one = together.rows(range(len(seats))), alone.rows(range(len(seats)))
    assert isinstance(rows, Rows)
    for name in ("tokens", "drafted", "extra_s", "penalty"):
        np.testing.assert_allclose(getattr(one_by_one, name), getattr(rows, name), rtol=1e-9, atol=1e-12)
    for seat, other in zip(seats, others, strict=True):
        assert np.allclose(seat.settled, other.settled)
    few = alone.rows([1])
    assert isinstance(few, FewRows)
    np.testing.assert_array_equal(few.tokens, one_by_one.tokens[1:2])


@given(counts, counts, st.integers(0, 1), st.integers(0, 8))
def test_what_is_news_of_one_arm_is_all_that_is_computed_anew(
    before: tuple[int, ...], after: tuple[int, ...], arm: int, column: int
) -> None:
    about = {
        "temperature": 0.7, "kv": 90, "column": column, "counts": (before, before), "loaded": (True, True),
        "changed_step": 0, "num_changes": 0, "is_planned": True, "is_unknown": False,
    }  # fmt: skip
    tables = []
    for is_whole in (True, False):
        table, (seat,) = filled([about], ShutList([]))
        table.fill([seat], ShutList([]), 100)
        seat.counts[arm] = list(after)
        seat.stale.add(arm)
        table.fill([seat], ShutList([]), 100, is_whole=is_whole)
        assert not seat.stale
        tables.append(table)
    for name in ("tokens", "drafted", "extra_s", "penalty"):
        np.testing.assert_array_equal(getattr(tables[0], name)[0], getattr(tables[1], name)[0])
