"""How good predictions are: scored on outcomes that the model had not learned from yet."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

WINDOW = 2000
_MIN_SCORED = 30
_MIN_VARIATION = 0.05  # standard deviation over mean: of outcomes that hardly differ, R2 says nothing


@dataclass(frozen=True, slots=True)
class Score:
    """`r2` and `mape` are None for too few outcomes, `r2` also where all are nearly the same.
    `repeat_mape` is how far equal work itself scatters."""

    num: int
    r2: float | None
    mape: float | None
    repeat_mape: float | None = None
    bias: float | None = None  # mean of (predicted - actual) / actual


class ScoreWindow:
    """The last outcomes of one kind with what was predicted for them."""

    def __init__(self, size: int = WINDOW) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=size)
        self._repeats: deque[float] = deque(maxlen=size)
        self._last: dict[tuple[float, ...], float] = {}

    def add(self, predicted: float, actual: float, work: tuple[float, ...] | None = None) -> None:
        """`work` names outcomes of equal work: their scatter is the noise no model can explain."""
        if not (math.isfinite(predicted) and actual > 0):
            return
        self._pairs.append((predicted, actual))
        if work is None:
            return
        before = self._last.get(work)
        if before is not None:
            self._repeats.append(2 * abs(actual - before) / (actual + before))
        if len(self._last) > WINDOW:
            self._last.clear()
        self._last[work] = actual

    def pairs(self) -> list[tuple[float, float]]:
        """(predicted, actual), oldest first."""
        return list(self._pairs)

    def score(self) -> Score:
        """Over the window."""
        repeat = sum(self._repeats) / len(self._repeats) / math.sqrt(2) if self._repeats else None
        return score(self.pairs(), repeat)


def score(pairs: list[tuple[float, float]], repeat_mape: float | None = None) -> Score:
    """R2 and MAPE of (predicted, actual) pairs."""
    n = len(pairs)
    if n < _MIN_SCORED:
        return Score(n, None, None, repeat_mape)
    mean = sum(actual for _, actual in pairs) / n
    spread = sum((actual - mean) ** 2 for _, actual in pairs)
    errors = sum((actual - predicted) ** 2 for predicted, actual in pairs)
    relative = [(predicted - actual) / actual for predicted, actual in pairs]
    return Score(
        num=n,
        r2=1 - errors / spread if spread > n * (_MIN_VARIATION * mean) ** 2 else None,
        mape=sum(map(abs, relative)) / n,
        repeat_mape=repeat_mape,
        bias=sum(relative) / n,
    )
