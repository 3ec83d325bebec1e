"""The servers of one policy: who is up, who is least loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from specgate.backends.openai_http.breaker import Breaker, BreakerState
from specgate.clock import Clock
from specgate.config.upstream import OpenAIHttpConfig, PoolConfig


class AttemptListener(Protocol):
    """Who is told how attempts end: metrics and guards."""

    def __call__(self, policy: str, replica: str, outcome: Outcome) -> None: ...


@dataclass(slots=True, eq=False)
class Replica:
    """One server. `is_healthy` None: not asked yet."""

    url: str
    breaker: Breaker
    is_healthy: bool | None = None
    why: str = "not asked yet"  # not healthy
    last_failure: str | None = None  # what the last attempt that it failed came to
    num_failed_checks: int = 0  # in a row
    num_open: int = 0  # attempts running
    last_used: int = 0  # counts attempts of the pool
    rests_until_s: float = 0.0  # it asked to be left alone (Retry-After)

    def fault(self, now_s: float) -> str | None:
        """Why it cannot be asked now; None: it can."""
        if self.is_healthy is not True:
            return self.why
        if not self.breaker.lets_through(now_s):
            return "failed too often" if self.breaker.state(now_s) is BreakerState.OPEN else "is being tried"
        if now_s < self.rests_until_s:
            return f"asked to be left alone for {self.rests_until_s - now_s:.0f} s more"
        return None


class Outcome(StrEnum):
    """How an attempt ended."""

    OK = "ok"
    REFUSED = "refused"  # a sound server said no
    LEFT = "left"  # nobody wanted the rest
    CONNECT = "connect"
    TIMEOUT = "timeout"
    STATUS = "status"  # 5xx, or an error in its place
    BROKEN = "broken"

    @property
    def failed(self) -> bool | None:
        """For the breaker; None: it says nothing of the server."""
        return None if self is Outcome.LEFT else self not in (Outcome.OK, Outcome.REFUSED)


@dataclass(slots=True)
class Attempt:
    """One request on its way to one replica."""

    replica: Replica
    pool: str  # its policy
    clock: Clock
    was_probe: bool
    listener: Callable[[Replica, Outcome], None]
    is_over: bool = field(default=False)

    def end(self, outcome: Outcome) -> None:
        """How it went. Only the first word counts."""
        if self.is_over:
            return
        self.is_over = True
        self.replica.num_open -= 1
        self.replica.breaker.end(self.clock.monotonic(), outcome.failed, was_probe=self.was_probe)
        self.listener(self.replica, outcome)


class Pool:
    """Replicas that all do the same."""

    def __init__(self, policy: str, config: PoolConfig, settings: OpenAIHttpConfig, clock: Clock) -> None:
        self.policy = policy
        self.config = config
        self.replicas = tuple(
            Replica(url.rstrip("/"), Breaker(settings.breaker)) for url in config.replicas
        )
        self._clock = clock
        self._num_attempts = 0
        self._listeners: list[AttemptListener] = []

    def on_attempt(self, listener: AttemptListener) -> None:
        """To be told how every attempt ends."""
        self._listeners.append(listener)

    @property
    def num_open(self) -> int:
        """Attempts running on all replicas."""
        return sum(replica.num_open for replica in self.replicas)

    def begin(self, tried: Collection[Replica] = ()) -> Attempt | None:
        """Start an attempt at the least loaded replica that can be asked, one not yet `tried` before all
        others. None: there is none."""
        now_s = self._clock.monotonic()
        fit = [replica for replica in self.replicas if replica.fault(now_s) is None]
        if not fit:
            return None
        replica = min(fit, key=lambda r: (r in tried, r.num_open, r.last_used))
        self._num_attempts += 1
        replica.last_used = self._num_attempts
        replica.num_open += 1
        return Attempt(replica, self.policy, self._clock, replica.breaker.begin(now_s), self._ended)

    def fault(self) -> str | None:
        """Why no replica can be asked now; None: one can. Callers see it, so it names no address."""
        now_s = self._clock.monotonic()
        faults = []
        for replica in self.replicas:
            why = replica.fault(now_s)
            if why is None:
                return None
            faults.append(why)
        return "; ".join(dict.fromkeys(faults))

    def rests_s(self) -> float | None:
        """Seconds until the first replica that asked to be left alone may be asked; None: none did."""
        now_s = self._clock.monotonic()
        rests = [r.rests_until_s - now_s for r in self.replicas if r.rests_until_s > now_s]
        return math.ceil(min(rests)) if rests else None

    def describe(self) -> Iterable[dict[str, Any]]:
        """Every replica, for /admin/state."""
        now_s = self._clock.monotonic()
        for replica in self.replicas:
            yield {
                "url": replica.url,
                "healthy": replica.is_healthy,
                "breaker": replica.breaker.state(now_s).value,
                "num_open": replica.num_open,
                "why_not": replica.fault(now_s),
                "last_failure": replica.last_failure,
            }

    def _ended(self, replica: Replica, outcome: Outcome) -> None:
        for listener in self._listeners:
            listener(self.policy, replica.url, outcome)
