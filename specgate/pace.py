"""When slots will be free, from how long requests have held theirs so far. Pure but for the injected clock.

Requests that began together end together, so the pace alone (slots over the mean time one is held)
says too little: the next free slot may be a whole answer away. Each of those running is expected to go
on as one of those did, among the last that ended, that held its slots for longer than it has by now.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from specgate.clock import Clock

_KEPT = 32  # finished requests the prediction is from
_MIN_HOLDS = 4  # fewer say nothing
_ROUNDING = 1e-6
_FRESH_S = 0.01  # between two predictions with nothing begun or ended: ages hardly change


class Hold:
    """One request's slots."""

    __slots__ = ("num_slots", "since_s")

    def __init__(self, num_slots: int, since_s: float) -> None:
        self.num_slots = num_slots
        self.since_s = since_s


class Pace:
    """Of one model's slots."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running: set[Hold] = set()
        self._last_s: deque[float] = deque(maxlen=_KEPT)
        self._frees_s: list[float] | None = None  # when each slot in use is expected to be free, in order
        self._made_s = 0.0

    def begin(self, num_slots: int) -> Hold:
        """A request takes so many."""
        hold = Hold(num_slots, self._clock.monotonic())
        self._running.add(hold)
        self._frees_s = None
        return hold

    def end(self, hold: Hold) -> None:
        """It gives them back."""
        self._running.discard(hold)
        self._last_s.append(self._clock.monotonic() - hold.since_s)
        self._frees_s = None

    @property
    def mean_s(self) -> float | None:
        """For how long slots are held; None while too few have ended."""
        return sum(self._last_s) / len(self._last_s) if len(self._last_s) >= _MIN_HOLDS else None

    def wait_s(self, num_slots: int, num_free: int) -> float | None:
        """Until so many are free for somebody, of which `num_free` are now; None while nothing is known."""
        mean_s = self.mean_s
        if mean_s is None:
            return None
        if num_slots <= num_free or not self._running:
            return 0.0
        now_s = self._clock.monotonic()
        if self._frees_s is None or now_s - self._made_s > _FRESH_S:
            self._frees_s, self._made_s = self._predict(now_s), now_s
        rounds, place = divmod(num_slots - num_free - 1, len(self._frees_s))
        return max(self._frees_s[place] - now_s, 0.0) + rounds * mean_s

    def _predict(self, now_s: float) -> list[float]:
        """For each slot in use, in order: when so many are expected to have been given back.

        What is expected are counts, not the order of single ends: of eight that may end at any time
        one will long before any of them is due.
        """
        last = np.sort(np.asarray(self._last_s))
        since = np.array([hold.since_s for hold in self._running])
        slots = np.array([hold.num_slots for hold in self._running], dtype=float)
        ages = now_s - since
        ended = np.searchsorted(last, ages, side="right")  # of the last, those that had ended by its age
        left = len(last) - ended
        may_end = np.arange(len(last)) >= ended[:, None]
        share = np.where(may_end, slots[:, None] / np.maximum(left, 1)[:, None], 0.0)
        # One that goes on for longer than any that was seen: as long again.
        times = np.concatenate([(since[:, None] + last).ravel(), since + 2 * ages])
        shares = np.concatenate([share.ravel(), np.where(left == 0, slots, 0.0)])
        order = np.argsort(times)
        given_back = np.cumsum(shares[order])
        num = round(float(given_back[-1]))
        places = np.searchsorted(given_back, np.arange(1, num + 1) - _ROUNDING)
        return [float(time_s) for time_s in times[order][places]]
