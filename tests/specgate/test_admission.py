"""Admission under any order of arrivals, departures and cancellations."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgate.admission import Admission, Entrant
from specgate.clock import FakeClock
from specgate.config import AdmissionConfig, KeyLimits
from specgate.errors import QueueTooSlow, TooManyRequests


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


async def serve_some(admission: Admission, clock: FakeClock, seconds: float) -> None:
    """Answers that took so long each: a pace to predict from."""
    for _ in range(4):
        async with admission.slot(1):
            clock.advance(seconds)


async def test_retry_after_follows_the_pace() -> None:
    clock = FakeClock()
    admission = Admission(AdmissionConfig(max_concurrent=1, max_queue=0), clock)
    await serve_some(admission, clock, 3.0)
    async with admission.slot(1):
        with pytest.raises(TooManyRequests) as refused:
            await admission.slot(1).__aenter__()
    assert refused.value.retry_after_s == 3


async def test_who_cannot_be_served_in_time_is_told_at_once() -> None:
    clock = FakeClock()
    limits = AdmissionConfig(max_concurrent=2, max_queue=10, max_wait_ratio=None)
    admission = Admission(limits, clock)
    await serve_some(admission, clock, 4.0)
    async with admission.slot(1):
        clock.advance(1.5)
        async with admission.slot(1):
            clock.advance(0.5)
            with pytest.raises(QueueTooSlow) as refused:  # 2 s to the next free slot
                await admission.slot(1, Entrant(patience_s=1.9)).__aenter__()
            assert refused.value.retry_after_s == 2
            assert isinstance(admission.refusal(Entrant(patience_s=1.9)), QueueTooSlow)
            assert admission.refusal(Entrant(patience_s=2.1)) is None
            waiting = asyncio.create_task(admission.slot(1, Entrant(patience_s=2.1)).__aenter__())
            await asyncio.sleep(0)
            assert admission.num_queued == 1
            with pytest.raises(QueueTooSlow):  # the one after it: 3.5 s
                await admission.slot(1, Entrant(patience_s=3.4)).__aenter__()
    await waiting


async def test_waiting_adds_no_more_than_its_share_to_what_answers_take() -> None:
    """Requests that began together end together: the queue is as good as empty, and the wait long."""
    clock = FakeClock()
    admission = Admission(AdmissionConfig(max_concurrent=4, max_queue=100, max_wait_ratio=0.5), clock)
    await serve_some(admission, clock, 2.0)
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(admission.slot(1))
        clock.advance(1.1)  # 0.9 s to go
        waiting = []
        while admission.refusal(Entrant()) is None:
            waiting.append(asyncio.create_task(admission.slot(1).__aenter__()))
            await asyncio.sleep(0)
        assert len(waiting) == 4  # the fifth would wait for a whole answer more
    await asyncio.gather(*waiting)


async def test_no_queue_stands_while_others_are_turned_away() -> None:
    """It would add to what answers take, and the slots are as busy without it."""
    clock = FakeClock()
    admission = Admission(AdmissionConfig(max_concurrent=1, max_queue=100, max_wait_ratio=0.5), clock)
    await serve_some(admission, clock, 2.0)
    async with admission.slot(1):
        clock.advance(0.9)
        assert isinstance(admission.refusal(Entrant()), QueueTooSlow)  # 1.1 s; nobody was told so yet
        clock.advance(0.6)
        assert admission.refusal(Entrant()) is None  # 0.5 s: a burst may wait for it
        clock.advance(0.5)
    async with admission.slot(1):
        clock.advance(0.9)
        with pytest.raises(QueueTooSlow):
            await admission.slot(1).__aenter__()
        clock.advance(0.6)
        assert isinstance(admission.refusal(Entrant()), QueueTooSlow)  # 0.5 s is now too long
        clock.advance(0.3)  # 0.2 s: by then the slot is free
        assert admission.refusal(Entrant()) is None
    clock.advance(2.1)  # nobody was turned away for as long as an answer takes
    async with admission.slot(1):
        clock.advance(1.2)
        with pytest.raises(QueueTooSlow):  # its own haste
            await admission.slot(1, Entrant(patience_s=0.1)).__aenter__()
        assert admission.refusal(Entrant()) is None  # 0.8 s


async def test_a_refusal_foretold_is_the_one_met() -> None:
    """Looking changes nothing, and says what entering would."""
    limits = {"b": KeyLimits(max_queue=1)}
    admission = Admission(
        AdmissionConfig(max_concurrent=1, max_queue=3), FakeClock(), lambda key: limits.get(key, KeyLimits())
    )
    tasks = []

    async def hold(key: str) -> None:
        async with admission.slot(1, Entrant(key)):
            await asyncio.Event().wait()

    for key in ("a", "b", "b", "b", "a", "a", "a"):
        foretold = admission.refusal(Entrant(key))
        task = asyncio.create_task(hold(key))
        await asyncio.sleep(0)
        if task.done():
            assert foretold is not None
            assert str(foretold) == str(task.exception())
        else:
            assert foretold is None
            tasks.append(task)
    assert (admission.num_running, admission.num_queued) == (1, 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_quarter_of_the_queue_is_kept_for_keys_that_have_nothing_in_it() -> None:
    config = AdmissionConfig(max_concurrent=1, max_queue=8)
    admission = Admission(config, FakeClock(), has_many_keys=lambda: True)
    async with admission.slot(1):
        tasks = [asyncio.create_task(admission.slot(1, Entrant("a")).__aenter__()) for _ in range(6)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequests):
            await admission.slot(1, Entrant("a")).__aenter__()
        tasks += [asyncio.create_task(admission.slot(1, Entrant(key)).__aenter__()) for key in "bc"]
        await asyncio.sleep(0)
        assert admission.num_queued == 8
        with pytest.raises(TooManyRequests):
            await admission.slot(1, Entrant("d")).__aenter__()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (admission.num_queued, admission.num_running, admission._num_used) == (0, 0, 0)


async def test_fewer_slots_while_requests_run_take_effect_as_they_end() -> None:
    admission = Admission(AdmissionConfig(max_concurrent=3, max_queue=5), FakeClock())
    leave = [asyncio.Event() for _ in range(4)]

    async def client(number: int) -> None:
        async with admission.slot(1):
            await leave[number].wait()

    tasks = [asyncio.create_task(client(number)) for number in range(4)]
    await asyncio.sleep(0)
    admission.reconfigure(AdmissionConfig(max_concurrent=1, max_queue=5))
    for number, running in enumerate([2, 1, 1]):
        leave[number].set()
        await asyncio.gather(tasks[number])
        await asyncio.sleep(0)
        assert admission.num_running == running
    leave[3].set()
    await asyncio.gather(*tasks)
    assert (admission.num_queued, admission.num_running, admission._num_used) == (0, 0, 0)


@settings(max_examples=200, deadline=None)
@given(
    moves=st.lists(st.tuples(st.sampled_from(["arrive", "leave", "cancel"]), st.integers(0, 7)), max_size=60),
    max_concurrent=st.integers(1, 4),
    own_limit=st.integers(1, 3),
)
def test_slots_are_never_lost_nor_doubled(
    moves: list[tuple[str, int]], max_concurrent: int, own_limit: int
) -> None:
    async def play() -> None:
        admission = Admission(
            AdmissionConfig(max_concurrent=max_concurrent, max_queue=3),
            FakeClock(),
            lambda key: KeyLimits(max_concurrent=own_limit if key == "b" else None),
        )
        inside: dict[asyncio.Task[None], tuple[int, asyncio.Event]] = {}
        tasks: list[tuple[asyncio.Task[None], asyncio.Event]] = []

        async def client(weight: int, who: Entrant, leave: asyncio.Event) -> None:
            async with admission.slot(weight, who):
                me = asyncio.current_task()
                assert me is not None
                inside[me] = (min(weight, max_concurrent), leave)
                try:
                    await leave.wait()
                finally:
                    del inside[me]

        for move, number in moves:
            if move == "arrive":
                leave, who = asyncio.Event(), Entrant("ab"[number % 2], number // 4)
                tasks.append((asyncio.create_task(client(1 + number % 3, who, leave)), leave))
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


async def test_those_let_in_together_begin_a_few_at_a_time() -> None:
    """Each beginning takes a while, and health probes wait for all that is done in one turn of the loop."""
    admission = Admission(AdmissionConfig(max_concurrent=8, max_queue=20), FakeClock())
    begun = 0

    async def client() -> None:
        nonlocal begun
        async with admission.slot(1):
            begun += 1

    async with admission.slot(8):
        clients = [asyncio.create_task(client()) for _ in range(8)]
        await asyncio.sleep(0)
    a_turn = []
    while begun < 8:
        before = begun
        await asyncio.sleep(0)
        a_turn.append(begun - before)
    assert max(a_turn) <= 2
    await asyncio.gather(*clients)
    assert (admission.num_running, admission._num_used) == (0, 0)
