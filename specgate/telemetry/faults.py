"""What failed inside engine steps without failing a request, in the process's log."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from engine.types import StepRecord
from specgate.clock import Clock
from specgate.telemetry.events import Events

logger = logging.getLogger(__name__)

_EVERY_S = 60.0


@dataclass(slots=True)
class _Said:
    at_s: float
    num_since: int = 0


class FaultLog:
    """Of one model. A fault that comes back is told once a minute, with how often it came."""

    def __init__(self, model_id: str, clock: Clock, events: Events | None = None) -> None:
        self._model_id = model_id
        self._clock = clock
        self._events = events
        self._said: dict[tuple[str, str], _Said] = {}

    def stepped(self, record: StepRecord) -> None:
        """To be given every step's record."""
        for error in record.drafter_errors:
            what = f"the drafter {error.method} failed ({error.kind})"
            self._tell(error.method, error.kind, f"{what}: {error.message}")
        if record.num_planner_errors:
            self._tell("planner", "", "the step planner failed: steps run without speculation")

    def _tell(self, who: str, kind: str, message: str) -> None:
        if self._events is not None:
            what = "drafter" if kind else "planner"
            subject = f"{who}: {kind}" if kind else who
            self._events.add(what, message, "warning", model=self._model_id, subject=subject, may_join=True)
        now_s = self._clock.monotonic()
        said = self._said.get((who, kind))
        if said is not None and now_s - said.at_s < _EVERY_S:
            said.num_since += 1
            return
        self._said[who, kind] = _Said(now_s)
        num_since = said.num_since if said is not None else 0
        again = f" ({num_since} more since the last such line)" if num_since else ""
        logger.warning("%s: %s%s", self._model_id, message, again)
