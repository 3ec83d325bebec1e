"""How busy a model is, over a sliding window: arrivals per second and queue wait."""

from __future__ import annotations

import math
from collections import deque

from engine.types import EngineLoad
from specgate.admission import Admission
from specgate.clock import Clock
from specgate.types import LoadView

_MAX_SAMPLES = 10_000


class LoadMeter:
    """Fed by the pipeline, read by decisions."""

    def __init__(self, clock: Clock, window_s: float, min_samples: int) -> None:
        self._clock = clock
        self._window_s = window_s
        self._min_samples = min_samples
        self._arrivals: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._waits: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)  # (when, queue wait in s)

    def arrived(self) -> None:
        """A request came in."""
        self._arrivals.append(self._clock.monotonic())

    def waited(self, wait_s: float) -> None:
        """A request's whole queue wait is known: admission and engine queue."""
        self._waits.append((self._clock.monotonic(), wait_s))

    def view(self, admission: Admission, engine: EngineLoad) -> LoadView:
        """As of now. The queue wait covers those still waiting, with what they waited so far."""
        since = self._clock.monotonic() - self._window_s
        while self._arrivals and self._arrivals[0] < since:
            self._arrivals.popleft()
        while self._waits and self._waits[0][0] < since:
            self._waits.popleft()
        waits = [wait for _, wait in self._waits] + admission.waits_s()
        total = engine.num_total_blocks
        return LoadView(
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_queued=admission.num_queued,
            requests_per_s=len(self._arrivals) / self._window_s,
            queue_wait_p95_ms=_p95(waits) * 1e3 if len(waits) >= self._min_samples else None,
            free_kv_ratio=engine.num_free_blocks / total if total else None,
        )


def _p95(values: list[float]) -> float:
    """Nearest-rank 95th percentile."""
    return sorted(values)[max(0, math.ceil(0.95 * len(values)) - 1)]
