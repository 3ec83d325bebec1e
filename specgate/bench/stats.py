"""The statistics of a report: percentiles, paired ratios with bootstrap intervals, geometric means."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

NUM_RESAMPLES = 2000
MIN_GROUPS = 5  # with fewer groups than this, requests are resampled one by one


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % bootstrap interval. None where there is no data."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)


NO_INTERVAL = Interval(None)


def mean(values: Sequence[float]) -> float | None:
    """The arithmetic mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def percentiles(values: Sequence[float], points: Sequence[int] = (50, 95, 99)) -> dict[str, float | None]:
    """`{"p50": ..., ...}`, interpolated linearly between order statistics; None of nothing."""
    if not values:
        return {f"p{point}": None for point in points}
    found = np.percentile(np.asarray(values, dtype=float), points)
    return {f"p{point}": float(value) for point, value in zip(points, found, strict=True)}


def geometric_mean(values: Sequence[float]) -> float | None:
    """The geometric mean of positive numbers; None of nothing."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


@dataclass(frozen=True, slots=True)
class Pairs:
    """Two measurements of the same requests. `groups` names what shares its luck, e.g. a slice."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    groups: tuple[Hashable, ...] = ()

    def __len__(self) -> int:
        return len(self.ours)


def ratio_of_means(pairs: Pairs, seed: int = 0) -> Interval:
    """mean(ours) / mean(theirs), resampled by pair (Efron's percentile bootstrap).

    Requests of one slice share the machine's state, so whole slices are resampled where there are
    at least `MIN_GROUPS` of them.
    """
    return geometric_mean_ratio([pairs], seed)


def geometric_mean_ratio(cells: Sequence[Pairs], seed: int = 0) -> Interval:
    """The geometric mean over cells of mean(ours) / mean(theirs); every cell is resampled by itself."""
    cells = [cell for cell in cells if len(cell)]
    if not cells:
        return NO_INTERVAL
    rng = np.random.default_rng(seed)
    logs = sum(_resampled_log_ratios(cell, rng) for cell in cells) / len(cells)
    estimate = math.fsum(math.log(sum(cell.ours) / sum(cell.theirs)) for cell in cells) / len(cells)
    low, high = np.percentile(np.exp(logs), (2.5, 97.5))
    return Interval(math.exp(estimate), float(low), float(high))


def _resampled_log_ratios(pairs: Pairs, rng: np.random.Generator) -> Vector:
    """log of the ratio in each resample, [NUM_RESAMPLES]."""
    ours, theirs = _group_sums(pairs)
    num = len(ours)
    counts = rng.multinomial(num, np.full(num, 1.0 / num), size=NUM_RESAMPLES)  # [resamples, groups]
    ratios: Vector = np.log((counts @ ours) / (counts @ theirs))
    return ratios


def _group_sums(pairs: Pairs) -> tuple[Vector, Vector]:
    """What is resampled as one: sums by group, or the pairs themselves. Each [num]."""
    ours, theirs = np.asarray(pairs.ours, dtype=np.float64), np.asarray(pairs.theirs, dtype=np.float64)
    names = list(dict.fromkeys(pairs.groups))
    if len(names) < MIN_GROUPS:
        return ours, theirs
    at = {name: index for index, name in enumerate(names)}
    index = np.array([at[group] for group in pairs.groups])  # [num_pairs]
    sums = np.zeros((2, len(names)))
    np.add.at(sums[0], index, ours)
    np.add.at(sums[1], index, theirs)
    return sums[0], sums[1]
