"""The guards of one model as a state machine: no way to be stuck, and a shut guard means no drafts."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.types import BASELINE, DrafterError, DraftWork, PolicyAssignment
from specgate.config.guards import (
    AcceptanceGuard,
    DrafterGuard,
)
from specgate.policy.guards import GuardPanel
from specgate.policy.plan_step import StepPlanner
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut
from tests.specgate.policy.guard_panel import CONFIG, LIMITS, METHODS, TIMING, at
from tests.specgate.policy.guard_samples import model_view, outcome, step, step_view


def planned(panel: GuardPanel, policy: PolicyAssignment) -> int:
    """Draft tokens of `policy` that the real step planner grants under the panel's list, following and
    with a latency model."""
    granted = []
    for view in (None, model_view(*METHODS)):
        planner = StepPlanner()
        if view is not None:
            planner.use(view)
        planner.plan(step_view(1, s=policy))
        planner.set_shut(panel.shut.entries)
        plans = planner.plan(step_view(2, s=policy))
        granted.append(sum(p.max_draft_tokens for p in plans.values() if p.method == policy.method))
    assert not any(granted[1:]) or granted[0]  # what may not be followed may not be chosen either
    return granted[0]


class GuardMachine(RuleBasedStateMachine):
    """Any history of load, steps, outcomes and checks."""

    def __init__(self) -> None:
        super().__init__()
        config = replace(CONFIG, drafter=DrafterGuard(max_errors=1), acceptance=AcceptanceGuard(min_drafts=5))
        self.panel = GuardPanel(config, LIMITS)
        self.now = 0.0
        self.planned_under: tuple[Shut, ...] = (Shut("", Reason.RULE),)  # none that the panel gives
        self.load: dict[str, float] = {}
        self.met = dict.fromkeys(METHODS, 0)
        self.probes = dict.fromkeys(METHODS, 0)

    @rule(seconds=st.floats(0.01, 60))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.panel.look(at(self.now, **self.load))

    @rule(wait=st.floats(0, 500), rate=st.floats(0, 20), free=st.floats(0, 1))
    def load_changes(self, wait: float, rate: float, free: float) -> None:
        self.load = {"queue_wait_p95_ms": wait, "requests_per_s": rate, "free_kv_ratio": free}
        self.panel.look(at(self.now, **self.load))

    @rule(policy=st.sampled_from(METHODS), kind=st.sampled_from(["oom", "exception", "nan"]))
    def drafter_fails(self, policy: str, kind: str) -> None:
        self.panel.add_step(step(errors=(DrafterError(policy, kind, ""),)), self.now)
        self.panel.look(at(self.now, **self.load))

    @rule(policy=st.sampled_from(METHODS), accepted=st.integers(0, 4), times=st.integers(1, 40))
    def steps_are_taken(self, policy: str, accepted: int, times: int) -> None:
        for _ in range(times):
            self.panel.add_step(step(DraftWork(policy, 1, 1, 4, accepted)), self.now)

    @rule(policy=st.sampled_from((BASELINE, *METHODS)), tpot=st.floats(0.001, 1), times=st.integers(1, 30),
          accepted=st.integers(0, 20))  # fmt: skip
    def requests_finish(self, policy: str, tpot: float, times: int, accepted: int) -> None:
        drafts = 0 if policy == BASELINE else 20
        for _ in range(times):
            done = outcome(policy, tpot_s=tpot, accepted=accepted, reached=20 if drafts else 0, drafts=drafts)
            self.panel.add_outcome(done, self.now)

    @rule(policy=st.sampled_from(METHODS), is_match=st.booleans())
    def an_answer_is_checked(self, policy: str, is_match: bool) -> None:
        self.panel.add_check(policy, is_match, self.now)

    @rule(wish=st.sampled_from(METHODS))
    def a_request_comes(self, wish: str) -> None:
        openings = self.panel.openings("chat", may_probe=True)
        chosen = BASELINE if wish in openings.shut else wish
        for policy in METHODS:
            self.met[policy] += policy in openings.shut or policy in openings.probes
        if self.panel.count(openings, chosen):
            self.probes[chosen] += 1

    @precondition(lambda self: bool(self.panel.shut))
    @rule()
    def everything_turns_good(self) -> None:
        """No path to a stuck state: calm load, working drafters and time open every door."""
        self.load = {}
        for _ in range(4):
            self.now += CONFIG.latency.window_s + TIMING.max_cooldown_s
            self.panel.look(at(self.now))
            for policy in METHODS:
                for _ in range(20):
                    self.panel.add_step(step(DraftWork(policy, 1, 1, 4, 4)), self.now)
                    self.panel.add_check(policy, True, self.now)
            for policy in (BASELINE, *METHODS):
                drafts = 0 if policy == BASELINE else 20
                for _ in range(30):
                    good = outcome(policy, accepted=20 if drafts else 0, reached=drafts, drafts=drafts)
                    self.panel.add_outcome(good, self.now)
            self.now += 1
            self.panel.look(at(self.now))
        assert not self.panel.shut, self.panel.describe(self.now)

    @invariant()
    def what_is_shut_drafts_nothing(self) -> None:
        if self.panel.shut.entries == self.planned_under:
            return
        self.planned_under = self.panel.shut.entries
        for policy in METHODS:
            doors = [
                d for d in self.panel.describe(self.now)
                if d["policy"] == policy and d["state"] != "allowed" and d["task"] in (None, "chat")
            ]  # fmt: skip
            common = PolicyAssignment(policy, 4)
            probe, pinned = replace(common, is_probe=True), replace(common, is_pinned=True)
            hard = [d for d in doors if d["guard"] in ("memory_pressure", "drafter_error")]
            soft = [d for d in doors if d not in hard]
            assert (planned(self.panel, common) == 0) == bool(doors)
            if any(d["state"] == "shut" for d in doors):
                assert planned(self.panel, probe) == 0
            if hard:
                assert planned(self.panel, pinned) == 0
            elif soft:
                assert planned(self.panel, pinned) == 4

    @invariant()
    def probes_are_bounded(self) -> None:
        for policy in METHODS:
            # A budget per door's scope: for the whole policy and for the task.
            assert self.probes[policy] <= 2 + TIMING.probe_share * self.met[policy] + 1e-6


GuardMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestGuardMachine = GuardMachine.TestCase
