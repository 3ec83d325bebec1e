"""Keeps a model's snapshot fresh, in decisions, in the engine and on disk."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from engine.config import EngineConfig
from specgate.backends.base import Backend
from specgate.clock import Clock
from specgate.config.schema import LearningConfig, ModelConfig
from specgate.learning import Learner
from specgate.model_store import ModelStore, fingerprint
from specgate.policy.speedup import coefficients
from specgate.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)


class LearningLoop:
    """Of one model: restores at once, then publishes and saves until it is stopped."""

    def __init__(
        self,
        model: ModelConfig,
        learner: Learner,
        config: LearningConfig,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._backend: Backend | None = None
        self._learner = learner
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._saved_s = clock.monotonic()
        self._meta = {"model": model.id}
        self._store: ModelStore | None = None
        self.has_latency_model = False  # of this very setting, from an earlier run
        if config.folder is not None:
            key: str = model.backend
            if model.backend == "embedded":
                key = fingerprint(model.engine or EngineConfig())
            self._store = ModelStore(Path(config.folder), model.id, key)
            self.has_latency_model = self._store.restore(learner)

    def attach(self, backend: Backend) -> None:
        """Whose steps are learned from, and who is sent the snapshots."""
        self._backend = backend
        backend.on_step(self._learner.stepped)

    def start(self) -> None:
        """Begin; returns at once."""
        self._task = asyncio.create_task(self._run(), name="learning")

    async def stop(self) -> None:
        """Save a last time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._save()

    async def _run(self) -> None:
        while True:
            self.publish()
            if self._clock.monotonic() - self._saved_s >= self._config.save_every_s:
                await self._save()
            await asyncio.sleep(self._config.publish_every_s)

    def publish(self) -> None:
        """One snapshot, if there is anything new."""
        learner = self._learner
        if self._backend is None:
            return
        learner.set_methods(self._backend.card.methods)
        self._metrics.loaded(self._backend.card.methods)
        if not learner.refresh():
            return
        self._backend.push_snapshot(learner.view.to_wire())
        if learner.view.step is not None:
            self._metrics.fitted(coefficients(learner.view.step))

    async def _save(self) -> None:
        self._saved_s = self._clock.monotonic()
        if self._store is not None:
            states = self._store.snapshot(self._learner)
            meta = self._meta | {"saved": self._clock.wall()}
            await asyncio.get_running_loop().run_in_executor(None, self._store.save, states, meta)
