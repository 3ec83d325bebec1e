"""Where rollouts stand, on disk: one readable JSON file, written atomically."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT, VERSION = "specgate-rollouts", 1


class StoreError(Exception):
    """The file is there and cannot be used. The message says what to do."""


class RolloutStore:
    """Reads once, writes often."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> dict[str, dict[str, Any]]:
        """State by rollout; empty where there is no file. Raises StoreError: what was rolled back must
        not come back because a file went bad."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(
                f"{self.path} cannot be read ({error}): mend it, or delete it to begin anew"
            ) from error
        try:
            body = json.loads(text)
            if (body["format"], body["version"]) != (FORMAT, VERSION):
                raise ValueError("another format or version")
            return {str(name): dict(state) for name, state in body["rollouts"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"{self.path} is no state of rollouts ({error!r}): mend it, or delete it to begin anew"
            raise StoreError(why) from error

    def save(self, rollouts: Mapping[str, Mapping[str, Any]]) -> None:
        """A reader sees the old file or the new one, never half. Raises OSError."""
        body = {"format": FORMAT, "version": VERSION, "rollouts": rollouts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f"{self.path.name}.tmp-{os.getpid()}")
        try:
            with draft.open("w", encoding="utf-8") as file:
                json.dump(body, file, indent=1, allow_nan=False)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)


def digest(definition: str) -> str:
    """Tells whether a rollout is still the one whose state was kept."""
    return hashlib.sha256(definition.encode()).hexdigest()[:16]
