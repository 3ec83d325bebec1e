"""CPU and memory of this process and its children, from /proc; None where there is no /proc."""

from __future__ import annotations

import os
from pathlib import Path

from specgate.clock import Clock

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessReader:
    """Utilisation is measured between two readings."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: tuple[float, float] | None = None  # (when, CPU seconds)

    def memory_bytes(self) -> int | None:
        """Resident memory of all our processes."""
        sizes = [_read_resident(pid) for pid in _family()]
        known = [size for size in sizes if size is not None]
        return sum(known) if known else None

    def utilization(self) -> float | None:
        """CPU seconds used since the last call, over those there were; None at the first."""
        times = [_read_cpu_s(pid) for pid in _family()]
        used = sum(t for t in times if t is not None)
        now = self._clock.monotonic()
        last, self._last = self._last, (now, used)
        if last is None or now <= last[0]:
            return None
        return max(0.0, min(1.0, (used - last[1]) / (now - last[0]) / (os.cpu_count() or 1)))


def _family() -> list[int]:
    """This process and its direct children."""
    me = os.getpid()
    pids = [me]
    for task in Path(f"/proc/{me}/task").glob("*/children"):
        try:
            pids += [int(pid) for pid in task.read_text().split()]
        except OSError:  # the thread ended meanwhile
            continue
    return pids


def _read_resident(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None


def _read_cpu_s(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, IndexError, ValueError):
        return None
