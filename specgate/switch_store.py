"""The kill switch on disk, where an operator asked that it outlives a restart."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from engine.types import BASELINE

logger = logging.getLogger(__name__)


def load_force(path: Path) -> str | None:
    """The policy that stays forced. A file that cannot be read forces baseline: the safe side."""
    try:
        force = json.loads(path.read_text(encoding="utf-8"))["force"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.error("the kill switch in %s cannot be read (%r): baseline is forced", path, error)
        return BASELINE
    return BASELINE if force is not None else None


def save_force(path: Path, force: str | None) -> None:
    """Keep it, or with None forget it. Raises OSError."""
    if force is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        json.dump({"force": force}, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
