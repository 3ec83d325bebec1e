"""One door: a guard's verdict on one policy, as a state machine. Pure: readings and time go in.

    allowed --(threshold passed)--> shut --(cool-down over)--> probing --(good)--> allowed
                                     ^-----------(bad; longer cool-down)---|

A guard whose reading can be taken while the policy is shut (queue wait, load, memory) needs no
probes: its door opens when the reading is back below `reopen_ratio` of the threshold, after a cool-down
that is short and the same each time, since it costs nothing to know. Where only trying tells, trips in
a row shut for longer each time; a door that stayed allowed for a while starts afresh. There is no way
to be stuck: shut ends by time, and a probing door lets probes through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from specgate.config.guards import DoorTiming


class DoorState(StrEnum):
    """`specgate_guard_state` shows 0, 1, 2."""

    ALLOWED = "allowed"
    PROBING = "probing"
    SHUT = "shut"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a guard measured, and its threshold in the same unit."""

    value: float
    threshold: float
    unit: str
    num_samples: int = 1
    min_samples: int = 1
    is_floor: bool = False  # bad is below
    what: str = ""  # names the value: "TPOT p95 against baseline"
    kind: str = ""  # the same in one word, for metrics

    @property
    def severity(self) -> float:
        """Above 1 the threshold is passed."""
        over, under = (self.threshold, self.value) if self.is_floor else (self.value, self.threshold)
        if under > 0:
            return over / under
        return math.inf if over > 0 else 1.0

    @property
    def is_enough(self) -> bool:
        """Enough samples to act upon."""
        return self.num_samples >= self.min_samples

    def sentence(self) -> str:
        """With its numbers."""
        side = "below" if self.is_floor else "above"
        return f"{self.what or 'the reading'} is {self.value:.4g} {self.unit}, {side} {self.threshold:.4g}"


@dataclass(frozen=True, slots=True)
class Door:
    """Where one door stands. `opens_s`: when a shut door may open or be probed."""

    state: DoorState = DoorState.ALLOWED
    since_s: float = 0.0
    opens_s: float = 0.0  # 0: it never shut
    num_trips: int = 0  # in a row
    reading: Reading | None = None  # the last; None: no data
    why: str = ""  # of the last trip

    @property
    def has_shut(self) -> bool:
        """It tripped before, however long ago."""
        return self.opens_s > 0


def advance(
    door: Door, reading: Reading | None, now_s: float, timing: DoorTiming, *, needs_probes: bool
) -> Door:
    """The door after a look at `reading` (None: no data), taken since `door.since_s` if it is probing."""
    if door.state is DoorState.SHUT and needs_probes:  # it keeps what shut it until it is tried again
        if now_s < door.opens_s:
            return door
        return replace(door, state=DoorState.PROBING, since_s=now_s, reading=None)
    door = replace(door, reading=reading)
    is_bad = reading is not None and reading.is_enough and reading.severity > 1
    if door.state is DoorState.ALLOWED:
        if is_bad:
            return _trip(door, reading, now_s, timing, needs_probes=needs_probes)
        if door.num_trips and now_s - door.since_s >= timing.forgive_s:
            return replace(door, num_trips=0)
        return door
    if door.state is DoorState.SHUT:
        if now_s < door.opens_s:
            return door
        if reading is None or reading.severity <= timing.reopen_ratio:
            return _open(door, now_s)
        return door
    if is_bad:
        return _trip(door, reading, now_s, timing, needs_probes=needs_probes)
    if reading is not None and reading.is_enough:
        is_good = reading.severity <= timing.reopen_ratio
        if is_good or reading.num_samples >= 4 * reading.min_samples:  # middling, for long: no reason to shut
            return _open(door, now_s)
    return door


def _open(door: Door, now_s: float) -> Door:
    return replace(door, state=DoorState.ALLOWED, since_s=now_s)


def _trip(
    door: Door, reading: Reading | None, now_s: float, timing: DoorTiming, *, needs_probes: bool
) -> Door:
    cooldown_s = timing.sensed_cooldown_s
    if needs_probes:
        longest = timing.max_cooldown_s / timing.cooldown_s
        cooldown_s = timing.cooldown_s * min(longest, timing.backoff ** min(door.num_trips, 64))
    return Door(
        state=DoorState.SHUT,
        since_s=now_s,
        opens_s=now_s + min(cooldown_s, timing.max_cooldown_s),
        num_trips=door.num_trips + 1,
        reading=reading,
        why=reading.sentence() if reading is not None else "",
    )


class ProbeBudget:
    """Lets at most `share` of the requests asked about be probes, plus `credit` to begin with."""

    def __init__(self, share: float, credit: float = 1.0) -> None:
        self._share = share
        self._credit = credit

    @property
    def has_one(self) -> bool:
        """A probe could be made now."""
        return self._credit >= 1.0 - 1e-9

    def count(self, *, was_probe: bool) -> None:
        """A request that met the door, and whether it was let through to probe."""
        self._credit = min(1.0, self._credit + self._share) - (1.0 if was_probe else 0.0)
