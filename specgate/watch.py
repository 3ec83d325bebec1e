"""What must happen though no request comes: guards look, rollouts rise or fall, their state is saved."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from specgate.backends.base import BackendStatus
from specgate.consistency import ConsistencyChecker
from specgate.pipeline import ServedModel
from specgate.rollouts import Rollouts
from specgate.telemetry.history import Gauges
from specgate.telemetry.recorder import Telemetry

logger = logging.getLogger(__name__)

EVERY_S = 0.25


class Watch:
    """One task, from `start` to `stop`."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        rollouts: Rollouts,
        checkers: Sequence[ConsistencyChecker],
        telemetry: Telemetry,
    ) -> None:
        self._models = models
        self._rollouts = rollouts
        self._checkers = checkers
        self._telemetry = telemetry
        self._statuses: dict[str, BackendStatus] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin; returns at once."""
        self._tasks = [asyncio.create_task(self._run(), name="watch")]
        self._tasks += [asyncio.create_task(c.run(), name="consistency") for c in self._checkers]

    async def stop(self) -> None:
        """End, and save a last time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._rollouts.save_if_dirty()

    async def _run(self) -> None:
        while True:
            self.look()
            await self._rollouts.save_if_due()
            await asyncio.sleep(EVERY_S)

    def look(self) -> None:
        """Once."""
        loaded = {}
        num_running = num_waiting = num_used = num_blocks = 0
        for name, model in self._models.items():
            engine = model.backend.load()
            load = model.meter.view(model.admission, engine)
            model.guards.look(load)
            num_running += model.admission.num_running
            num_waiting += load.num_queued
            num_used += engine.num_used_blocks
            num_blocks += engine.num_total_blocks
            status = model.backend.status()
            self._tell(name, status)
            if status.is_ready:
                loaded[name] = model.backend.card.methods
        self._rollouts.tick(loaded)
        used_kv = num_used / num_blocks if num_blocks else None
        self._telemetry.history.look(Gauges(num_running, num_waiting, used_kv))

    def _tell(self, name: str, now: BackendStatus) -> None:
        """A model that became ready, or no longer is, or lost its engine and has it back already."""
        before = self._statuses.get(name)
        self._statuses[name] = now
        events = self._telemetry.events
        if before is not None and now.num_restarts > before.num_restarts and now.is_ready:
            events.add("engine", f"restarted ({now.num_restarts} so far)", "warning", model=name)
        elif now.is_ready and (before is None or not before.is_ready):
            events.add("engine", "ready", model=name)
        elif before is None or now.is_ready:
            return
        elif before.is_ready or now.num_restarts > before.num_restarts:
            events.add("engine", f"not ready: {now.detail}", "error", model=name)
