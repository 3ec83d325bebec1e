"""The planner's answer made safe: who may draft how much in the coming step."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import cast

from engine.sequence import Sequence
from engine.spec.planner import SequenceView, Sleeps, SpecPlan, SpecPlanner, StepView
from engine.types import BASELINE, PolicyChange

log = logging.getLogger(__name__)

_UNLOADED = "unloaded"  # the reason of a policy change


class Planning:
    """Asks a planner, which comes from outside and may fail in any way: that costs only speculation."""

    def __init__(self, planner: SpecPlanner, methods: Collection[str]) -> None:
        """`methods`: those that are loaded, as of each call."""
        self.use(planner)
        self.known = set(methods)  # loaded now or before
        self._methods = methods
        self._last_fault: str | None = None

    def use(self, planner: SpecPlanner) -> None:
        """From the next step on this one is asked."""
        self.planner = planner
        self._given: tuple[list[Sequence], dict[str, SpecPlan]] = [], {}  # last, and to whom
        # Of the type: to ask the object would be to run its code, which may fail in any way.
        is_sleeper = all(hasattr(type(planner), name) for name in ("sleeps", "reason_asleep", "stands"))
        self._sleeper = cast("Sleeps", planner) if is_sleeper else None

    def forget(self) -> None:
        """Nobody is left: hold on to no sequence."""
        self._given = [], {}

    def sleeps(self, step: int, num_sequences: int) -> bool:
        """See `Sleeps`."""
        try:
            return self._sleeper is not None and self._sleeper.sleeps(step, num_sequences)
        except Exception as error:  # noqa: BLE001  as below
            self._tell(error)
            return False

    def foreknown(self, step: int, decoding: list[Sequence], num_running: int) -> dict[str, SpecPlan] | None:
        """The grants for `decoding`, of `num_running` sequences (of the others prompts are computed), where
        the planner need not be asked for them; else None."""
        if not decoding or not self.known:
            return {}
        given_to, plans = self._given
        if len(decoding) == num_running and decoding == given_to and self._stands(step):
            is_loaded = all(plan.method in self._methods for plan in plans.values())
            return plans if is_loaded else None
        if not self.sleeps(step, len(decoding)):
            return None
        new: list[Sequence] = []
        for seq in decoding:
            policy = seq.request.policy
            if policy.is_pinned and policy.num_speculative_tokens:
                return None
            if seq.method != BASELINE:
                if policy.is_exact or policy.hold_steps:  # as promised
                    return None
                new.append(seq)
        reason = self._reason_asleep() if new else ""
        if new and not reason:
            return None
        for seq in new:
            _change(seq, BASELINE, reason)
        return {}

    def _reason_asleep(self) -> str:
        try:
            return "" if self._sleeper is None else self._sleeper.reason_asleep()
        except Exception as error:  # noqa: BLE001  as below
            self._tell(error)
            return ""

    def _stands(self, step: int) -> bool:
        try:
            return self._sleeper is not None and self._sleeper.stands(step)
        except Exception as error:  # noqa: BLE001  as below
            self._tell(error)
            return False

    def plan(self, view: StepView, decoding: list[Sequence]) -> tuple[dict[str, SpecPlan], int]:
        """Grants for `decoding`, whose views `view` holds, and how many faults the planner made.

        A method that differs from the step before is noted as the sequence's policy change.
        """
        try:
            answer = dict(self.planner.plan(view))
        except Exception as error:  # noqa: BLE001  it may be anybody's code
            self._tell(error)
            self._given = [], {}
            return {}, 1
        plans: dict[str, SpecPlan] = {}
        num_errors = 0
        for seq in decoding:
            plan = answer.get(seq.seq_id)
            if plan is None:
                continue
            if plan.method != BASELINE and plan.method not in self._methods:
                if plan.method not in self.known:
                    num_errors += 1
                    continue
                plan = SpecPlan(BASELINE, 0, reason=_UNLOADED)
            if plan.method != seq.method:
                _change(seq, plan.method, plan.reason)
            if plan.method != BASELINE and plan.max_draft_tokens > 0:
                plans[seq.seq_id] = plan
        self._given = decoding, plans
        return plans, num_errors

    def _tell(self, error: Exception) -> None:
        """With its trace, once: the same fault comes back every step."""
        fault = f"{type(error).__name__}: {error}"
        if fault != self._last_fault:
            log.exception("the planner failed; where it was to grant drafts, there are none in this step")
        self._last_fault = fault


def _change(seq: Sequence, method: str, reason: str) -> None:
    seq.method = method
    seq.counters.policy_changes.append(PolicyChange(len(seq.output_token_ids), method, reason))


def sequence_view(seq: Sequence) -> SequenceView:
    """A decoding sequence as the planner sees it."""
    params = seq.request.sampling
    method, num_drafted, num_accepted = seq.last_drafted
    return SequenceView(
        seq_id=seq.seq_id,
        policy=seq.request.policy,
        label=seq.request.label,
        temperature=params.temperature,
        top_p=params.top_p,
        num_tokens=len(seq.token_ids),
        num_output_tokens=len(seq.output_token_ids),
        num_remaining_tokens=seq.num_remaining,
        num_drafts=seq.counters.num_drafts,
        num_draft_tokens=seq.counters.num_draft_tokens,
        num_accepted_tokens=seq.counters.num_accepted_tokens,
        last_method=method,
        last_num_draft_tokens=num_drafted,
        last_num_accepted_tokens=num_accepted,
        in_hindsight=seq.counters.in_hindsight,
        num_granted_tokens=seq.counters.num_granted_tokens,
    )
