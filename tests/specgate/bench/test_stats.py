"""The statistics, against numbers worked out by hand."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgate.bench.stats import (
    NO_INTERVAL,
    Pairs,
    geometric_mean,
    geometric_mean_ratio,
    mean,
    percentiles,
    ratio_of_means,
)


def test_percentiles_interpolate_between_order_statistics() -> None:
    assert percentiles([4, 1, 3, 2]) == pytest.approx({"p50": 2.5, "p95": 3.85, "p99": 3.97})
    assert percentiles([7.0]) == {"p50": 7.0, "p95": 7.0, "p99": 7.0}


def test_nothing_gives_none() -> None:
    assert percentiles([]) == {"p50": None, "p95": None, "p99": None}
    assert mean([]) is None
    assert geometric_mean([]) is None
    assert ratio_of_means(Pairs((), ())) == NO_INTERVAL


def test_means() -> None:
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert geometric_mean([1.0, 4.0, 16.0]) == pytest.approx(4.0)


def test_a_ratio_is_that_of_the_means_not_the_mean_of_ratios() -> None:
    found = ratio_of_means(Pairs((30.0, 10.0), (10.0, 10.0)))
    assert found.value == pytest.approx(2.0)  # 20 / 10; the mean of 3 and 1 would be 2 as well
    found = ratio_of_means(Pairs((30.0, 10.0), (10.0, 40.0)))
    assert found.value == pytest.approx(0.8)  # 20 / 25, where the mean of 3 and 0.25 is 1.625


def test_a_constant_ratio_has_no_spread() -> None:
    theirs = tuple(float(number) for number in range(1, 40))
    found = ratio_of_means(Pairs(tuple(1.1 * value for value in theirs), theirs))
    assert found.value == pytest.approx(1.1)
    assert (found.low, found.high) == pytest.approx((1.1, 1.1))


def test_the_interval_has_the_width_theory_gives() -> None:
    rng = random.Random(3)
    num = 400
    pairs = Pairs(tuple(rng.gauss(100, 20) for _ in range(num)), (100.0,) * num)
    found = ratio_of_means(pairs)
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.2 / math.sqrt(num), rel=0.15)


def test_what_shares_its_luck_is_resampled_together() -> None:
    """Twenty slices of twenty equal requests say no more than twenty requests."""
    rng = random.Random(1)
    levels = [rng.uniform(50, 150) for _ in range(20)]
    ours = tuple(level for level in levels for _ in range(20))
    groups = tuple(number for number in range(20) for _ in range(20))
    single = ratio_of_means(Pairs(ours, (100.0,) * 400))
    grouped = ratio_of_means(Pairs(ours, (100.0,) * 400, groups))
    few = ratio_of_means(Pairs(tuple(levels), (100.0,) * 20))

    def width(found: object) -> float:
        return found.high - found.low  # type: ignore[attr-defined]

    assert grouped.value == pytest.approx(single.value)
    assert width(grouped) == pytest.approx(width(few), rel=0.1)
    assert width(grouped) > 3 * width(single)


def test_every_cell_weighs_the_same() -> None:
    slow = Pairs((2000.0,) * 3, (1000.0,) * 3)
    quick = Pairs((1.0,) * 300, (2.0,) * 300)
    assert geometric_mean_ratio([slow, quick]).value == pytest.approx(1.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)), min_size=1, max_size=30), st.integers(0, 99))
def test_the_interval_repeats_and_holds_the_estimate_of_one_group(
    rows: list[tuple[float, float]], seed: int
) -> None:
    pairs = Pairs(tuple(a for a, _ in rows), tuple(b for _, b in rows))
    found = ratio_of_means(pairs, seed)
    assert found == ratio_of_means(pairs, seed)
    ratios = [a / b for a, b in rows]
    assert found.low is not None
    assert found.high is not None
    assert min(ratios) * 0.999 <= found.low <= found.high <= max(ratios) * 1.001
