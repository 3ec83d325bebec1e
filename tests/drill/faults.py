"""Faults that are switched on and off in running processes, by files in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "SPECGATE_DRILL"


@dataclass(frozen=True)
class Faults:
    """Seen by the test and by the server's processes alike."""

    folder: Path

    def set(self, name: str, value: str = "") -> None:
        """Switch it on."""
        draft = self.folder / f".{name}"
        draft.write_text(value)
        draft.replace(self.folder / name)

    def clear(self, name: str) -> None:
        """Switch it off."""
        (self.folder / name).unlink(missing_ok=True)

    def get(self, name: str) -> str | None:
        """Its value; None while it is off."""
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            return None

    def take(self, name: str) -> bool:
        """True once for each time it was switched on."""
        try:
            (self.folder / name).unlink()
        except FileNotFoundError:
            return False
        return True
