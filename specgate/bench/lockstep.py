"""Arms in lockstep: all run the same slice at once, a fraction of a second each in turn.

A shared machine is faster in one minute than in the next, and an open loop near saturation makes
much of it: arms that take turns of several seconds differ by a tenth though they do the same. So
while one arm's servers run, those of the others are stopped (SIGSTOP) and so are their clocks: the
client's here, the servers' by `stoppable/sitecustomize.py`. Each arm then sees one unbroken stretch
of time, and whatever the machine does for longer than a turn it does to all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import struct
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

_SECONDS = struct.Struct("d")
_STOPPABLE = Path(__file__).with_name("stoppable")


class StopClock:
    """Implements `specgate.clock.Clock`: stands still while its processes are stopped. Shares the time
    they have been stopped with them through a file."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="specgate-stopped-")  # noqa: SIM115  closed below
        self._file.write(_SECONDS.pack(0.0))
        self._file.flush()
        self._shared = mmap.mmap(self._file.fileno(), _SECONDS.size)
        self._stopped_s = 0.0
        self._since_s: float | None = None

    def __enter__(self) -> StopClock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shared.close()
        self._file.close()

    @property
    def environment(self) -> dict[str, str]:
        """For processes that are to live by this clock."""
        paths = [str(_STOPPABLE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SPECGATE_STOPPED": self._file.name}

    def monotonic(self) -> float:
        """Seconds, stops left out."""
        return (time.perf_counter() if self._since_s is None else self._since_s) - self._stopped_s

    def wall(self) -> float:
        """The machine's own."""
        return time.time()

    def stop(self) -> None:
        """Stand still. To be called right after the processes were told to stop."""
        if self._since_s is None:
            self._since_s = time.perf_counter()

    def go_on(self) -> None:
        """To be called before the processes go on."""
        if self._since_s is not None:
            self._stopped_s += time.perf_counter() - self._since_s
            self._since_s = None
            _SECONDS.pack_into(self._shared, 0, self._stopped_s)


class Lockstep:
    """The process group and clock of each arm. Outside `take_turns` all of them run."""

    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s
        self._arms: dict[str, tuple[int, StopClock]] = {}

    def add(self, arm: str, group: int, clock: StopClock) -> None:
        """A server that leads its own process group."""
        self._arms[arm] = group, clock

    async def take_turns(self, running: Mapping[str, asyncio.Task[object]]) -> None:
        """Let the arms run in turn until all these tasks, each of one arm's requests, are done."""
        try:
            for arm in running:
                self._stop(arm)
            while waiting := [arm for arm, task in running.items() if not task.done()]:
                for arm in waiting:
                    self._go_on(arm)
                    await asyncio.wait([running[arm]], timeout=self._turn_s)
                    self._stop(arm)
        finally:
            for arm in running:
                self._go_on(arm)

    def _stop(self, arm: str) -> None:
        group, clock = self._arms[arm]
        _signal(group, signal.SIGSTOP)
        clock.stop()

    def _go_on(self, arm: str) -> None:
        group, clock = self._arms[arm]
        clock.go_on()
        _signal(group, signal.SIGCONT)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # its requests will say that it has died
        os.killpg(group, number)
