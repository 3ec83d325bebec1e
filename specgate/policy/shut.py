"""Closed doors: which policy may not draft, for whom, and why. Pure data, shared by decisions,
the step planner (in the engine process) and the guards that close and open them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.types import BASELINE, PolicyAssignment
from specgate.policy.reasons import Reason


@dataclass(frozen=True, slots=True)
class Shut:
    """`policy` may not draft for `task` (None: for any). `reason` is one of the contract's reasons."""

    policy: str
    reason: Reason
    task: str | None = None
    why: str = ""  # one sentence with reading and threshold
    is_hard: bool = False  # memory and drafter errors: not even an override or a rollout gets past
    lets_probes: bool = False  # being tried again: requests marked as probes get past


class ShutList:
    """All closed doors of one model, looked up by policy. Immutable."""

    def __init__(self, entries: Iterable[Shut] = ()) -> None:
        self.entries = tuple(entries)
        by_policy: dict[str, list[Shut]] = {}
        for entry in sorted(self.entries, key=lambda e: (not e.is_hard, e.lets_probes)):
            if entry.policy != BASELINE:  # plain decoding is what is left when all else is shut
                by_policy.setdefault(entry.policy, []).append(entry)
        self._by_policy = by_policy

    def __bool__(self) -> bool:
        return bool(self._by_policy)

    def is_for_all(self, policy: str) -> bool:
        """True where `policy` may not draft for any request that nobody pinned."""
        return any(e.task is None and not e.lets_probes for e in self._by_policy.get(policy, ()))

    def refusal(self, policy: str, task: str, assigned: PolicyAssignment) -> Shut | None:
        """The door that keeps `policy` from drafting for a request assigned so; None: it may."""
        for entry in self._by_policy.get(policy, ()):
            if entry.task is not None and entry.task != task:
                continue
            if not entry.is_hard and assigned.is_pinned:
                continue
            if entry.lets_probes and assigned.is_probe:
                continue
            return entry
        return None

    def for_task(self, task: str, *, may_probe: bool = False) -> dict[str, Shut]:
        """By policy, the doors a new request of this task meets."""
        assigned = PolicyAssignment(is_probe=may_probe)
        found = {policy: self.refusal(policy, task, assigned) for policy in self._by_policy}
        return {policy: shut for policy, shut in found.items() if shut is not None}
