"""The guards at work on one model: they see steps, outcomes and load, the engine is told what is shut.

`policy.guards` decides; here are the clock, the metrics, the log and the backend.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from engine.types import BASELINE, EngineLoad, StepRecord
from specgate.backends.openai_http.pool import Outcome
from specgate.clock import Clock
from specgate.config.guards import GuardsConfig
from specgate.config.schema import PolicyConfig
from specgate.policy.door import DoorState
from specgate.policy.guard_readings import Costs, NoCosts, band_of
from specgate.policy.guards import Change, Conditions, GuardPanel, Limits, Openings, task_name
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut
from specgate.telemetry.events import Events
from specgate.types import Decision, LoadView, Prediction, RequestOutcome

logger = logging.getLogger(__name__)

_FREE = (Reason.PREDICTED_FASTEST, Reason.RULE, Reason.COLD_START)
PROBE_STEPS = 64  # target steps for which the engine's planner keeps a probe at the policy it tries

_MIN_DONE = 5  # finished requests before their pace says anything
_PACE_S = 30.0


class GuardMetrics(Protocol):
    """Where doors are shown."""

    def door_stands(self, guard: Reason, policy: str, task: str | None, state: DoorState) -> None: ...

    def door_moved(self, change: Change) -> None: ...


class GuardedBackend(Protocol):
    """What guards need of a backend."""

    @property
    def card(self) -> Any: ...

    def load(self) -> EngineLoad: ...

    def set_shut(self, entries: tuple[Shut, ...]) -> None: ...


@dataclass(frozen=True, slots=True)
class GuardSurroundings:
    """What the guards of a model look at and act upon."""

    backend: GuardedBackend
    metrics: GuardMetrics
    clock: Clock
    costs: Callable[[], Costs] = NoCosts
    memory_bytes: Callable[[], int | None] = lambda: None
    events: Events | None = None


class Guarding:
    """Of one model."""

    def __init__(self, config: GuardsConfig, policy: PolicyConfig, around: GuardSurroundings) -> None:
        self.config = config
        self._panel = GuardPanel(config, _limits(policy))
        self._around = around
        self._clock = around.clock
        self._done_s: deque[float] = deque(maxlen=1000)
        self._told: tuple[Shut, ...] = ()
        self._shown: set[tuple[Reason, str, str | None]] = set()

    def reconfigure(self, config: GuardsConfig, policy: PolicyConfig) -> None:
        """Other thresholds from now on; doors stay as they are until the next look."""
        self.config = config
        self._panel.reconfigure(config, _limits(policy))

    def stepped(self, record: StepRecord) -> None:
        """To be given every step's record."""
        self._panel.add_step(record, self._clock.monotonic())

    def finished(self, outcome: RequestOutcome) -> None:
        """To be given every outcome."""
        now_s = self._clock.monotonic()
        self._done_s.append(now_s)
        self._panel.add_outcome(outcome, now_s)

    def attempted(self, policy: str, replica: str, outcome: Outcome) -> None:
        """To be told how requests to other servers end. Those of the plain pool are its own fault alone."""
        if policy == BASELINE or outcome in (Outcome.LEFT, Outcome.REFUSED):
            return
        kind = None if outcome is Outcome.OK else "timeout" if outcome is Outcome.TIMEOUT else "exception"
        self._panel.add_try(policy, kind, self._clock.monotonic())

    def checked(self, policy: str, is_match: bool) -> None:
        """A greedy answer was decoded again as baseline."""
        self._panel.add_check(policy, is_match, self._clock.monotonic())

    def wants_check(self, policy: str) -> bool:
        """Whether each greedy answer of this policy should be."""
        return self._panel.wants_check(policy)

    def look(self, load: LoadView) -> None:
        """Move the doors as the readings say, and tell everybody."""
        has_limit = self.config.memory.max_memory_bytes is not None  # reading it costs
        now = Conditions(
            now_s=self._clock.monotonic(),
            load=load,
            methods=tuple(self._around.backend.card.methods),
            memory_bytes=self._around.memory_bytes() if has_limit else None,
            requests_done_per_s=self._pace(),
            costs=self._around.costs(),
        )
        changes = self._panel.look(now)
        for key in self._panel.doors.keys() - self._shown:  # from now on the series is there
            self._shown.add(key)
            self._around.metrics.door_stands(*key, DoorState.ALLOWED)
        for change in changes:
            self._around.metrics.door_moved(change)
            whom = f"{change.policy} for {task_name(change.task) or 'all tasks'}"
            only = "" if change.is_enforced else " (observed only)"
            level = logging.WARNING if change.after is DoorState.SHUT else logging.INFO
            logger.log(level, "guard %s: %s is %s%s: %s", change.guard, whom, change.after, only, change.why)
            if self._around.events is not None:
                self._around.events.add(
                    "guard",
                    f"{whom} is {change.after}{only}: {change.why}",
                    "warning" if change.after is DoorState.SHUT else "info",
                    model=self._around.backend.card.model_id,
                    subject=str(change.guard),
                )
        if (entries := self._panel.shut.entries) != self._told:
            self._told = entries
            self._around.backend.set_shut(entries)

    def openings(self, task: str, *, may_probe: bool) -> Openings:
        """What a new request of this task meets."""
        return self._panel.openings(task, may_probe=may_probe)

    def decided(self, openings: Openings, policy: str) -> bool:
        """A request that met `openings` runs under `policy`. True: as a probe."""
        return self._panel.count(openings, policy)

    def takes_control(self, decision: Decision, num_prompt_tokens: int, credit_s: float) -> bool:
        """Whether this request runs as baseline instead, so that its policy can be judged. Not where
        that is predicted to cost more than `credit_s`."""
        if decision.policy == BASELINE or decision.arm is not None or decision.reason not in _FREE:
            return False
        if _control_cost_s(decision) > max(credit_s, 0.0):
            return False
        now_s = self._clock.monotonic()
        band = band_of(num_prompt_tokens, decision.load.num_admitted)
        return self._panel.takes_control(decision.policy, decision.task.scope, band, now_s)

    def describe(self) -> list[Mapping[str, Any]]:
        """Every door, for /admin/state."""
        return list(self._panel.describe(self._clock.monotonic()))

    def _pace(self) -> float | None:
        now_s = self._clock.monotonic()
        while self._done_s and self._done_s[0] < now_s - _PACE_S:
            self._done_s.popleft()
        if len(self._done_s) < _MIN_DONE:
            return None
        return len(self._done_s) / max(now_s - self._done_s[0], 1e-3)


def _limits(policy: PolicyConfig) -> Limits:
    return Limits(policy.max_queue_wait_p95_ms, policy.max_requests_per_s, policy.limits_always)


def as_control(decision: Decision) -> Decision:
    """The same request as a baseline run to compare with: the engine's planner leaves it plain."""
    return replace(
        decision,
        policy=BASELINE,
        reason=Reason.EXPLORATION.value,
        num_speculative_tokens=0,
        is_exact=True,
        predicted=_as_baseline(decision),
        explore_cost_s=_control_cost_s(decision),
    )


def _as_baseline(decision: Decision) -> Prediction:
    return next((c.predicted for c in decision.candidates if c.policy == BASELINE), Prediction())


def _control_cost_s(decision: Decision) -> float:
    """By how much longer the request is predicted to take as baseline; 0 where nothing is predicted."""
    plain_ms, chosen_ms = _as_baseline(decision).e2e_ms, decision.predicted.e2e_ms
    return 0.0 if plain_ms is None or chosen_ms is None else max(plain_ms - chosen_ms, 0.0) / 1e3
