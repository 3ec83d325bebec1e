"""Regret: how much slower `auto` was than the best fixed arm, request by request.

The best fixed arm is chosen afterwards, on the same requests, so the bar is a little higher than
any real choice could reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.types import BASELINE
from specgate.bench.fleet import AUTO
from specgate.bench.runner import Cell, Measured, Sample
from specgate.bench.stats import (
    MIN_GROUPS,
    Pairs,
    geometric_mean,
    geometric_mean_ratio,
    mean,
    ratio_of_means,
)
from specgate.bench.summary import policy_mix

MARGIN = 0.10  # a clear winner's lead over the second
MIN_PER_TASK = 5  # requests a cell of one task needs to say anything


class Paired:
    """Requests of one cell (or of one task in it) that every arm answered."""

    def __init__(self, samples: Sequence[Sample], arms: Sequence[str]) -> None:
        by_job: dict[str, dict[str, Sample]] = {}
        for sample in samples:
            if sample.record.is_ok and sample.record.e2e_ms is not None:
                by_job.setdefault(sample.record.job_id, {})[sample.record.arm] = sample
        self._whole = [row for row in by_job.values() if len(row) == len(arms)]
        self._arms = list(arms)

    def __len__(self) -> int:
        return len(self._whole)

    def e2e(self, arm: str) -> list[float]:
        """E2E in ms, in one order for all arms."""
        return [row[arm].record.e2e_ms or 0.0 for row in self._whole]

    def means(self) -> dict[str, float]:
        """Mean E2E by arm, ms."""
        return {arm: value for arm in self._arms if (value := mean(self.e2e(arm))) is not None}

    def pairs(self, ours: str, theirs: str) -> Pairs:
        """E2E of two arms on the same requests."""
        groups = tuple(row[ours].slice_name for row in self._whole)
        return Pairs(tuple(self.e2e(ours)), tuple(self.e2e(theirs)), groups)

    def by_repeat(self, ours: str, theirs: str) -> list[float]:
        """Of each repeat, and so of each start of the servers: by how much the mean E2E is longer; in their
        order."""
        sums: dict[int, list[float]] = {}
        for row in self._whole:
            both = sums.setdefault(row[ours].repeat, [0.0, 0.0])
            both[0] += row[ours].record.e2e_ms or 0.0
            both[1] += row[theirs].record.e2e_ms or 0.0
        return [one / other - 1 for _, (one, other) in sorted(sums.items())]


def regret(measured: Measured, arms: Sequence[str]) -> dict[str, Any]:
    """At each cell, in each task of it, and overall. Empty where there is no auto or no fixed arm."""
    fixed = [arm for arm in arms if arm != AUTO]
    if AUTO not in arms or not fixed:
        return {}
    cells: list[dict[str, Any]] = []
    tasks: list[dict[str, Any]] = []
    paired: dict[Cell, Paired] = {}
    for cell in measured.cells():
        samples = [sample for sample in measured.samples if sample.cell == cell]
        whole = Paired(samples, arms)
        if not len(whole):
            continue
        paired[cell] = whole
        cells.append(_entry(cell, None, whole, samples, fixed))
        for task in sorted({sample.record.task for sample in samples}):
            own = [sample for sample in samples if sample.record.task == task]
            if len(part := Paired(own, arms)) >= MIN_PER_TASK:
                tasks.append(_entry(cell, task, part, own, fixed))
    return {
        "metric": "mean E2E, paired by request; 0.03 means 3 % slower than the best fixed arm",
        "interval": f"95 %, bootstrap over slices where there are {MIN_GROUPS} or more, else over requests",
        "cells": cells,
        "tasks": tasks,
        "clear_wins": {"cells": _clear_wins(cells), "tasks": _clear_wins(tasks)},
        "overall": _overall(paired, fixed) if paired else {},
    }


def _entry(
    cell: Cell, task: str | None, paired: Paired, samples: Sequence[Sample], fixed: Sequence[str]
) -> dict[str, Any]:
    """Who wins, by how much, how `auto` decoded and what it lost."""
    means = paired.means()
    order = sorted(fixed, key=means.__getitem__)
    best = order[0]
    margin = means[order[1]] / means[best] - 1 if len(order) > 1 else None
    mix = policy_mix(sample.record for sample in samples if sample.record.arm == AUTO)
    out: dict[str, Any] = {
        "cell": cell.name,
        "task": task,
        "fraction": cell.fraction,
        "rate": cell.rate,
        "sampling": cell.sampling,
        "segment": cell.segment,
        "n": len(paired),
        "e2e_mean_ms": means,
        "best_fixed": best,
        "margin": margin,
        "is_clear": margin is not None and margin >= MARGIN,
        "auto_policy_mix": mix,
        "auto_picked_best": max(mix, key=mix.__getitem__) == best if mix else None,
        "regret": _minus_one(paired, AUTO, best),
        "by_repeat": paired.by_repeat(AUTO, best),
    }
    if BASELINE in fixed:
        out["vs_baseline"] = _minus_one(paired, AUTO, BASELINE)
    return out


def _clear_wins(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """By arm that wins by `MARGIN` or more: how often, and how often `auto` mostly did the same."""
    out: dict[str, dict[str, int]] = {}
    for entry in entries:
        if entry["is_clear"]:
            counts = out.setdefault(entry["best_fixed"], {"num": 0, "auto_picked": 0})
            counts["num"] += 1
            counts["auto_picked"] += entry["auto_picked_best"] is True
    return out


def _minus_one(paired: Paired, ours: str, theirs: str) -> dict[str, float | None]:
    return _shifted(ratio_of_means(paired.pairs(ours, theirs)).as_dict())


def _shifted(ratio: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else value - 1 for name, value in ratio.items()}


def _overall(paired: Mapping[Cell, Paired], fixed: Sequence[str]) -> dict[str, Any]:
    """Geometric means over the cells, so that one overloaded cell does not decide."""
    means = {cell: pairs.means() for cell, pairs in paired.items()}
    geometric = {arm: geometric_mean([means[cell][arm] for cell in paired]) for arm in (AUTO, *fixed)}
    single = min(fixed, key=lambda arm: geometric[arm] or 0.0)
    best = [pairs.pairs(AUTO, min(fixed, key=means[cell].__getitem__)) for cell, pairs in paired.items()]
    out: dict[str, Any] = {
        "e2e_geometric_mean_ms": geometric,
        "best_single_fixed": single,
        "vs_best_fixed_of_each_cell": _shifted(geometric_mean_ratio(best).as_dict()),
        "vs_best_single_fixed": _shifted(
            geometric_mean_ratio([pairs.pairs(AUTO, single) for pairs in paired.values()]).as_dict()
        ),
    }
    if BASELINE in fixed:
        against = [pairs.pairs(AUTO, BASELINE) for pairs in paired.values()]
        out["vs_baseline"] = _shifted(geometric_mean_ratio(against).as_dict())
    return out
