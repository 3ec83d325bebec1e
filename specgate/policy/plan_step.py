"""The planner that runs inside the engine process: what each sequence may draft in the coming step.

For now it follows what was decided per request, and the kill switch. Pure but for the one switch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.spec.planner import SpecPlan, StepView
from engine.types import BASELINE
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut, ShutList


class StepPlanner:
    """Implements `engine.spec.planner.SpecPlanner`."""

    def __init__(self) -> None:
        self._forced: str | None = None
        self._shut = ShutList()

    def set_shut(self, entries: Iterable[Shut]) -> None:
        """What the guards have shut: from the next step on those policies draft nothing."""
        self._shut = ShutList(entries)

    def set_force(self, policy: str | None) -> None:
        """The kill switch: from the next step on every sequence runs under `policy`; None lifts it."""
        self._forced = policy

    def plan(self, view: StepView) -> Mapping[str, SpecPlan]:
        """Absent sequences decode plainly, as they did; a plan of zero tokens says why they do now."""
        plans: dict[str, SpecPlan] = {}
        for sequence in view.sequences:
            assigned = sequence.policy
            if assigned.num_speculative_tokens <= 0:
                continue
            if self._forced is not None and assigned.method != self._forced:
                plans[sequence.seq_id] = SpecPlan(BASELINE, 0, reason=Reason.KILL_SWITCH.value)
                continue
            shut = self._shut.refusal(assigned.method, sequence.label, assigned)
            if shut is not None:
                plans[sequence.seq_id] = SpecPlan(BASELINE, 0, reason=shut.reason.value)
                continue
            reason = Reason.OVERRIDE if assigned.is_exact else Reason.RULE
            plans[sequence.seq_id] = SpecPlan(
                assigned.method, assigned.num_speculative_tokens, reason=reason.value
            )
        return plans
