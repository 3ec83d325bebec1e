"""Open and closed loops: who waits for whom."""

from __future__ import annotations

import asyncio

import pytest

from specgate.bench.load import closed_loop, open_loop
from specgate.bench.record import Job, RawAnswer
from specgate.clock import FakeClock, SystemClock


def jobs(*arrivals: float) -> list[Job]:
    return [Job(f"j{i}", "p", "chat", "completions", {}, at_s) for i, at_s in enumerate(arrivals)]


class JumpingClock(SystemClock):
    """The machine's clock, put forward."""

    jumped_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.jumped_s


async def test_an_open_loop_never_waits_for_answers() -> None:
    """No request is answered before the last one was sent: a loop that waited would never end."""
    clock = SystemClock()
    num_sent, all_sent = 0, asyncio.Event()

    async def ask(job: Job, due_s: float) -> RawAnswer:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 20:
            all_sent.set()
        await all_sent.wait()
        return RawAnswer(job, due_s)

    async with asyncio.timeout(20):
        answers = await open_loop(jobs(*[0.001 * i for i in range(20)]), ask, clock)
    assert [answer.job.id for answer in answers] == [f"j{i}" for i in range(20)]


async def test_a_client_that_falls_behind_does_not_move_the_schedule() -> None:
    """Coordinated omission: time lost while sending counts against the requests that were due."""
    clock = JumpingClock()

    async def ask(job: Job, due_s: float) -> RawAnswer:
        answer = RawAnswer(job, due_s, sent_s=clock.monotonic())
        if job.id == "j0":
            clock.jumped_s = 1.0  # the whole client stands still
        return answer

    answers = await open_loop(jobs(0.0, 0.01, 0.02, 0.029), ask, clock)
    due = [answer.due_s for answer in answers]
    assert [at_s - due[0] for at_s in due] == pytest.approx([0.0, 0.01, 0.02, 0.029])
    assert all(answer.sent_s - due[0] >= 1.0 for answer in answers[1:])


async def test_arrivals_are_sent_in_order_of_time() -> None:
    sent = []

    async def ask(job: Job, due_s: float) -> RawAnswer:
        sent.append(job.id)
        return RawAnswer(job, due_s)

    await open_loop(jobs(0.004, 0.0, 0.002), ask, SystemClock())
    assert sent == ["j1", "j2", "j0"]


async def test_a_closed_loop_keeps_so_many_open_and_no_more() -> None:
    num_open = most = 0

    async def ask(job: Job, due_s: float) -> RawAnswer:
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(0)
        num_open -= 1
        return RawAnswer(job, due_s)

    answers = await closed_loop(iter(jobs(*[0.0] * 50)), ask, FakeClock(), concurrency=7)
    assert (len(answers), most) == (50, 7)


async def test_a_closed_loop_ends_with_its_time_and_waits_for_what_is_open() -> None:
    clock = FakeClock()

    async def ask(job: Job, due_s: float) -> RawAnswer:
        clock.advance(1.0)
        await asyncio.sleep(0)
        return RawAnswer(job, due_s, ended_s=clock.monotonic())

    answers = await closed_loop(iter(jobs(*[0.0] * 50)), ask, clock, concurrency=2, duration_s=5.0)
    assert len(answers) == 5
    assert all(answer.ended_s for answer in answers)
