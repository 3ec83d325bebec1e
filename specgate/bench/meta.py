"""What a report says of its circumstances: model, drafter, sampling, data, machine, versions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ModelSourceError
from engine.models.source import resolve
from specgate import __version__
from specgate.bench.fleet import Fleet, ServerOptions
from specgate.bench.workload import SAMPLINGS
from specgate.config import load_config
from specgate.errors import ConfigError

PACKAGES = ("torch", "numpy", "aiohttp", "tokenizers", "safetensors", "gguf")
IMPOSED_NOTE = (
    "The draft arm's acceptance is imposed: the drafter has seen each prompt's answer once and drafts it "
    "with the given errors, while its model's forwards run at their true cost. Verification and texts are "
    "as ever; the speed of this arm says nothing of any real draft model's quality."
)


async def describe(
    fleet: Fleet, options: ServerOptions, data: Path | None, samplings: Sequence[str]
) -> dict[str, Any]:
    """Everything about a run that is known before it starts."""
    first = next(iter(fleet.clients.values()))
    state = (await fleet.state(fleet.arms[0])).get("models", {}).get(first.model_id, {})
    details = state.get("details", {})
    engine = None if options.url is not None else _engine_config(options)
    out = {
        "model": {
            "id": first.model_id,
            "source": details.get("model"),
            "weights_sha256": None if engine is None else weights_sha256(engine.model),
            "max_model_len": fleet.max_model_len,
        },
        "drafter": _drafters(engine, fleet),
        "precision": _precision(details),
        "engine": details,
        "sampling": {name: dict(SAMPLINGS[name]) for name in samplings},
        "data": {
            "file": None if data is None else data.name,
            "sha256": None if data is None else file_sha256(data),
            "kind": "the demo's prompts" if data is None else "a file of prompts",
        },
        "servers": {
            "url": options.url,
            "one_per_arm": not fleet.is_shared,
            "lockstep_s": options.lockstep_s,
            "settings": list(options.settings),
        },
        "imposed_acceptance": list(options.imposed) or None,
        "machine": machine(),
        "versions": versions(),
        "started": datetime.fromtimestamp(first.clock.wall(), UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["specgate", *sys.argv[1:]]),
    }
    notes = [IMPOSED_NOTE] if options.imposed else []
    return out | {"notes": notes}


def _precision(details: Mapping[str, Any]) -> str | None:
    """What `auto` came to, as the engine chooses it."""
    dtype = details.get("dtype")
    if dtype != "auto":
        return dtype
    return "float32 (auto)" if details.get("device") == "cpu" else "bfloat16 (auto)"


def _engine_config(options: ServerOptions) -> EngineConfig | None:
    """The engine settings of the servers started here; None for a scripted backend."""
    try:
        model = load_config(options.config, options.all_settings()).models[0]
    except ConfigError:
        return None  # the server said so already
    if model.backend != "embedded":
        return None
    return model.engine or EngineConfig()


def _drafters(engine: EngineConfig | None, fleet: Fleet) -> dict[str, Any]:
    if engine is None:
        return {name: {} for name in fleet.methods}
    known = {"ngram": engine.ngram, "draft": engine.draft_model}
    return {name: asdict(config) if (config := known.get(name)) else {} for name in fleet.methods}


def weights_sha256(source: str) -> str | None:
    """One hash over the weight files of a model; None where they are not here."""
    try:
        files = resolve(source).weights
    except ModelSourceError:
        return None
    if len(files) == 1:
        return file_sha256(files[0])
    return hashlib.sha256("".join(file_sha256(file) for file in files).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def machine() -> dict[str, Any]:
    """The computer this runs on, without names or addresses."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    except OSError:
        cpu = None
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu or platform.processor() or platform.machine(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Of specgate and what it runs on."""
    found = {"specgate": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
