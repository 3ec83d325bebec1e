"""Learned state on disk: one readable JSON file per served model.

A latency model belongs to one machine and one setting of the engine, so the file holds several of
them, by fingerprint; acceptance, lengths and waits belong to the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from router_models.base import State
from router_models.snapshot import load, save
from specgate import __version__
from specgate.learning import Learner

logger = logging.getLogger(__name__)

_LATENCY = "step_latency "
_MAX_FINGERPRINTS = 8


def fingerprint(config: EngineConfig) -> str:
    """What step times depend on: model, device, dtype, drafters, threads, versions, and this machine's
    number of processors."""
    threads = config.num_threads or os.environ.get("OMP_NUM_THREADS") or os.cpu_count()
    facts = {
        "engine": {k: v for k, v in asdict(config).items() if k not in ("num_blocks", "num_threads")},
        "threads": str(threads),
        "cpus": os.cpu_count(),
        "torch": metadata.version("torch"),
        "specgate": __version__,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{config.device} {config.dtype} {threads} threads {digest[:12]}"


class ModelStore:
    """Where one model's learner is kept."""

    def __init__(self, folder: Path, model_id: str, engine_key: str) -> None:
        """`engine_key` names the setting that step times belong to; see `fingerprint`."""
        self.path = folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', model_id)}.json"
        self._key = _LATENCY + engine_key
        self._others: dict[str, State] = {}  # latency models of other settings, kept as they are

    def restore(self, learner: Learner) -> bool:
        """Load what there is. True when the latency model of this setting was among it."""
        found = load(self.path)
        if found.warning is not None:
            logger.warning("%s", found.warning)
        latency = found.models.get(self._key)
        others = {k: v for k, v in found.models.items() if k.startswith(_LATENCY) and k != self._key}
        self._others = dict(list(others.items())[-(_MAX_FINGERPRINTS - 1) :])
        faults = learner.restore(found.models, latency)
        for fault in faults:
            logger.warning("%s: %s; starting without it", self.path, fault)
        return latency is not None and not any(fault.startswith("step_latency") for fault in faults)

    def snapshot(self, learner: Learner) -> Mapping[str, State]:
        """Everything to be saved, taken at one moment."""
        return self._others | learner.states() | {self._key: learner.steps.model.state()}

    def save(self, states: Mapping[str, State], meta: Mapping[str, Any]) -> None:
        """Write a snapshot. A disk that cannot be written costs the snapshot, with a warning."""
        try:
            save(self.path, states, meta)
        except (OSError, ValueError) as error:
            logger.warning("what was learned could not be saved to %s: %s", self.path, error)
