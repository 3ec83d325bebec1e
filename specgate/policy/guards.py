"""The guards of one model: what shuts speculation by itself, and lets it come back.

Each guard has a door per policy (and per task where it can tell): see `policy.door` for how a
door shuts, and `policy.guard_readings` for what is measured. Pure: outcomes, steps and conditions
go in with the time; doors, changes and the list of what is shut come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.types import StepRecord
from specgate.config.guards import GuardsConfig, Mode
from specgate.policy.door import Door, DoorState, ProbeBudget, Reading, advance
from specgate.policy.guard_gain import GainBook
from specgate.policy.guard_readings import (
    AcceptanceBook,
    Band,
    CheckBook,
    Costs,
    ErrorBook,
    LatencyBook,
    NoCosts,
    Scope,
    worst,
)
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut, ShutList
from specgate.types import LoadView, RequestOutcome

_SLOW_LOOK_S = 0.25  # between two looks at windows that hold many samples
_AMBIENT = (Reason.QUEUE_WAIT_GUARD, Reason.LOAD_GUARD, Reason.MEMORY_PRESSURE)  # need no probes
_HARD = (Reason.MEMORY_PRESSURE, Reason.DRAFTER_ERROR)


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds that the section `policy` holds."""

    max_queue_wait_p95_ms: float | None = None
    max_requests_per_s: float | None = None
    limits_always: bool = False  # also for policies that are predicted to raise capacity


@dataclass(frozen=True, slots=True)
class Conditions:
    """How things stand. `requests_done_per_s` None: too few finished to say."""

    now_s: float
    load: LoadView = field(default_factory=LoadView)
    methods: tuple[str, ...] = ()
    memory_bytes: int | None = None
    requests_done_per_s: float | None = None
    costs: Costs = field(default_factory=NoCosts)


@dataclass(frozen=True, slots=True)
class Change:
    """A door moved."""

    guard: Reason
    policy: str
    task: str | None
    before: DoorState
    after: DoorState
    why: str
    is_enforced: bool
    kind: str = ""  # of the reading that shut it


@dataclass(frozen=True, slots=True)
class Openings:
    """What a new request meets: policies shut for it, and those of them it may probe."""

    shut: Mapping[str, Shut]
    probes: Mapping[str, Shut]  # let through if chosen; not in `shut`


_Key = tuple[Reason, str, str | None]


class GuardPanel:
    """All doors of one model."""

    def __init__(self, config: GuardsConfig, limits: Limits) -> None:
        self._config = config
        self._limits = limits
        self._doors: dict[_Key, Door] = {}
        self._latency = LatencyBook(config.latency)
        self._gain = GainBook(config.latency)
        self._acceptance = AcceptanceBook(config.acceptance)
        self._errors = ErrorBook(config.drafter)
        self._checks = CheckBook()
        self._budgets: dict[Scope, ProbeBudget] = {}
        self._controls = ProbeBudget(config.latency.control_share, credit=0.0)
        self._shut = ShutList()
        self._looked_s = float("-inf")

    def reconfigure(self, config: GuardsConfig, limits: Limits) -> None:
        """Other thresholds from the next look on. Doors stay; a guard whose settings changed begins
        to gather samples anew."""
        old, self._config, self._limits = self._config, config, limits
        if config.latency != old.latency:
            self._latency = LatencyBook(config.latency)
            self._gain = GainBook(config.latency)
            self._controls = ProbeBudget(config.latency.control_share, credit=0.0)
        if config.acceptance != old.acceptance:
            self._acceptance = AcceptanceBook(config.acceptance)
        if config.drafter != old.drafter:
            self._errors = ErrorBook(config.drafter)
        if config.timing != old.timing:
            self._budgets.clear()
        self._looked_s = float("-inf")

    # --- what is seen -----------------------------------------------------------------------

    def add_outcome(self, outcome: RequestOutcome, now_s: float) -> None:
        """A finished request."""
        self._latency.add(outcome, now_s)
        self._acceptance.add(outcome, now_s)

    def add_step(self, record: StepRecord, now_s: float) -> None:
        """An engine step. A failed drafter is looked at at once. Steps before the first request decode
        made-up text: what they cost is true, what was accepted in them says nothing."""
        if not record.is_warm_up:
            self._acceptance.add_step(record, now_s)
            self._gain.add_step(record, now_s)
        self._errors.add_step(record, now_s)
        if record.drafter_errors:
            self._looked_s = float("-inf")

    def add_try(self, policy: str, kind: str | None, now_s: float) -> None:
        """A request that other servers were to run under `policy`, and how they failed it, if they did."""
        self._errors.add_try(policy, kind, now_s)
        if kind is not None:
            self._looked_s = float("-inf")

    def add_check(self, policy: str, is_match: bool, now_s: float) -> None:
        """A greedy answer was decoded again as baseline. Counted as it is: a near-tie is a mismatch too."""
        self._checks.add(policy, is_match, now_s)
        self._looked_s = float("-inf")

    # --- what follows -----------------------------------------------------------------------

    @property
    def shut(self) -> ShutList:
        """What may not draft now."""
        return self._shut

    @property
    def doors(self) -> Mapping[tuple[Reason, str, str | None], Door]:
        """By guard, policy and task."""
        return self._doors

    def look(self, now: Conditions) -> list[Change]:
        """Read every guard and move the doors. Cheap enough to be called for each request."""
        changes = self._look_at(self._ambient(now), now)
        if now.now_s - self._looked_s >= _SLOW_LOOK_S:
            self._looked_s = now.now_s
            changes += self._look_at(self._measured(now), now)
        if changes:
            self._shut = ShutList(self._entries())
        return changes

    def openings(self, task: str, *, may_probe: bool) -> Openings:
        """For a new request of `task`."""
        shut = self._shut.for_task(task)
        if not may_probe or not shut:
            return Openings(shut, {})
        left = self._shut.for_task(task, may_probe=True)
        probes = {
            policy: entry
            for policy, entry in shut.items()
            if policy not in left and self._budget(entry).has_one
        }
        return Openings({policy: entry for policy, entry in shut.items() if policy not in probes}, probes)

    def count(self, openings: Openings, policy: str) -> bool:
        """A new request was decided to run under `policy`. True: it is a probe."""
        for entry in openings.shut.values():
            if entry.lets_probes:
                self._budget(entry).count(was_probe=False)
        for entry in openings.probes.values():
            self._budget(entry).count(was_probe=entry.policy == policy)
        return policy in openings.probes

    def takes_control(self, policy: str, task: str, band: Band, now_s: float) -> bool:
        """Whether a request that would run under `policy` runs as baseline instead, to compare with."""
        is_wanted = (
            self._config.latency.mode != "off"
            and self._controls.has_one
            and self._latency.lacks_control(policy, task, band, now_s)
        )
        self._controls.count(was_probe=is_wanted)
        return is_wanted

    def wants_check(self, policy: str) -> bool:
        """Whether every greedy answer of `policy` should be decoded again: it is being tried anew."""
        door = self._doors.get((Reason.CONSISTENCY_GUARD, policy, None))
        return door is not None and door.state is DoorState.PROBING

    def describe(self, now_s: float) -> list[dict[str, Any]]:
        """Every door, for /admin/state."""
        return [
            {
                "guard": guard.value,
                "policy": policy,
                "task": task_name(task),
                "state": door.state.value,
                "mode": self._mode(guard),
                "reading": None if door.reading is None else door.reading.value,
                "threshold": None if door.reading is None else door.reading.threshold,
                "unit": None if door.reading is None else door.reading.unit,
                "num_samples": None if door.reading is None else door.reading.num_samples,
                "since_s": max(0.0, now_s - door.since_s),
                "opens_in_s": max(0.0, door.opens_s - now_s) if door.state is DoorState.SHUT else None,
                "num_trips": door.num_trips,
                "why": door.why or None,
            }
            for (guard, policy, task), door in sorted(self._doors.items(), key=lambda item: _order(item[0]))
        ]

    # --- readings ---------------------------------------------------------------------------

    def _ambient(self, now: Conditions) -> dict[_Key, Reading | None]:
        """Guards on the whole model, whose readings do not depend on the policy being tried."""
        waits, load, memory = _queue_wait(now, self._limits, self._config), self._load(now), self._memory(now)
        out: dict[_Key, Reading | None] = {}
        batch = max(now.load.num_running, now.load.num_admitted, 1)  # where requests wait: all that fit
        for policy in now.methods:
            ratio = now.costs.capacity_ratio(policy, batch)
            is_costly = self._limits.limits_always or ratio is None or ratio >= 1
            out[Reason.QUEUE_WAIT_GUARD, policy, None] = waits if is_costly else None
            out[Reason.LOAD_GUARD, policy, None] = load if is_costly else None
            out[Reason.MEMORY_PRESSURE, policy, None] = memory
        return out

    def _load(self, now: Conditions) -> Reading | None:
        rate = now.load.requests_per_s
        readings: dict[str, Reading | None] = {}
        if self._limits.max_requests_per_s is not None:
            limit = self._limits.max_requests_per_s
            readings["rate"] = Reading(rate, limit, "requests/s", what="the request rate", kind="rate")
        # Callers that wait for their answers come as fast as they are served: however busy, few of
        # them are no overload. One that is real fills the server. So both must be passed, and the milder
        # reading counts: the rate fades over its window, but a server that empties is seen at once.
        load, rho = self._config.load, now.costs.rho(now.load.answers_per_s)
        if rho is not None and load.max_rho is not None:
            num_in_flight = now.load.num_admitted + now.load.num_queued
            what = f"with {num_in_flight} requests in the server, the load, as a share of predicted capacity,"
            by_rate = Reading(rho, load.max_rho, "of capacity", what=what, kind="rho")
            what = f"at {rho:.2f} of predicted capacity, the number of requests in the server"
            most = max(load.min_in_flight - 1, 0.5)
            by_number = Reading(num_in_flight, most, "requests", what=what, kind="in_flight")
            readings["rho"] = min(by_rate, by_number, key=lambda reading: reading.severity)
        return worst(readings)

    def _memory(self, now: Conditions) -> Reading | None:
        guard, free = self._config.memory, now.load.free_kv_ratio
        readings: dict[str, Reading | None] = {}
        if free is not None:
            what = "the share of free KV blocks"
            readings["kv"] = Reading(
                free, guard.min_free_kv_ratio, "of all", is_floor=True, what=what, kind="kv_blocks"
            )
        if now.memory_bytes is not None and guard.max_memory_bytes is not None:
            used, limit = float(now.memory_bytes), float(guard.max_memory_bytes)
            readings["memory"] = Reading(used, limit, "bytes", what="the memory in use", kind="memory")
        return worst(readings)

    def _measured(self, now: Conditions) -> dict[_Key, Reading | None]:
        """Guards on what a policy did, where it was tried."""
        out: dict[_Key, Reading | None] = {}
        self._latency.begin_look()
        for policy, task in self._latency.scopes():
            key: _Key = (Reason.LATENCY_GUARD, policy, task)
            assert task is not None
            out[key] = self._latency.reading(policy, task, now.now_s, *self._since(key))
        for policy in self._gain.policies():
            key = (Reason.LATENCY_GUARD, policy, None)
            out[key] = self._gain.reading(policy, now.now_s, *self._since(key))
        for scope in self._acceptance.scopes():
            key = (Reason.ACCEPTANCE_FLOOR, *scope)
            out[key] = self._acceptance.reading(scope, now.costs, now.now_s, *self._since(key))
        for policy in self._errors.policies():
            key = (Reason.DRAFTER_ERROR, policy, None)
            out[key] = self._errors.reading(policy, now.now_s, *self._since(key))
        for policy in self._checks.policies():
            key = (Reason.CONSISTENCY_GUARD, policy, None)
            out[key] = self._checks.reading(policy, *self._since(key))
        return out

    def _since(self, key: _Key) -> tuple[float, int | None]:
        """From when samples count, and how many are enough (None: as configured)."""
        door = self._doors.get(key)
        if door is None:
            return float("-inf"), None
        if door.state is DoorState.PROBING:
            return door.since_s, self._config.timing.probe_samples
        return (door.since_s if door.has_shut else float("-inf")), None  # what shut it once is past

    # --- doors ------------------------------------------------------------------------------

    def _look_at(self, readings: Mapping[_Key, Reading | None], now: Conditions) -> list[Change]:
        changes = []
        for key, reading in readings.items():
            guard, policy, task = key
            mode = self._mode(guard)
            if mode == "off":
                continue
            door = self._doors.get(key) or Door(since_s=now.now_s)
            after = advance(door, reading, now.now_s, self._config.timing, needs_probes=guard not in _AMBIENT)
            self._doors[key] = after
            if after.state is not door.state:
                is_trip = after.state is DoorState.SHUT
                why = after.why if is_trip else f"after {now.now_s - door.since_s:.0f} s {door.state.value}"
                kind = reading.kind if reading is not None and is_trip else ""
                is_enforced = mode == "enforce"
                changes.append(Change(guard, policy, task, door.state, after.state, why, is_enforced, kind))
        return changes

    def _entries(self) -> Iterable[Shut]:
        for (guard, policy, task), door in self._doors.items():
            if door.state is not DoorState.ALLOWED and self._mode(guard) == "enforce":
                yield Shut(
                    policy, guard, task, f"{guard.value}: {door.why}",
                    is_hard=guard in _HARD, lets_probes=door.state is DoorState.PROBING,
                )  # fmt: skip

    def _budget(self, entry: Shut) -> ProbeBudget:
        scope = (entry.policy, entry.task)
        if scope not in self._budgets:
            self._budgets[scope] = ProbeBudget(self._config.timing.probe_share)
        return self._budgets[scope]

    def _mode(self, guard: Reason) -> Mode:
        config = self._config
        return {
            Reason.QUEUE_WAIT_GUARD: config.queue_wait.mode,
            Reason.LOAD_GUARD: config.load.mode,
            Reason.LATENCY_GUARD: config.latency.mode,
            Reason.ACCEPTANCE_FLOOR: config.acceptance.mode,
            Reason.CONSISTENCY_GUARD: config.consistency.mode,
            Reason.MEMORY_PRESSURE: config.memory.mode,
            Reason.DRAFTER_ERROR: config.drafter.mode,
        }[guard]


def _queue_wait(now: Conditions, limits: Limits, config: GuardsConfig) -> Reading | None:
    """What was measured, or what the queue as it stands will take: the worse."""
    limit = limits.max_queue_wait_p95_ms
    if limit is None:
        return None
    readings: dict[str, Reading | None] = {}
    if now.load.queue_wait_p95_ms is not None:
        readings["measured"] = Reading(
            now.load.queue_wait_p95_ms, limit, "ms", what="queue wait p95", kind="p95"
        )
    # Only who is kept out waits for others to end; else it is the next step that is waited for.
    load = now.load
    num_ahead = load.num_queued + load.num_waiting if load.num_queued else load.num_held
    if config.queue_wait.has_forecast and num_ahead and now.requests_done_per_s:
        wait_ms = num_ahead / now.requests_done_per_s * 1e3
        readings["forecast"] = Reading(
            wait_ms, limit, "ms", what=f"the wait for the {num_ahead} queued", kind="forecast"
        )
    return worst(readings)


def _order(key: _Key) -> tuple[str, str, str]:
    guard, policy, task = key
    return guard.value, policy, task or ""


def task_name(task: str | None) -> str | None:
    """As people read it: requests of no certain task are "mixed"."""
    return "mixed" if task == "" else task
