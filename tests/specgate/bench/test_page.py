"""Plots and page: well-formed, self-contained, and true to their numbers."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgate.bench.svg import HEIGHT, WIDTH, Axis, Series, interval_plot, line_plot, stack_plot

NUMBERS = st.none() | st.floats(-1e6, 1e9)


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def points(svg: str) -> list[tuple[float, float]]:
    return [(float(c.get("cx") or 0), float(c.get("cy") or 0)) for c in parsed(svg).iter("circle")]


@settings(deadline=None)
@given(
    st.lists(st.lists(NUMBERS, min_size=4, max_size=4), min_size=1, max_size=4), st.booleans(), st.booleans()
)
def test_any_numbers_make_a_plot_inside_its_frame(
    values: list[list[float | None]], can_be_log: bool, from_zero: bool
) -> None:
    series = [Series(f"arm<{i}>", tuple(row)) for i, row in enumerate(values)]
    svg = line_plot(series, ["a\nb", "&", "c", "d"], Axis("y", can_be_log=can_be_log, from_zero=from_zero))
    found = points(svg)
    assert len(found) == sum(value is not None for row in values for value in row)
    assert all(0 <= x <= WIDTH and -0.5 <= y <= HEIGHT + 0.5 for x, y in found)


def test_larger_is_higher_and_later_is_further_right() -> None:
    for is_log in (False, True):
        svg = line_plot([Series("auto", (1.0, 10.0, 100.0))], ["a", "b", "c"], Axis("ms", can_be_log=is_log))
        (x1, y1), (x2, y2), (x3, y3) = points(svg)
        assert x1 < x2 < x3
        assert y1 > y2 > y3
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)  # the log axis gives decades the same height


def test_stacks_reach_the_whole() -> None:
    svg = stack_plot([{"ngram": 0.25, "baseline": 0.75}, {"draft": 1.0}], ["a", "b"], "mix")
    heights = [float(r.get("height") or 0) for r in parsed(svg).iter("rect")]
    assert heights[0] + heights[1] == pytest.approx(heights[2], abs=0.3)
    assert heights[0] == pytest.approx(3 * heights[1], abs=0.3)  # baseline is at the bottom


def test_intervals_are_drawn_where_they_are_known() -> None:
    one = Series("auto", (1.0, None), (0.5, None), (2.0, None))
    svg = interval_plot(one, ["vs ngram", ""], ["a", "b"], Axis("regret"))
    assert len(re.findall('class="whisker"', svg)) == 1
    assert "vs ngram" in svg
