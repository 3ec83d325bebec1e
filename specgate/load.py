"""How busy a model is, over a sliding window: arrivals per second and queue wait."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from engine.types import EngineLoad
from specgate.admission import Admission
from specgate.clock import Clock
from specgate.types import LoadView

_MAX_SAMPLES = 10_000
_REFRESH_S = 0.05  # sorting the window anew for every request would cost more than it tells
_SAMPLES_A_REFRESH = 500  # with more of them it is sorted the more rarely: so many in `_REFRESH_S`


@dataclass(slots=True)
class Wait:
    """One request's queue wait: that of admission, until the backend's is known too."""

    at_s: float
    value_s: float


class LoadMeter:
    """Fed by the pipeline, read by decisions."""

    def __init__(self, clock: Clock, window_s: float, min_samples: int) -> None:
        self._clock = clock
        self._window_s = window_s
        self._min_samples = min_samples
        self._arrivals: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._answers: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._waits: deque[Wait] = deque(maxlen=_MAX_SAMPLES)
        self._p95: tuple[float, float | None] = (-math.inf, None)  # (when computed, queue wait in ms)

    def reconfigure(self, window_s: float, min_samples: int) -> None:
        """Look otherwise from now on."""
        self._window_s, self._min_samples = window_s, min_samples

    def arrived(self, num_answers: int = 1) -> None:
        """A request came in, for so many answers."""
        now = self._clock.monotonic()
        self._arrivals.append(now)
        self._answers.extend([now] * num_answers)

    def admitted(self, wait_s: float) -> Wait:
        """A request was admitted. Its wait in the backend is added to what this returns, once known."""
        wait = Wait(self._clock.monotonic(), wait_s)
        self._waits.append(wait)
        return wait

    def view(self, admission: Admission, engine: EngineLoad) -> LoadView:
        """As of now. The queue wait covers those still waiting, with what they waited so far."""
        now = self._clock.monotonic()
        for times in (self._arrivals, self._answers):
            while times and times[0] < now - self._window_s:
                times.popleft()
        if now - self._p95[0] >= _REFRESH_S * max(1.0, len(self._waits) / _SAMPLES_A_REFRESH):
            self._p95 = (now, self._queue_wait_p95_ms(now, admission))
        total = engine.num_total_blocks
        return LoadView(
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_queued=admission.num_queued,
            num_admitted=admission.num_running,
            num_held=engine.num_held,
            requests_per_s=len(self._arrivals) / self._window_s,
            answers_per_s=len(self._answers) / self._window_s,
            queue_wait_p95_ms=self._p95[1],
            free_kv_ratio=engine.num_free_blocks / total if total else None,
        )

    def _queue_wait_p95_ms(self, now: float, admission: Admission) -> float | None:
        """Nearest rank; None when there are too few samples."""
        while self._waits and self._waits[0].at_s < now - self._window_s:
            self._waits.popleft()
        waits = sorted([wait.value_s for wait in self._waits] + admission.waits_s())
        if len(waits) < self._min_samples:
            return None
        return waits[max(0, math.ceil(0.95 * len(waits)) - 1)] * 1e3
