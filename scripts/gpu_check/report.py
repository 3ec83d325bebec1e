"""Results as they come in, then one table and plain data."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Row:
    """One line: what was looked at, what came out, and whether that is well (None: a figure only)."""

    name: str
    value: str
    is_well: bool | None
    figures: dict[str, object]


@dataclass
class Section:
    """The lines of one section."""

    name: str
    deadline_s: float
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_late(self) -> bool:
        """True when the section should end where it stands."""
        return time.perf_counter() > self.deadline_s

    def check(self, name: str, is_well: bool, value: str = "", **figures: object) -> None:
        """A verdict."""
        self._add(Row(name, value, is_well, figures))

    def figure(self, name: str, value: str, **figures: object) -> None:
        """Something measured, without a verdict."""
        self._add(Row(name, value, None, figures))

    def fail(self, why: str) -> None:
        """The section could not go on."""
        self._add(Row("not finished", why[:300], False, {}))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"[{self.name}] {line(row)}", flush=True)


def line(row: Row) -> str:
    """A row as text."""
    verdict = {True: "ok", False: "FAULT", None: "-"}[row.is_well]
    return f"{verdict:6} {row.name:52} {row.value}"


class Report:
    """All sections."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._sections: dict[str, Section] = {}
        self._notes: dict[str, object] = {}

    @property
    def is_late(self) -> bool:
        """True when no further section should begin."""
        return time.perf_counter() > self._deadline_s

    def note(self, name: str, value: object) -> None:
        """About the run as a whole."""
        self._notes[name] = value
        print(f"{name}: {value}", flush=True)

    def section(self, name: str) -> Section:
        """The section of that name, begun when first asked for."""
        return self._sections.setdefault(name, Section(name, self._deadline_s))

    def left_out(self, name: str) -> None:
        """For want of time."""
        self.section(name).figure("left out", "no time was left; see --minutes and --only")

    def took(self, name: str, seconds: float) -> None:
        """How long a section ran."""
        self.section(name).seconds = seconds

    @property
    def faults(self) -> list[str]:
        """What is not well."""
        return [
            f"{s.name}: {row.name}" for s in self._sections.values() for row in s.rows if row.is_well is False
        ]

    def table(self) -> str:
        """Everything, in order."""
        lines = ["", "=" * 100]
        for section in self._sections.values():
            lines.append(f"{section.name} ({section.seconds:.0f} s)")
            lines += [f"  {line(row)}" for row in section.rows]
        faults = self.faults
        lines.append("=" * 100)
        lines.append(f"{len(faults)} faults: {'; '.join(faults)}" if faults else "no faults")
        return "\n".join(lines)

    def figures(self) -> dict[str, object]:
        """The same as plain data."""
        return {
            "notes": self._notes,
            "faults": self.faults,
            "sections": {
                section.name: {
                    "seconds": section.seconds,
                    "rows": [
                        {"name": row.name, "value": row.value, "is_well": row.is_well, **row.figures}
                        for row in section.rows
                    ],
                }
                for section in self._sections.values()
            },
        }
