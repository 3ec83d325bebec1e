"""Predicted waits: from the holds of the past, by the ages of those that run."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgate.clock import FakeClock
from specgate.pace import Hold, Pace


def after(clock: FakeClock, holds_s: list[float]) -> Pace:
    pace = Pace(clock)
    for seconds in holds_s:
        hold = pace.begin(1)
        clock.advance(seconds)
        pace.end(hold)
    return pace


def test_nothing_is_said_before_four_have_ended() -> None:
    clock = FakeClock()
    assert after(clock, [1.0] * 3).wait_s(1, 0) is None
    assert after(clock, [1.0] * 4).mean_s == pytest.approx(1.0)


def test_slots_are_free_in_the_order_of_their_ages() -> None:
    clock = FakeClock()
    pace = after(clock, [4.0] * 4)
    for num_slots in (1, 2, 1):
        pace.begin(num_slots)
        clock.advance(1.0)
    # Ages 3, 2 (two slots) and 1; one slot more is free.
    waits = [pace.wait_s(number, 1) for number in range(1, 8)]
    assert waits == pytest.approx([0, 1, 2, 2, 3, 5, 6])


def test_one_that_has_outlasted_most_is_judged_by_those_that_went_on() -> None:
    clock = FakeClock()
    pace = after(clock, [1.0] * 6 + [9.0] * 2)
    pace.begin(1)
    clock.advance(2.0)
    assert pace.wait_s(1, 0) == pytest.approx(7.0)
    clock.advance(10.0)  # longer than any: as long again
    assert pace.wait_s(1, 0) == pytest.approx(12.0)


def test_of_many_that_may_end_at_any_time_one_ends_soon() -> None:
    clock = FakeClock()
    pace = after(clock, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    for _ in range(8):
        pace.begin(1)
    assert [pace.wait_s(number, 0) for number in (1, 4, 8)] == pytest.approx([1.0, 4.0, 8.0])


@given(
    holds_s=st.lists(st.floats(0.01, 100), min_size=4, max_size=40),
    running=st.lists(st.tuples(st.integers(1, 3), st.floats(0, 50)), min_size=1, max_size=8),
    num_free=st.integers(-2, 3),
)
def test_more_slots_never_take_less_time(
    holds_s: list[float], running: list[tuple[int, float]], num_free: int
) -> None:
    clock = FakeClock()
    pace = after(clock, holds_s)
    for num_slots, seconds in running:
        pace.begin(num_slots)
        clock.advance(seconds)
    waits = [pace.wait_s(number, num_free) for number in range(1, 30)]
    known = [wait for wait in waits if wait is not None and wait >= 0]
    assert len(known) == len(waits)
    one_each = known[: max(0, num_free + sum(num_slots for num_slots, _ in running))]
    assert one_each == sorted(one_each)


def test_the_prediction_is_right_in_the_mean() -> None:
    """A simulated server of 8 slots with a queue that is never empty: what is foretold to a newcomer with
    two before it against what they wait."""
    clock, rng = FakeClock(), random.Random(3)
    pace = Pace(clock)
    ends: list[tuple[float, Hold]] = []
    foretold: list[float] = []
    came: list[float] = []
    for turn in range(4000):
        while len(ends) < 8:
            ends.append((clock.monotonic() + rng.choice([0.2, 1.0, 1.0, 3.0]), pace.begin(1)))
        ends.sort(key=lambda item: item[0])
        wait_s = pace.wait_s(3, 0)
        if turn >= 100 and wait_s is not None:
            foretold.append(wait_s)
            came.append(ends[2][0] - clock.monotonic())
        end_s, hold = ends.pop(0)
        clock.advance(end_s - clock.monotonic())
        pace.end(hold)
    assert sum(foretold) / sum(came) == pytest.approx(1.0, abs=0.25)
