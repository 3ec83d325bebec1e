"""Model state on disk: one readable JSON file, saved atomically; a bad one is set aside, not fatal."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router_models.base import State

FORMAT = "specgate-models"
VERSION = 1


@dataclass(frozen=True, slots=True)
class LoadedSnapshot:
    """What was found. `models` is empty where there was no usable file; `warning` then says why.

    A file that never existed is no warning.
    """

    models: dict[str, State]
    meta: dict[str, Any]
    warning: str | None = None


def save(path: Path, models: Mapping[str, State], meta: Mapping[str, Any] | None = None) -> None:
    """Write all models' states to `path`: a reader sees the old file or the new one, never half.

    Raises OSError where the folder cannot be written, ValueError for values JSON has no word for.
    """
    body = {"format": FORMAT, "version": VERSION, "meta": dict(meta or {}), "models": dict(models)}
    text = json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def load(path: Path) -> LoadedSnapshot:
    """Read `path`. A corrupt or foreign file is renamed beside itself and reported as a warning."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return LoadedSnapshot({}, {})
    except (OSError, UnicodeDecodeError) as error:
        return LoadedSnapshot({}, {}, set_aside(path, str(error)))
    try:
        body = json.loads(text)
    except ValueError as error:
        return LoadedSnapshot({}, {}, set_aside(path, f"not JSON: {error}"))
    fault = _fault(body)
    if fault is not None:
        return LoadedSnapshot({}, {}, set_aside(path, fault))
    return LoadedSnapshot(body["models"], body["meta"])


def _fault(body: Any) -> str | None:
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        return "not a model snapshot"
    if body.get("version") != VERSION:
        return f"version {body.get('version')!r}, this program reads version {VERSION}"
    if not isinstance(body.get("models"), dict) or not isinstance(body.get("meta"), dict):
        return "incomplete"
    return None


def set_aside(path: Path, reason: str) -> str:
    """Rename a file that cannot be used to the first free `<name>.bad-N`; returns the warning to show."""
    number = 1
    while (target := path.with_name(f"{path.name}.bad-{number}")).exists():
        number += 1
    try:
        path.replace(target)
    except OSError as error:
        return f"cannot use {path} ({reason}) nor set it aside ({error}); starting without it"
    return f"cannot use {path} ({reason}); kept as {target.name}, starting without it"
