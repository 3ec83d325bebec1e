"""Outcomes in, snapshot out. For now: how much of each method's drafts was accepted, by task."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from engine.types import BASELINE
from specgate.types import RequestOutcome


@dataclass(frozen=True, slots=True)
class AcceptanceReading:
    """Median over recent requests of accepted / (accepted + rejected), per request."""

    policy: str
    task: str
    p50: float | None  # None: too few requests
    num_requests: int


class Learner:
    """The one writer of what was learned; everybody else sees numbers."""

    def __init__(self, window: int, min_samples: int) -> None:
        self._window = window
        self._min_samples = min_samples
        self._by_arm: dict[tuple[str, str], deque[float]] = {}

    def learn(self, outcome: RequestOutcome) -> None:
        """A finished request. Those without a verified draft say nothing about acceptance."""
        decision = outcome.decision
        if decision.policy == BASELINE:
            return
        accepted = sum(sum(stats.accepted_per_position) for stats in outcome.stats)
        # A position counts as drafted only where verification reached it, so this is
        # accepted + rejected, and unbiased by the number of draft tokens.
        reached = sum(sum(stats.drafted_per_position) for stats in outcome.stats)
        if reached:
            key = (decision.policy, decision.task.label)
            self._by_arm.setdefault(key, deque(maxlen=self._window)).append(accepted / reached)

    def acceptance_p50(self, task: str) -> dict[str, float]:
        """By policy, for one task; policies without enough data are absent."""
        readings = (r for r in self.acceptance() if r.task == task)
        return {r.policy: r.p50 for r in readings if r.p50 is not None}

    def acceptance(self) -> list[AcceptanceReading]:
        """Everything known, for /admin/state."""
        return [
            AcceptanceReading(
                policy,
                task,
                statistics.median(values) if len(values) >= self._min_samples else None,
                len(values),
            )
            for (policy, task), values in sorted(self._by_arm.items())
        ]
