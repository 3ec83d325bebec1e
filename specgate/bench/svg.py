"""Plots as inline SVG: no script, no picture files, colours from the page's style.

A plot has columns (rates, minutes) from left to right. Series are named; their colour follows from
the class `s-NAME` of the page's style.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 16, 44
MAX_NOTES = 8  # columns that leave room for a word on top of each
LOG_FROM = 8.0  # a log axis where the largest value is this many times the smallest
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Series:
    """A line: one value per column (None: a gap), with a word for each point's tooltip."""

    name: str
    values: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """The vertical axis. `unit` follows numbers; `reference` draws a line with a word beside it."""

    title: str
    unit: str = ""
    digits: int = 0
    reference: float | None = None
    from_zero: bool = True
    can_be_log: bool = False


class _Scale:
    """Values to pixels, and ticks for people."""

    def __init__(self, values: Sequence[float], axis: Axis) -> None:
        values = [*values, *([axis.reference] if axis.reference is not None else [])] or [0.0, 1.0]
        low, high = min(values), max(values)
        self.is_log = axis.can_be_log and low > 0 and high / low >= LOG_FROM
        if self.is_log:
            self.ticks = _log_ticks(low, high)
        else:
            if axis.from_zero:
                low, high = min(low, 0.0), max(high, 0.0)
            self.ticks = _ticks(low, high)
        self._low, self._high = self._map(self.ticks[0]), self._map(self.ticks[-1])

    def y(self, value: float) -> float:
        share = (self._map(value) - self._low) / ((self._high - self._low) or 1.0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def _map(self, value: float) -> float:
        return math.log10(value) if self.is_log else value


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers around [low, high], about five."""
    if high <= low:
        high = low + 1.0
    raw = (high - low) / 4
    power: float = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in _STEPS if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten around [low, high]."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    every = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max(index for index, tick in enumerate(every) if tick <= low)
    last = min(index for index, tick in enumerate(every) if tick >= high)
    return every[first : last + 1]


def line_plot(series: Sequence[Series], columns: Sequence[str], axis: Axis) -> str:
    """Lines over columns, with intervals where a series has them."""
    scale = _Scale(_all_values(series), axis)
    parts = [_frame(scale, axis), _column_labels(columns)]
    for one in series:
        points = [
            (_x(index, len(columns)), scale.y(value), value)
            for index, value in enumerate(one.values)
            if value is not None
        ]
        if not points:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<g class="s-{escape(one.name)}">')
        parts.append(_bars_of(one, scale, len(columns)))
        parts.append(f'<polyline class="line" points="{path}"/>')
        parts += [
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.6">'
            f"<title>{escape(one.name)}: {_number(value, axis)}</title></circle>"
            for x, y, value in points
        ]
        parts.append("</g>")
    return _svg(parts, axis.title)


def interval_plot(one: Series, labels: Sequence[str], columns: Sequence[str], axis: Axis) -> str:
    """A dot with its interval per column, and a word on top where there are few."""
    scale = _Scale(_all_values([one]), axis)
    parts = [_frame(scale, axis), _column_labels(columns), f'<g class="s-{escape(one.name)}">']
    parts.append(_bars_of(one, scale, len(columns)))
    for index, (value, label) in enumerate(zip(one.values, labels, strict=True)):
        if value is None:
            continue
        x = _x(index, len(columns))
        parts.append(
            f'<circle class="dot" cx="{x:.1f}" cy="{scale.y(value):.1f}" r="4.5">'
            f"<title>{_number(value, axis)}</title></circle>"
        )
        if len(columns) <= MAX_NOTES:
            parts.append(
                f'<text class="note" x="{x:.1f}" y="{TOP - 5}" text-anchor="middle">{escape(label)}</text>'
            )
    parts.append("</g>")
    return _svg(parts, axis.title)


def stack_plot(shares: Sequence[Mapping[str, float]], columns: Sequence[str], title: str) -> str:
    """Shares of a whole per column, stacked. Names in the order in which they first come."""
    axis = Axis(title, unit=" %")
    scale = _Scale([0.0, 100.0], axis)
    names = sorted({name for share in shares for name in share}, key=_stack_order)
    width = min(54.0, 0.62 * (WIDTH - LEFT - RIGHT) / max(1, len(columns)))
    parts = [_frame(scale, axis), _column_labels(columns)]
    for index, share in enumerate(shares):
        x, below = _x(index, len(columns)) - width / 2, 0.0
        for name in names:
            part = 100 * share.get(name, 0.0)
            if part <= 0:
                continue
            top, bottom = scale.y(below + part), scale.y(below)
            parts.append(
                f'<g class="s-{escape(name)}">'
                f'<rect class="bar" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}"'
                f' height="{bottom - top:.1f}">'
                f"<title>{escape(name)}: {part:.0f} %</title></rect></g>"
            )
            if bottom - top > 15 and width > 30:
                parts.append(
                    f'<text class="inbar" x="{x + width / 2:.1f}" y="{(top + bottom) / 2 + 4:.1f}"'
                    f' text-anchor="middle">{part:.0f}</text>'
                )
            below += part
    return _svg(parts, title)


def _stack_order(name: str) -> tuple[int, str]:
    known = ("baseline", "ngram", "draft")
    return (known.index(name) if name in known else len(known), name)


def _bars_of(one: Series, scale: _Scale, num_columns: int) -> str:
    parts = []
    for index, (low, high) in enumerate(zip(one.low, one.high, strict=True)):
        if low is None or high is None:
            continue
        x, top, bottom = _x(index, num_columns), scale.y(high), scale.y(low)
        parts.append(
            f'<path class="whisker" d="M{x:.1f},{top:.1f}V{bottom:.1f}'
            f'M{x - 5:.1f},{top:.1f}h10M{x - 5:.1f},{bottom:.1f}h10"/>'
        )
    return "".join(parts)


def _all_values(series: Sequence[Series]) -> list[float]:
    groups = [part for one in series for part in (one.values, one.low, one.high)]
    return [value for group in groups for value in group if value is not None]


def _x(index: int, num: int) -> float:
    return LEFT + (index + 0.5) * (WIDTH - LEFT - RIGHT) / max(1, num)


def _frame(scale: _Scale, axis: Axis) -> str:
    """Grid lines, their numbers, and the reference line."""
    parts = []
    for tick in scale.ticks:
        y = scale.y(tick)
        kind = "zero" if tick == 0 and not scale.is_log else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{_tick(tick)}{axis.unit}</text>"
        )
    if axis.reference is not None:
        y = scale.y(axis.reference)
        parts.append(f'<line class="reference" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return "".join(parts)


def _column_labels(columns: Sequence[str]) -> str:
    """Two lines a column at most; where there are many, not all are named."""
    every = max(1, math.ceil(len(columns) / 12))
    parts = []
    for index, column in enumerate(columns):
        if index % every:
            continue
        first, _, second = column.partition("\n")
        x = _x(index, len(columns))
        y = HEIGHT - BOTTOM + 17
        parts.append(
            f'<text class="tick strong" x="{x:.1f}" y="{y}" text-anchor="middle">{escape(first)}</text>'
        )
        if second:
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{y + 15}" text-anchor="middle">{escape(second)}</text>'
            )
    return "".join(parts)


def _tick(value: float) -> str:
    if abs(value) < 1e-12:
        return "0"
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 100 else f"{value:.3g}"


def _number(value: float, axis: Axis) -> str:
    return f"{value:.{axis.digits}f}{axis.unit}"


def _svg(parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg>"
    )
