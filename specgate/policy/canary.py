"""A rollout by steps: its state machine. Pure: the time is given, nothing is read or written.

    shadow --promote--> running --(every stage passed)--> promoted
                        running <--resume-- paused
    any but promoted --(guardrail broken, expiry)--> rolled_back;   rollback by hand: from any
    rolled_back --resume--> running, from the first stage

In each stage the candidate has a share of the requests in scope and a control arm of the same size
runs beside it. A stage is passed when it has lasted long enough, both arms have enough requests,
and every latency guardrail is shown to be kept; a guardrail shown to be broken rolls back, at any
moment. Both are e-value tests (`policy.sequential`), begun anew in each stage, so looking after
every batch costs nothing; the chance of a false rollback is shared out over stages and guardrails.
The stage of 100 % has no control left: it lasts its time, then the rollout is promoted.
While paused a rollout keeps its share and does not rise, but still falls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from specgate.config.rollout import RolloutConfig
from specgate.policy.assignment import CANDIDATE, CONTROL, SHADOW, arm_at, position
from specgate.policy.guardrails import ArmSample, Guardrail, make_error_test, make_guardrails


class Status(StrEnum):
    """Where a rollout is in its life."""

    SHADOW = "shadow"
    RUNNING = "running"
    PAUSED = "paused"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"


ACTIONS = ("promote", "pause", "resume", "rollback")


class ActionRefused(Exception):
    """The action does not fit the rollout's state. The message is a sentence."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something changed. `is_by_hand`: an operator did it."""

    rollout: str
    status: Status
    stage: int
    why: str
    is_by_hand: bool = False


@dataclass(slots=True)
class _Evidence:
    """What was seen in the present stage."""

    guardrails: list[Guardrail]
    buffers: dict[str, deque[ArmSample]]
    num_samples: dict[str, int] = field(default_factory=lambda: {CANDIDATE: 0, CONTROL: 0})


class Rollout:
    """One rollout. Times are wall-clock seconds, so that they hold across restarts."""

    def __init__(self, config: RolloutConfig, now_s: float) -> None:
        self.config = config
        self.status = Status.SHADOW if config.mode == "shadow" else Status.RUNNING
        self.stage = 0
        self.started_s = now_s
        self.since_s = now_s  # of the present stage
        self.why = "started"
        self._shares = tuple(percent / 100 for percent in config.stages_percent)
        self._begin_stage(now_s)

    @property
    def name(self) -> str:
        """As configured."""
        return self.config.rollout

    @property
    def is_active(self) -> bool:
        """It changes (or in shadow, accompanies) what happens to requests."""
        return self.status is not Status.ROLLED_BACK

    @property
    def share(self) -> float:
        """Of the requests in scope that get the candidate."""
        if self.status is Status.PROMOTED:
            return 1.0
        return self._shares[self.stage] if self.status in (Status.RUNNING, Status.PAUSED) else 0.0

    @property
    def alpha(self) -> float:
        """Chance of a false alarm that one guardrail may use up in one stage."""
        num_tests = len(self._evidence.guardrails) + (self._errors is not None)
        num_stages = sum(share < 1 for share in self._shares)
        return self.config.error_chance / max(1, num_tests * num_stages)

    def arm(self, key: str) -> str | None:
        """candidate, control or shadow; None: the request is in none."""
        if self.status is Status.SHADOW:
            return SHADOW if position(self.name, key) < self._shares[0] else None
        return arm_at(position(self.name, key), self.share) if self.is_active else None

    def observe(self, arm: str, sample: ArmSample, now_s: float) -> Event | None:
        """A finished request of an arm. Returns what followed from it."""
        if self.status not in (Status.RUNNING, Status.PAUSED) or self.share >= 1 or arm == SHADOW:
            return None
        evidence = self._evidence
        if self._errors is not None:
            self._errors.add(arm == CANDIDATE, sample.is_error)
            if sample.is_error and self._errors.is_above(self.alpha):
                found = f"{self._errors.num_candidate} against {self._errors.num_control} of the control"
                return self._fall(f"error_ratio is above {self._errors.limit:g}: {found}", now_s)
        if sample.is_error:
            return None
        evidence.num_samples[arm] += 1
        evidence.buffers[arm].append(sample)
        size = self.config.batch_samples
        if min(map(len, evidence.buffers.values())) < size:
            return None
        candidate, control = (_spread(evidence.buffers[name], size) for name in (CANDIDATE, CONTROL))
        for buffer in evidence.buffers.values():
            buffer.clear()
        for rail in evidence.guardrails:
            rail.add(candidate, control)
            if rail.is_broken(self.alpha):
                unit = " ms" if rail.unit == "ms" else ""
                return self._fall(
                    f"{rail.name} is {rail.reading:.3g}{unit} over {rail.test.num} batches;"
                    f" the limit is {rail.limit:g}{unit}", now_s,
                )  # fmt: skip
        return self.advance(now_s)

    def advance(self, now_s: float) -> Event | None:
        """Expiry, and the next stage where it is due. To be called now and then."""
        if self.status in (Status.PROMOTED, Status.ROLLED_BACK):
            return None
        if now_s - self.started_s >= self.config.expires_after_h * 3600:
            return self._fall(f"expired after {self.config.expires_after_h:g} h", now_s)
        if self.status is not Status.RUNNING or self.missing(now_s):
            return None
        return self._rise("every guardrail kept" if self.share < 1 else "lasted its time", now_s)

    def give_up(self, why: str, now_s: float) -> Event:
        """It cannot go on, for a reason that lies outside."""
        return self._fall(why, now_s)

    def missing(self, now_s: float) -> list[str]:
        """What keeps the present stage from being passed, as sentences' ends; empty: nothing."""
        left = []
        waited_s = now_s - self.since_s
        if waited_s < self.config.min_stage_s:
            left.append(f"{self.config.min_stage_s - waited_s:.0f} s of its time")
        if self.share >= 1:
            return left
        for arm, number in self._evidence.num_samples.items():
            if number < self.config.min_samples:
                left.append(f"{self.config.min_samples - number} requests of the {arm}")
        left += [
            f"certainty about {r.name}" for r in self._evidence.guardrails if r.is_due and not r.is_kept()
        ]
        return left

    def act(self, action: str, now_s: float) -> Event:
        """By hand. Raises ActionRefused."""
        status, name = self.status, self.name
        if action == "promote" and status in (Status.SHADOW, Status.RUNNING, Status.PAUSED):
            event = self._rise("promoted by hand", now_s)
        elif action == "pause" and status is Status.RUNNING:
            event = self._to(Status.PAUSED, "paused by hand")
        elif action == "resume" and status is Status.PAUSED:
            event = self._to(Status.RUNNING, "resumed by hand")
        elif action == "resume" and status is Status.ROLLED_BACK:
            self.stage, self.started_s = 0, now_s
            self._begin_stage(now_s)
            event = self._to(Status.RUNNING, "started again by hand")
        elif action == "rollback" and status is not Status.ROLLED_BACK:
            event = self._fall("rolled back by hand", now_s)
        else:
            allowed = [a for a in ACTIONS if a in _ALLOWED[status]]
            raise ActionRefused(
                f"The rollout {name} is {status}: {action} does not apply; {', '.join(allowed)} do."
            )
        return Event(event.rollout, event.status, event.stage, event.why, is_by_hand=True)

    def describe(self, now_s: float) -> dict[str, Any]:
        """For /admin/state and `specgate canary status`."""
        errors = self._errors
        return {
            "status": self.status.value,
            "why": self.why,
            "stage": self.stage,
            "num_stages": len(self._shares),
            "share": self.share,
            "since_s": self.since_s,
            "expires_s": self.started_s + self.config.expires_after_h * 3600,
            "num_samples": dict(self._evidence.num_samples),
            "num_errors": None if errors is None else {
                CANDIDATE: errors.num_candidate, CONTROL: errors.num_control},
            "guardrails": [rail.describe(self.alpha) for rail in self._evidence.guardrails],
            "missing": self.missing(now_s) if self.status in (Status.RUNNING, Status.PAUSED) else [],
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Everything a restart must not lose, as JSON values."""
        return {
            "status": self.status.value,
            "stage": self.stage,
            "started_s": self.started_s,
            "since_s": self.since_s,
            "why": self.why,
            "num_samples": dict(self._evidence.num_samples),
            "guardrails": {rail.name: rail.test.state() for rail in self._evidence.guardrails},
            "errors": None if self._errors is None else self._errors.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; the batch that was being filled is lost. Raises ValueError."""
        try:
            status, stage = Status(state["status"]), int(state["stage"])
            if not 0 <= stage < len(self._shares):
                raise ValueError(f"there is no stage {stage}")
            self._begin_stage(float(state["since_s"]))
            for rail in self._evidence.guardrails:
                rail.test.load(state["guardrails"][rail.name])
            if self._errors is not None:
                self._errors.load(state["errors"])
            for arm in self._evidence.num_samples:
                self._evidence.num_samples[arm] = int(state["num_samples"][arm])
            self.started_s, self.why = float(state["started_s"]), str(state["why"])
        except (KeyError, TypeError, ValueError) as error:
            self._begin_stage(self.since_s)
            raise ValueError(f"no state of the rollout {self.name}: {error!r}") from error
        self.status, self.stage = status, stage

    def _begin_stage(self, now_s: float) -> None:
        self.since_s = now_s
        room = 4 * self.config.batch_samples
        self._evidence = _Evidence(
            make_guardrails(self.config.guardrails),
            {CANDIDATE: deque(maxlen=room), CONTROL: deque(maxlen=room)},
        )
        self._errors = make_error_test(self.config.guardrails)

    def _rise(self, why: str, now_s: float) -> Event:
        if self.status is Status.SHADOW:
            self._begin_stage(now_s)
            return self._to(Status.RUNNING, why)
        if self.stage + 1 == len(self._shares):
            return self._to(Status.PROMOTED, why)
        self.stage += 1
        self._begin_stage(now_s)
        return self._to(Status.RUNNING, why)

    def _fall(self, why: str, now_s: float) -> Event:
        self.since_s = now_s
        return self._to(Status.ROLLED_BACK, why)

    def _to(self, status: Status, why: str) -> Event:
        self.status, self.why = status, why
        return Event(self.name, status, self.stage, why)


_ALLOWED: dict[Status, tuple[str, ...]] = {
    Status.SHADOW: ("promote", "rollback"),
    Status.RUNNING: ("promote", "pause", "rollback"),
    Status.PAUSED: ("promote", "resume", "rollback"),
    Status.PROMOTED: ("rollback",),
    Status.ROLLED_BACK: ("resume",),
}


def _spread(buffer: deque[ArmSample], size: int) -> list[ArmSample]:
    """`size` samples spread evenly over the buffer, so that both arms cover the same time."""
    samples = list(buffer)
    return [samples[i * len(samples) // size] for i in range(size)]
