"""Admission under any order of arrivals, departures and cancellations."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgate.admission import Admission
from specgate.clock import FakeClock
from specgate.config import AdmissionConfig
from specgate.errors import TooManyRequests


async def test_first_come_first_served_and_bounded() -> None:
    admission = Admission(AdmissionConfig(max_concurrent=2, max_queue=1), FakeClock())
    order: list[str] = []
    go = asyncio.Event()

    async def client(name: str, weight: int) -> None:
        async with admission.slot(weight):
            order.append(name)
            await go.wait()

    first = asyncio.create_task(client("first", 1))
    await asyncio.sleep(0)
    wide = asyncio.create_task(client("wide", 5))  # more answers than slots: takes all of them
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests):  # a slot is free, but nobody overtakes
        await client("late", 1)
    assert (order, admission.num_queued, admission.num_running) == (["first"], 1, 1)
    go.set()
    await asyncio.gather(first, wide)
    assert order == ["first", "wide"]
    assert (admission.num_queued, admission.num_running, admission._num_used) == (0, 0, 0)


async def test_retry_after_follows_the_pace() -> None:
    clock = FakeClock()
    admission = Admission(AdmissionConfig(max_concurrent=1, max_queue=0), clock)
    for _ in range(4):
        async with admission.slot(1):
            clock.advance(3.0)
    async with admission.slot(1):
        with pytest.raises(TooManyRequests) as refused:
            await admission.slot(1).__aenter__()
    assert refused.value.retry_after_s == 3


@settings(max_examples=200, deadline=None)
@given(
    moves=st.lists(st.tuples(st.sampled_from(["arrive", "leave", "cancel"]), st.integers(0, 7)), max_size=60),
    max_concurrent=st.integers(1, 4),
)
def test_slots_are_never_lost_nor_doubled(moves: list[tuple[str, int]], max_concurrent: int) -> None:
    async def play() -> None:
        admission = Admission(AdmissionConfig(max_concurrent=max_concurrent, max_queue=3), FakeClock())
        inside: dict[asyncio.Task[None], tuple[int, asyncio.Event]] = {}
        tasks: list[tuple[asyncio.Task[None], asyncio.Event]] = []

        async def client(weight: int, leave: asyncio.Event) -> None:
            async with admission.slot(weight):
                me = asyncio.current_task()
                assert me is not None
                inside[me] = (min(weight, max_concurrent), leave)
                try:
                    await leave.wait()
                finally:
                    del inside[me]

        for move, number in moves:
            if move == "arrive":
                leave = asyncio.Event()
                tasks.append((asyncio.create_task(client(1 + number % 3, leave)), leave))
            elif tasks:
                task, leave = tasks[number % len(tasks)]
                # Leaving and cancelling in the same turn of the loop is where slots get lost.
                leave.set()
                if move == "cancel":
                    task.cancel()
            if number % 2:
                await asyncio.sleep(0)
            used = sum(weight for weight, _ in inside.values())
            assert used <= max_concurrent
            assert admission.num_queued <= 3
        for _, leave in tasks:
            leave.set()
        results = await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        assert all(r is None or isinstance(r, TooManyRequests | asyncio.CancelledError) for r in results)
        assert (admission.num_queued, admission.num_running, admission._num_used) == (0, 0, 0)

    asyncio.run(play())
