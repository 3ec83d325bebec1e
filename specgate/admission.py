"""Who may enter the backend, and how long those before them waited.

A bounded first-come-first-served queue per model, counted in answers: a request for `n` answers
takes n of the slots (all of them, if n is more than there are).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from specgate.clock import Clock
from specgate.config import AdmissionConfig
from specgate.errors import TooManyRequests

_MAX_RETRY_AFTER_S = 60


@dataclass(slots=True)
class _Waiting:
    weight: int
    since_s: float
    admitted: asyncio.Future[None]


class Admission:
    """One model's slots and queue."""

    def __init__(self, config: AdmissionConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._queue: deque[_Waiting] = deque()
        self._num_used = 0
        self.num_running = 0  # requests admitted and not finished
        self._finished_s: deque[float] = deque(maxlen=32)

    @property
    def num_queued(self) -> int:
        """Requests waiting."""
        return len(self._queue)

    def waits_s(self) -> list[float]:
        """How long each of the waiting has waited so far, oldest first."""
        now = self._clock.monotonic()
        return [now - waiting.since_s for waiting in self._queue]

    @asynccontextmanager
    async def slot(self, num_answers: int) -> AsyncIterator[None]:
        """Hold slots for the block. Raises TooManyRequests when the queue is full."""
        weight = min(num_answers, self._config.max_concurrent)
        await self._enter(weight)
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._finished_s.append(self._clock.monotonic())
            self._leave(weight)

    async def _enter(self, weight: int) -> None:
        if not self._queue and self._num_used + weight <= self._config.max_concurrent:
            self._num_used += weight
            return
        if len(self._queue) >= self._config.max_queue:
            raise TooManyRequests(
                f"The queue is full: {len(self._queue)} requests are waiting. Try again later.",
                retry_after_s=self._retry_after_s(),
            )
        waiting = _Waiting(weight, self._clock.monotonic(), asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        try:
            await waiting.admitted
        except asyncio.CancelledError:
            if waiting in self._queue:
                self._queue.remove(waiting)
                self._admit()  # a smaller request behind it may fit now
            elif not waiting.admitted.cancelled():  # cancelled in the very moment it was admitted
                self._leave(weight)
            raise

    def _leave(self, weight: int) -> None:
        self._num_used -= weight
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._num_used + self._queue[0].weight <= self._config.max_concurrent:
            waiting = self._queue.popleft()
            if not waiting.admitted.cancelled():  # else its client is leaving and has not run yet
                self._num_used += waiting.weight
                waiting.admitted.set_result(None)

    def _retry_after_s(self) -> int:
        """When the present queue will be through, by the pace of the last requests finished."""
        if len(self._finished_s) < 2:
            return 1
        pace_s = (self._clock.monotonic() - self._finished_s[0]) / len(self._finished_s)
        return max(1, min(_MAX_RETRY_AFTER_S, math.ceil(pace_s * (len(self._queue) + 1))))
