"""The decision log as it lies on disk: the file, its rotated predecessors, packed or not, damaged or not."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine.types import DeviceUse

_ROTATED = re.compile(r"\.(\d+)(\.gz)?")


class Load(msgspec.Struct):
    """What a report needs of the load at the decision."""

    num_running: int = 0


class Counts(msgspec.Struct):
    """Of all answers together."""

    num_target_steps: int = 0
    num_target_steps_saved: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class Costs(msgspec.Struct):
    """As they were when the line was written."""

    network_s: float | None = None
    amount: float | None = None
    currency: str = ""


class Line(msgspec.Struct):
    """A line of the log. What a report does not need is skipped; what is missing is as in older logs."""

    time: float
    model: str
    kind: str | None = None  # lines that are no decisions say what they are
    policy: str = ""
    task: str = ""
    tenant: str = ""
    outcome: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    load: Load = msgspec.field(default_factory=Load)
    counts: Counts | None = None
    device: list[DeviceUse] = []
    costs: Costs | None = None

    @property
    def is_sound(self) -> bool:
        """Whether it is a decision, or another kind of line that is known."""
        return self.kind is not None or bool(self.policy and self.outcome)


@dataclass(slots=True)
class Reading:
    """What was found. `faults` are sentences about files that could not be read to their end."""

    files: list[str] = field(default_factory=list)
    num_lines: int = 0
    num_damaged: int = 0
    faults: list[str] = field(default_factory=list)


def log_files(path: Path) -> list[Path]:
    """The file and its rotated predecessors (`.1` is the last one, `.gz` may follow), oldest first."""
    found = []
    for other in path.parent.glob(f"{path.name}*"):
        match = _ROTATED.fullmatch(other.name[len(path.name) :])
        if other == path or other.name == f"{path.name}.gz":
            found.append((0, other))
        elif match:
            found.append((int(match[1]), other))
    return [other for _, other in sorted(found, key=lambda pair: (-pair[0], pair[1].name))]


def read_lines(path: Path, since: float, until: float, reading: Reading) -> Iterator[Line]:
    """Lines of these Unix times (`until` excluded). Damaged ones are counted in `reading`, and left out."""
    decoder = msgspec.json.Decoder(Line)
    for file in log_files(path):
        reading.files.append(str(file))
        for raw in _raw_lines(file, reading):
            reading.num_lines += 1
            try:
                line = decoder.decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                reading.num_damaged += 1
                continue
            if not line.is_sound:
                reading.num_damaged += 1
            elif since <= line.time < until:
                yield line


def _raw_lines(file: Path, reading: Reading) -> Iterator[bytes]:
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
            for raw in stream:
                if raw.strip():
                    yield raw
    except (OSError, EOFError, zlib.error) as error:
        reading.faults.append(f"{file} could not be read to its end: {error}")
