"""Servers that are stopped in turn, and what their clocks say of it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import pytest

from specgate.bench.lockstep import Lockstep, StopClock

TELL = "import sys, time\nfor line in sys.stdin: print(time.perf_counter(), time.monotonic(), flush=True)"


class Told:
    """A process by a clock that can be stopped; it tells the time when asked."""

    def __init__(self, clock: StopClock, process: asyncio.subprocess.Process) -> None:
        self.clock, self.process = clock, process

    async def ask(self) -> list[float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        return [float(word) for word in (await self.process.stdout.readline()).split()]


@pytest.fixture
async def two() -> AsyncIterator[list[Told]]:
    with StopClock() as one, StopClock() as other:
        told = [
            Told(
                clock,
                await asyncio.create_subprocess_exec(
                    sys.executable, "-c", TELL, env=clock.environment, start_new_session=True,
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                ),
            )
            for clock in (one, other)
        ]  # fmt: skip
        yield told
        for each in told:
            each.process.kill()
            await each.process.wait()


async def test_a_process_tells_the_time_of_its_clock_and_stops_are_left_out(two: list[Told]) -> None:
    lockstep = Lockstep(0.02)
    for name, told in zip("ab", two, strict=True):
        lockstep.add(name, told.process.pid, told.clock)
        await told.ask()  # it has started

    async def read(told: Told) -> None:
        for _ in range(20):
            before = told.clock.monotonic()
            read = await told.ask()
            assert before <= min(read) <= max(read) <= told.clock.monotonic()
            await asyncio.sleep(0.005)

    started_s = time.perf_counter()
    before = [told.clock.monotonic() for told in two]
    async with asyncio.TaskGroup() as group:
        await lockstep.take_turns(
            {name: group.create_task(read(t)) for name, t in zip("ab", two, strict=True)}
        )
    passed_s = time.perf_counter() - started_s
    own = [told.clock.monotonic() - at for told, at in zip(two, before, strict=True)]
    assert sum(own) <= passed_s * 1.5  # one at a time, but for the end
    for told in two:  # and all go on afterwards
        await told.ask()
