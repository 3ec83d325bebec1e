"""Trying shut arms again: rarely, with growing pauses, and within a share of the engine's time. Pure.

An arm is a method for a task, or plain decoding. One that is in use needs no probe. One that is not
is granted a few drafts for one sequence after a pause, which doubles each time nothing comes of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 30.0
MEMORY_S = 120.0  # the share is kept over about this long
_START_BUSY_S = 5.0  # engine time that a new server may reckon with

ArmKey = tuple[str, str]  # method, task


@dataclass(slots=True)
class _Pause:
    until_s: float
    length_s: float = FIRST_PAUSE_S


@dataclass(slots=True)
class Probes:
    """When which arm may be tried, and what trying has cost."""

    share: float = 0.01
    earning_s: float = _START_BUSY_S  # the engine's time that counts for it
    spent_s: float = 0.0
    _pauses: dict[ArmKey, _Pause] = field(default_factory=dict)

    def pass_time(self, busy_s: float, spent_s: float, weight: float = 1.0) -> None:
        """The engine worked for `busy_s`, of which `spent_s` was for a probe. `weight`: how much of that time
        counts towards the share."""
        keep = math.exp(-busy_s / MEMORY_S)
        self.earning_s = self.earning_s * keep + weight * busy_s
        self.spent_s = self.spent_s * keep + spent_s

    def in_use(self, arm: ArmKey, now_s: float) -> None:
        """The arm needs no probe; if it is shut, the first pause begins."""
        self._pauses[arm] = _Pause(now_s + FIRST_PAUSE_S)

    def is_due(self, arm: ArmKey, now_s: float) -> bool:
        """True when its pause is over. An arm heard of for the first time begins with a pause."""
        pause = self._pauses.get(arm)
        if pause is None:
            self._pauses[arm] = _Pause(now_s + FIRST_PAUSE_S)
            return False
        return now_s >= pause.until_s

    def hasten(self, now_s: float) -> None:
        """The machine has changed: what was found before may be wrong now."""
        for pause in self._pauses.values():
            pause.length_s = FIRST_PAUSE_S
            pause.until_s = min(pause.until_s, now_s)

    def put_off(self, arm: ArmKey, now_s: float) -> None:
        """It cannot be tried now."""
        self._pauses[arm].until_s = now_s + FIRST_PAUSE_S / 4

    @property
    def credit_s(self) -> float:
        """What may be spent now so that the share holds."""
        return self.share * self.earning_s - self.spent_s

    def begin(self, arm: ArmKey, now_s: float) -> None:
        """The arm is tried now; the next time it waits twice as long."""
        pause = self._pauses[arm]
        pause.length_s = min(2 * pause.length_s, MAX_PAUSE_S)
        pause.until_s = now_s + pause.length_s
