"""A burst of arrivals leaves turns of the event loop to others. Counted in turns, not in time."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from specgate.turnstile import Turnstile
from tests.specgate.gateway import running

NUM = 40


async def test_few_enter_per_turn_in_order_and_all_do() -> None:
    turnstile, entered, seen = Turnstile(3), [], [0]

    async def visitor(number: int) -> None:
        await turnstile.enter()
        entered.append(number)

    visitors = [asyncio.create_task(visitor(number)) for number in range(NUM)]
    while len(entered) < NUM:
        await asyncio.sleep(0)
        seen.append(len(entered))
    assert entered == list(range(NUM))
    assert max(after - before for before, after in pairwise(seen)) <= 3
    await asyncio.gather(*visitors)


async def test_a_visitor_that_leaves_gives_its_place_to_the_next() -> None:
    turnstile = Turnstile(1)
    visitors = [asyncio.create_task(turnstile.enter()) for _ in range(3)]
    await asyncio.sleep(0)
    visitors[0].cancel()
    visitors[1].cancel()
    async with asyncio.timeout(10):
        await visitors[2]
    await asyncio.gather(*visitors, return_exceptions=True)


async def test_requests_that_arrive_at_once_do_not_begin_at_once() -> None:
    async with running(hang_after_tokens=0) as server:
        asked = [asyncio.create_task(server.chat(stream=True)) for _ in range(NUM)]
        seen = [0]
        async with asyncio.timeout(60):
            while seen[-1] < NUM:
                await asyncio.sleep(0)
                seen.append(server.fake.num_started)
        assert max(after - before for before, after in pairwise(seen)) <= 4
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await server.settled()
