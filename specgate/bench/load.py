"""Open and closed loops. In an open loop no arrival ever waits for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from specgate.bench.record import Job, RawAnswer
from specgate.clock import Clock

Ask = Callable[[Job, float], Awaitable[RawAnswer]]
_LEAD_S = 0.02  # so that an arrival at 0 is not late already


async def open_loop(jobs: Sequence[Job], ask: Ask, clock: Clock) -> list[RawAnswer]:
    """Send each job at its arrival, whatever became of those before; wait for all. In job order."""
    start_s = clock.monotonic() + _LEAD_S
    running = []
    async with asyncio.TaskGroup() as group:
        for job in sorted(jobs, key=lambda job: job.arrival_s):
            due_s = start_s + job.arrival_s
            while (delay_s := due_s - clock.monotonic()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(max(delay_s, 0.001))  # again where the clock was stopped
            running.append(group.create_task(_to_end(ask, job, due_s)))
    return [task.result() for task in running]


async def closed_loop(
    jobs: Iterator[Job], ask: Ask, clock: Clock, *, concurrency: int, duration_s: float | None = None
) -> list[RawAnswer]:
    """Keep `concurrency` requests open until the time is up or `jobs` end; then wait for the rest."""
    ends_s = None if duration_s is None else clock.monotonic() + duration_s
    answers: list[RawAnswer] = []

    async def worker() -> None:
        while ends_s is None or clock.monotonic() < ends_s:
            job = next(jobs, None)
            if job is None:
                return
            answers.append(await ask(job, clock.monotonic()))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return answers


async def _to_end(ask: Ask, job: Job, due_s: float) -> RawAnswer:
    return await ask(job, due_s)
