"""What happened, in a bounded list: guards, rollouts, restarts, faults, switches. For the console's timeline.

Each is also in the process's log; here are the last ones, without the lines between them. Like ones that
follow within a minute are one entry with a count, so that a flood cannot wash out what came before it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Literal

from specgate.clock import Clock

Level = Literal["info", "warning", "error"]
SIZE = 500
_LIKE_S = 60.0


@dataclass(slots=True)
class Event:
    """Times are Unix seconds. `kind`: server, engine, guard, rollout, drafter, planner, switch, request,
    refused, config."""

    id: int
    time: float
    kind: str
    level: Level
    message: str
    model: str | None = None
    subject: str | None = None  # the guard, drafter or rollout it is about
    num: int = 1  # like ones within a minute of the last
    last_time: float = 0.0


class Events:
    """The last `SIZE`."""

    def __init__(self, clock: Clock, size: int = SIZE) -> None:
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=size)
        self._latest: dict[tuple[str, str | None, str | None], Event] = {}
        self._num = 0

    def add(
        self,
        kind: str,
        message: str,
        level: Level = "info",
        *,
        model: str | None = None,
        subject: str | None = None,
        may_join: bool = False,
    ) -> None:
        """Something happened now. `may_join`: to be counted with a like one (kind, model and subject)."""
        now = self._clock.wall()
        key = (kind, model, subject)
        latest = self._latest.get(key)
        if may_join and latest is not None and now - latest.last_time < _LIKE_S:
            latest.num += 1
            latest.last_time = now
            latest.message = message
            return
        self._num += 1
        event = Event(self._num, now, kind, level, message, model, subject, last_time=now)
        if may_join:
            self._latest[key] = event
        self._events.append(event)

    def last(self, limit: int) -> list[dict[str, Any]]:
        """Newest first."""
        return [asdict(self._events[-1 - i]) for i in range(min(limit, len(self._events)))]
