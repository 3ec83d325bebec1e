"""When a replica is left alone, and how much may be tried twice. Pure: the time is told.

    closed --(too many failures)--> open --(open_s over)--> half-open --(the one probe succeeds)--> closed
                                     ^---------(the probe fails; twice as long)--------|

An attempt ends in one of three ways: it succeeded (any answer of the server that is no 5xx: it is
alive and knows what it says), it failed, or it says nothing (the client left first).
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from specgate.config.upstream import BreakerConfig, RetryConfig


class BreakerState(StrEnum):
    """As shown in /admin/state."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Of one replica."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._ended: deque[bool] = deque(maxlen=config.window)  # True: failed
        self._opens_s: float | None = None  # when it may be tried again; None: closed
        self._num_trips = 0  # in a row
        self._is_probing = False

    def state(self, now_s: float) -> BreakerState:
        """Where it stands."""
        if self._opens_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._opens_s else BreakerState.HALF_OPEN

    def lets_through(self, now_s: float) -> bool:
        """Whether an attempt may begin. Half-open: one at a time."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._is_probing)

    def begin(self, now_s: float) -> bool:
        """An attempt begins. True: it is the probe, which `end` must be told."""
        if self.state(now_s) is not BreakerState.HALF_OPEN:
            return False
        self._is_probing = True
        return True

    def end(self, now_s: float, failed: bool | None, *, was_probe: bool) -> None:
        """The attempt is over. `failed` None: it says nothing of the server."""
        if was_probe:
            self._is_probing = False
        if failed is None:
            return
        if self._opens_s is None:
            self._ended.append(failed)
            num = sum(self._ended)
            if failed and num >= max(
                self._config.min_failures, self._config.failure_share * len(self._ended)
            ):
                self._trip(now_s)
        elif was_probe and failed:
            self._trip(now_s)
        elif was_probe:
            self._opens_s = None
            self._num_trips = 0
            self._ended.clear()

    def _trip(self, now_s: float) -> None:
        long_s = self._config.open_s * 2.0 ** min(self._num_trips, 32)
        self._opens_s = now_s + min(long_s, max(self._config.max_open_s, self._config.open_s))
        self._num_trips += 1
        self._ended.clear()


class RetryBudget:
    """Retries as a share of requests, so that an outage is not multiplied by them."""

    def __init__(self, config: RetryConfig) -> None:
        self._share = config.budget_share
        self._most = float(config.budget_burst)
        self._credit = self._most

    def earn(self) -> None:
        """A request came."""
        self._credit = min(self._most, self._credit + self._share)

    def take(self) -> bool:
        """Spend one retry. False: there is none left."""
        if self._credit < 1.0 - 1e-9:
            return False
        self._credit -= 1.0
        return True
