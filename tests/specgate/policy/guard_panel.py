"""A panel of guards for tests: its configuration, what it is told, what it says."""

from __future__ import annotations

from specgate.config.guards import (
    DoorTiming,
    GuardsConfig,
)
from specgate.policy.door import DoorState
from specgate.policy.guard_readings import NoCosts
from specgate.policy.guards import Change, Conditions, GuardPanel, Limits
from specgate.policy.reasons import Reason
from specgate.types import LoadView

METHODS = ("ngram", "draft")
LIMITS = Limits(max_queue_wait_p95_ms=200, max_requests_per_s=10)
TIMING = DoorTiming(sensed_cooldown_s=5, cooldown_s=10, max_cooldown_s=100, probe_share=0.1, probe_samples=3)
CONFIG = GuardsConfig(timing=TIMING)


class Costs(NoCosts):
    """Some numbers of a latency model."""

    def __init__(self, ratios: dict[str, float] | None = None, floor: float | None = None) -> None:
        self.ratios, self.floor = ratios or {}, floor

    def capacity_ratio(self, policy: str, batch: float) -> float | None:
        return self.ratios.get(policy)

    def floor_tokens(self, policy: str, batch: float, depth: float) -> float | None:
        return None if self.floor is None else self.floor + 0.1 * batch


def at(now_s: float, costs: NoCosts | None = None, memory: int | None = None, **load: float) -> Conditions:
    return Conditions(
        now_s, LoadView(**load), METHODS, memory, requests_done_per_s=2.0, costs=costs or NoCosts()
    )


def shut_of(panel: GuardPanel, task: str = "chat") -> dict[str, Reason]:
    return {policy: entry.reason for policy, entry in panel.openings(task, may_probe=False).shut.items()}


def trips(changes: list[Change]) -> list[tuple[str, str, str | None]]:
    return [(c.guard.value, c.policy, c.task) for c in changes if c.after is DoorState.SHUT]
