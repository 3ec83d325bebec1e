"""A tiny model on disk, served by real engine processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.config import DraftModelConfig, EngineConfig
from engine.models.tiny_files import save_tiny_model
from specgate.backends.embedded.backend import EmbeddedBackend, EmbeddedConfig
from specgate.backends.embedded.supervisor import Supervision
from specgate.clock import SystemClock
from tests.specgate.backends.embedded.requests_for_tests import until


@pytest.fixture(scope="package")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model with tokenizer and chat template."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_model_len=9000)


@pytest.fixture(scope="package")
def engine_config(tiny_folder: Path) -> EngineConfig:
    """Three policies; few places, so that requests can be made to wait inside the engine."""
    return EngineConfig(
        model=str(tiny_folder),
        num_threads=1,
        num_blocks=2048,
        max_sequences=2,
        max_model_len=8192,
        draft_model=DraftModelConfig(layers_of_target=1),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(engine_config: EngineConfig) -> AsyncIterator[EmbeddedBackend]:
    """One backend per module; tests that kill its process leave it ready again."""
    supervision = Supervision(hang_timeout_s=6.0, backoff_min_s=0.05, tick_s=0.1)
    backend = EmbeddedBackend(EmbeddedConfig("tiny", engine_config, supervision), SystemClock())
    await backend.start()
    await until(lambda: backend.status().is_ready)
    yield backend
    await backend.stop()
