"""How load, latency and the policy mix went over the last day, in two resolutions, in memory."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from engine.types import StepRecord
from specgate.clock import Clock
from specgate.types import RequestOutcome

FINE_S, FINE_SIZE = 5.0, 360  # half an hour
COARSE_S, COARSE_SIZE = 300.0, 288  # a day
RANGES = {"30m": FINE_S, "24h": COARSE_S}
_MAX_SAMPLES = 512  # waits and latencies kept per interval; later ones replace earlier ones


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is read at a moment, over all models."""

    num_running: int
    num_waiting: int
    used_kv_ratio: float | None


@dataclass(slots=True)
class _Interval:
    starts: float  # Unix seconds
    num_looks: int = 0
    running: int = 0  # sum over looks
    waiting: int = 0
    max_kv: float | None = None
    num_tokens: int = 0
    policies: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    refused: int = 0
    waits_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    ttfts_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    tpots_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))

    def describe(self, length_s: float) -> dict[str, Any]:
        looks = self.num_looks
        return {
            "time": round(self.starts, 3),
            "running": round(self.running / looks, 2) if looks else None,
            "waiting": round(self.waiting / looks, 2) if looks else None,
            "used_kv_ratio": self.max_kv,
            "tokens_per_s": round(self.num_tokens / length_s, 2),
            "policies": dict(self.policies),
            "failed": self.failed,
            "refused": self.refused,
            "queue_wait_p95_ms": _percentile_ms(self.waits_s, 0.95),
            "ttft_p50_ms": _percentile_ms(self.ttfts_s, 0.5),
            "ttft_p95_ms": _percentile_ms(self.ttfts_s, 0.95),
            "tpot_p50_ms": _percentile_ms(self.tpots_s, 0.5),
        }


class _Series:
    """Intervals of one length; the last is still open."""

    def __init__(self, length_s: float, size: int) -> None:
        self.length_s = length_s
        self.closed: deque[dict[str, Any]] = deque(maxlen=size)
        self._open: _Interval | None = None

    def at(self, now: float) -> _Interval:
        """The interval of this moment; earlier ones are closed."""
        starts = math.floor(now / self.length_s) * self.length_s
        if self._open is None or self._open.starts != starts:
            if self._open is not None:
                self.closed.append(self._open.describe(self.length_s))
            self._open = _Interval(starts)
        return self._open


class History:
    """Fed by outcomes, engine steps and a look every now and then."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._series = {name: _Series(length, _SIZES[name]) for name, length in RANGES.items()}
        self._has_steps: set[str] = set()

    def look(self, gauges: Gauges) -> None:
        """As of now; closes intervals that are over."""
        for interval in self._now():
            interval.num_looks += 1
            interval.running += gauges.num_running
            interval.waiting += gauges.num_waiting
            if gauges.used_kv_ratio is not None:
                interval.max_kv = round(max(interval.max_kv or 0.0, gauges.used_kv_ratio), 4)

    def stepped(self, model: str, record: StepRecord) -> None:
        """A model's engine step: tokens are counted as they come."""
        if record.is_warm_up:
            return
        self._has_steps.add(model)
        for interval in self._now():
            interval.num_tokens += record.num_emitted_tokens

    def finished(self, outcome: RequestOutcome) -> None:
        """A request that was decided, when it ended."""
        timings, is_seen = outcome.timings, outcome.request.model in self._has_steps
        for interval in self._now():
            interval.policies[outcome.decision.policy] += 1
            interval.failed += outcome.outcome in ("error", "deadline")
            interval.waits_s.append(timings.queue_wait_s)
            if not is_seen:
                interval.num_tokens += outcome.num_output_tokens
            if timings.ttft_s is not None:
                interval.ttfts_s.append(timings.ttft_s)
            if timings.tpot_s is not None:
                interval.tpots_s.append(timings.tpot_s)

    def refused(self) -> None:
        """A request that did not run."""
        for interval in self._now():
            interval.refused += 1

    def samples(self, name: str, since: float) -> dict[str, Any]:
        """Closed intervals that start later than `since` (Unix seconds), oldest first; `name` of `RANGES`."""
        self._now()
        series = self._series[name]
        found: list[dict[str, Any]] = []
        for sample in reversed(series.closed):
            if sample["time"] <= since:
                break
            found.append(sample)
        return {"interval_s": series.length_s, "samples": found[::-1]}

    def _now(self) -> list[_Interval]:
        now = self._clock.wall()
        return [series.at(now) for series in self._series.values()]


_SIZES = {"30m": FINE_SIZE, "24h": COARSE_SIZE}


def _percentile_ms(values: deque[float], share: float) -> float | None:
    """Nearest rank; None where nothing was seen."""
    if not values:
        return None
    ranked = sorted(values)
    return round(ranked[max(0, math.ceil(share * len(ranked)) - 1)] * 1e3, 3)
