"""Who may enter the backend, and how long those before them waited.

A bounded queue per model, counted in answers: a request for `n` answers takes n of the slots (all
of them, if n is more than there are). Who is next says `fair_queue`. Whoever cannot be served in
time is told at once, not after having waited. While some are turned away, the others are let in to
keep the slots busy, and no longer to wait as well: a queue is for bursts, and one that stands adds
to what answers take without more of them (Nichols and Jacobson, "Controlling queue delay", 2012).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from specgate.clock import Clock
from specgate.config import AdmissionConfig, KeyLimits
from specgate.errors import QueueTooSlow, TooManyRequests
from specgate.fair_queue import FairQueue, Ticket
from specgate.pace import Pace
from specgate.turnstile import Turnstile

_MAX_RETRY_AFTER_S = 60
_RESERVE = 4  # one part in so many of the queue is for keys with nothing waiting
_STANDING = 0.3  # of the wait that may be added to an answer, while others are turned away
_NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Entrant:
    """Who wants in: API key (its name), priority (smaller first), and how long it can wait."""

    key: str = ""
    priority: int = 0
    patience_s: float = math.inf


_ANYBODY = Entrant()


@dataclass(slots=True, eq=False)
class _Waiting:
    ticket: Ticket
    since_s: float
    admitted: asyncio.Future[None]


class Admission:
    """One model's slots and queue."""

    def __init__(
        self,
        config: AdmissionConfig,
        clock: Clock,
        limits_of: Callable[[str], KeyLimits] = lambda _key: _NO_LIMITS,
        has_many_keys: Callable[[], bool] = lambda: False,
    ) -> None:
        """`limits_of` gives a key's limits as they are now."""
        self._config = config
        self._clock = clock
        self._limits_of = limits_of
        self._has_many_keys = has_many_keys
        self._queue = FairQueue()
        self._waiting: dict[Ticket, _Waiting] = {}  # in order of arrival
        self._num_used = 0
        self._used_by: dict[str, int] = {}  # key -> answers running
        self.num_running = 0  # requests admitted and not finished
        self._pace = Pace(clock)
        self._crowded_until_s = -math.inf  # since the last that was turned away no answer's time has passed
        self._turnstile = Turnstile()

    @property
    def num_queued(self) -> int:
        """Requests waiting."""
        return len(self._queue)

    def waits_s(self) -> list[float]:
        """How long each of the waiting has waited so far, oldest first."""
        now = self._clock.monotonic()
        return [now - waiting.since_s for waiting in self._waiting.values()]

    def reconfigure(self, config: AdmissionConfig) -> None:
        """Other limits from now on. Who runs or waits already, stays."""
        self._config = config
        self._admit()

    @asynccontextmanager
    async def slot(self, num_answers: int, who: Entrant = _ANYBODY) -> AsyncIterator[None]:
        """Hold slots for the block. Raises TooManyRequests when the queue is full or too slow."""
        ticket = await self._enter(num_answers, who)
        self.num_running += 1
        hold = self._pace.begin(ticket.cost)
        try:
            if ticket.has_waited:  # many may have been let in at once
                await self._turnstile.enter()
            yield
        finally:
            self.num_running -= 1
            self._pace.end(hold)
            self._leave(ticket)

    def refusal(self, who: Entrant) -> TooManyRequests | None:
        """Why a request for one answer would be turned away now; then one for more would be as well.
        Changes nothing: see `turned_away`."""
        has_room = self._num_used < self._config.max_concurrent
        if has_room and not self._waiting:
            return None
        limits = self._limits_of(who.key)
        ticket = Ticket(who.key, 1, limits.weight, who.priority)
        if has_room:
            self._queue.push(ticket)
            runs = self._is_next(ticket)
            self._queue.drop(ticket)
            if runs:
                return None
        return self._problem(ticket, limits, who)

    def turned_away(self, problem: TooManyRequests) -> None:
        """Somebody was, with this. As long as an answer takes, others are then not let in to wait long."""
        if isinstance(problem, QueueTooSlow) and problem.is_for_all:
            self._crowded_until_s = self._clock.monotonic() + (self._pace.mean_s or 0.0)

    async def _enter(self, num_answers: int, who: Entrant) -> Ticket:
        limits = self._limits_of(who.key)
        cost = min(num_answers, self._config.max_concurrent)
        ticket = Ticket(who.key, cost, limits.weight, who.priority)
        self._queue.push(ticket)
        if self._is_next(ticket):
            self._start(ticket)
            return ticket
        self._queue.drop(ticket)
        if (problem := self._problem(ticket, limits, who)) is not None:
            self.turned_away(problem)
            raise problem
        self._queue.push(ticket)
        waiting = _Waiting(ticket, self._clock.monotonic(), asyncio.get_running_loop().create_future())
        self._waiting[ticket] = waiting
        try:
            await waiting.admitted
        except asyncio.CancelledError:
            if self._queue.drop(ticket):
                del self._waiting[ticket]
                self._admit()  # a smaller request behind it may fit now
            elif not waiting.admitted.cancelled():  # cancelled in the very moment it was admitted
                self._leave(ticket)
            raise
        return ticket

    def _problem(self, ticket: Ticket, limits: KeyLimits, who: Entrant) -> TooManyRequests | None:
        """Why it may not wait."""
        num_waiting, own = len(self._queue), self._queue.num_of(ticket.key)
        num_free = self._config.max_concurrent - self._num_used
        wait_s = self._pace.wait_s(self._queue.cost_ahead(ticket) + ticket.cost, num_free)
        room = self._config.max_queue
        if own and self._has_many_keys():
            room -= room // _RESERVE
        most_s = self._most_s()
        problem: TooManyRequests | None = None
        if limits.max_queue is not None and own >= limits.max_queue:
            problem = TooManyRequests(f"This key has {own} requests waiting, as many as it may.")
        elif num_waiting >= room:
            problem = TooManyRequests(f"The queue is full: {num_waiting} requests are waiting.")
        elif wait_s is not None and wait_s > min(who.patience_s, most_s):
            problem = QueueTooSlow(f"There would be {wait_s:.1f} s to wait, which is too long.")
            problem.is_for_all = wait_s > most_s
        if problem is not None:
            problem.retry_after_s = _retry_after_s(wait_s)
        return problem

    def _most_s(self) -> float:
        """For how long anybody may wait."""
        ratio, mean_s = self._config.max_wait_ratio, self._pace.mean_s
        relative = math.inf if ratio is None or mean_s is None else ratio * mean_s
        if self._clock.monotonic() < self._crowded_until_s:
            relative *= _STANDING
        return min(relative, self._config.max_wait_s or math.inf)

    def _is_next(self, ticket: Ticket) -> bool:
        """One in the queue runs at once."""
        return self._queue.next(self._may_run) is ticket and self._fits(ticket)

    def _may_run(self, ticket: Ticket) -> bool:
        """Whether its key may use as many slots more; one that asks for more than it may, has them alone."""
        most, used = self._limits_of(ticket.key).max_concurrent, self._used_by.get(ticket.key, 0)
        return most is None or not used or used + ticket.cost <= most

    def _cost(self, ticket: Ticket) -> int:
        """Slots it takes: no more than there are, so that it can run at all."""
        return min(ticket.cost, self._config.max_concurrent)

    def _fits(self, ticket: Ticket) -> bool:
        return self._num_used + self._cost(ticket) <= self._config.max_concurrent

    def _start(self, ticket: Ticket) -> None:
        self._queue.serve(ticket)
        ticket.cost = self._cost(ticket)  # what it holds from now on, whatever becomes of the limits
        self._num_used += ticket.cost
        self._used_by[ticket.key] = self._used_by.get(ticket.key, 0) + ticket.cost

    def _leave(self, ticket: Ticket) -> None:
        self._num_used -= ticket.cost
        self._used_by[ticket.key] -= ticket.cost
        if not self._used_by[ticket.key]:
            del self._used_by[ticket.key]
        self._admit()

    def _admit(self) -> None:
        while (ticket := self._queue.next(self._may_run)) is not None and self._fits(ticket):
            waiting = self._waiting.pop(ticket)
            if waiting.admitted.cancelled():  # its client is leaving and has not run yet
                self._queue.drop(ticket)
                continue
            self._start(ticket)
            ticket.has_waited = True
            waiting.admitted.set_result(None)


def _retry_after_s(wait_s: float | None) -> int:
    """When the present queue will be through."""
    return 1 if wait_s is None else max(1, min(_MAX_RETRY_AFTER_S, math.ceil(wait_s)))
