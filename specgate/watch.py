"""What must happen though no request comes: guards look, rollouts rise or fall, their state is saved."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from specgate.consistency import ConsistencyChecker
from specgate.pipeline import ServedModel
from specgate.rollouts import Rollouts

logger = logging.getLogger(__name__)

EVERY_S = 0.25


class Watch:
    """One task, from `start` to `stop`."""

    def __init__(
        self, models: Mapping[str, ServedModel], rollouts: Rollouts, checkers: Sequence[ConsistencyChecker]
    ) -> None:
        self._models = models
        self._rollouts = rollouts
        self._checkers = checkers
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
        for name, model in self._models.items():
            model.guards.look(model.meter.view(model.admission, model.backend.load()))
            if model.backend.status().is_ready:
                loaded[name] = model.backend.card.methods
        self._rollouts.tick(loaded)
