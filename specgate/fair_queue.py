"""Who is next: by priority, then fairly between keys, then in order of arrival. Pure: no clock, no I/O.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) with answers as the unit of service. Each key
has a virtual time, which one served answer moves on by 1 / weight; of the keys that wait, the one
that is furthest behind is next. A key that comes (back) begins at the queue's virtual time: what it
did not use while it was away is neither credit nor debt. Between two keys that wait all along,
service by weight therefore never differs by more than one request of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in the queue. `cost` counts its answers; smaller priorities go first."""

    key: str
    cost: int
    weight: float = 1.0
    priority: int = 0
    order: int = 0  # of arrival; set by the queue
    has_waited: bool = False  # before it was let in; set by admission


class FairQueue:
    """Tickets that wait."""

    def __init__(self) -> None:
        self._classes: dict[int, dict[str, deque[Ticket]]] = {}  # priority -> key -> its tickets
        self._virtual: dict[str, float] = {}  # key -> where its next ticket starts
        self._now = 0.0  # virtual time: where the last served ticket started
        self._num_pushed = 0
        self._num_waiting: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(self._num_waiting.values())

    def num_of(self, key: str) -> int:
        """Tickets of this key that wait."""
        return self._num_waiting.get(key, 0)

    def push(self, ticket: Ticket) -> None:
        """Let it wait."""
        if not self.num_of(ticket.key):
            self._virtual[ticket.key] = self._start_of(ticket.key)
        ticket.order = self._num_pushed
        self._num_pushed += 1
        keys = self._classes.setdefault(ticket.priority, {})
        keys.setdefault(ticket.key, deque()).append(ticket)
        self._num_waiting[ticket.key] = self.num_of(ticket.key) + 1

    def next(self, may_run: Callable[[Ticket], bool] = lambda _ticket: True) -> Ticket | None:
        """Whose turn it is among each key's first, where that may run now. It stays in the queue."""
        for priority in sorted(self._classes):
            best: tuple[float, int] | None = None
            chosen: Ticket | None = None
            for key, tickets in self._classes[priority].items():
                if not may_run(tickets[0]):  # held back by a limit of its own: that earns no credit
                    self._virtual[key] = self._start_of(key)
                    continue
                rank = (self._virtual[key], tickets[0].order)
                if best is None or rank < best:
                    best, chosen = rank, tickets[0]
            if chosen is not None:
                return chosen
        return None

    def serve(self, ticket: Ticket) -> None:
        """It leaves the queue to run, and its key is charged."""
        self._take_out(ticket)
        start = self._virtual[ticket.key]
        self._now = max(self._now, start)
        self._virtual[ticket.key] = start + ticket.cost / ticket.weight

    def drop(self, ticket: Ticket) -> bool:
        """It leaves the queue unserved, at no charge. False if it did not wait any more."""
        if ticket not in self._classes.get(ticket.priority, {}).get(ticket.key, ()):
            return False
        self._take_out(ticket)
        return True

    def cost_ahead(self, ticket: Ticket) -> int:
        """Answers that are served before a ticket that would be pushed now, as things stand."""
        ahead = sum(
            waiting.cost
            for priority, keys in self._classes.items() if priority < ticket.priority
            for tickets in keys.values() for waiting in tickets
        )  # fmt: skip
        peers = self._classes.get(ticket.priority, {})
        own = peers.get(ticket.key, ())
        start = self._start_of(ticket.key) if not own else self._virtual[ticket.key]
        start += sum(waiting.cost / waiting.weight for waiting in own)
        for key, tickets in peers.items():
            at = self._virtual[key]
            for waiting in tickets:
                if key != ticket.key and at > start:
                    break
                ahead += waiting.cost
                at += waiting.cost / waiting.weight
        return ahead

    def _start_of(self, key: str) -> float:
        return max(self._virtual.get(key, 0.0), self._now)

    def _take_out(self, ticket: Ticket) -> None:
        keys = self._classes[ticket.priority]
        tickets = keys[ticket.key]
        tickets.remove(ticket)
        if not tickets:
            del keys[ticket.key]
            if not keys:
                del self._classes[ticket.priority]
        self._num_waiting[ticket.key] -= 1
        if not self._num_waiting[ticket.key]:
            del self._num_waiting[ticket.key]
