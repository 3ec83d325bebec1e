"""Thousands of requests, right and wrong, made from /openapi.json: no 500, no hang, no leak."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from yarl import URL

from tests.fuzz.strategies import Shot, shots
from tests.specgate.gateway import MODEL, Running, running

PER_EXAMPLE = 8
NUM_QUICK, NUM_MANY = 1_200, int(os.environ.get("SPECGATE_FUZZ_REQUESTS", "100000"))
PATIENCE_S = 60.0
QUIET = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),  # a volley that fails is told as it is: making it smaller takes long
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Range:
    """A gateway on a socket, in a thread of its own, and a client beside it."""

    server: Running
    loop: asyncio.AbstractEventLoop
    session: aiohttp.ClientSession
    document: dict[str, Any]
    seen: Counter[int] = field(default_factory=Counter)
    traces: list[str] = field(default_factory=list)  # exceptions that reached the log

    def fire(self, volley: list[Shot]) -> None:
        """All at once; each answer is checked."""
        asyncio.run_coroutine_threadsafe(self._fire(volley), self.loop).result(PATIENCE_S * 2)

    async def _fire(self, volley: list[Shot]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(self._one(shot) for shot in volley))

    async def _one(self, shot: Shot) -> None:
        url = URL(self.server.url + shot.path, encoded=True)
        headers = {name: value for name, value in shot.headers.items() if value}
        skip = ("Content-Type",) if "Content-Type" not in headers else ()
        async with self.session.request(
            shot.method, url, data=shot.body, headers=headers, skip_auto_headers=skip
        ) as answer:
            body = await answer.read()
        self.seen[answer.status] += 1
        documented = self.document["paths"][shot.template].get(shot.method.lower())
        if documented is None:
            assert answer.status in (404, 405), (shot, answer.status)
        else:
            assert str(answer.status) in documented["responses"], (shot, answer.status, body[:500])
        assert answer.status < 500, (shot, body[:500])
        assert "\r" not in answer.headers["X-Request-Id"]
        assert "X-Evil" not in answer.headers
        if answer.status >= 400:
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]

    def check_log(self) -> None:
        """Nothing that nobody foresaw."""
        assert not self.traces, self.traces[0]

    def at_rest(self) -> tuple[int, int]:
        """Tasks and resident bytes once nothing runs any more."""

        async def settle() -> int:
            await self.server.settled()
            await asyncio.sleep(0.1)
            return len(asyncio.all_tasks())

        num_tasks = asyncio.run_coroutine_threadsafe(settle(), self.loop).result(PATIENCE_S)
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return num_tasks, pages * 4096


@pytest.fixture(scope="module")
def shooting_range() -> Iterator[Range]:
    """Started once: what leaks is to add up."""
    started: list[Range] = []
    is_up, is_over = threading.Event(), threading.Event()

    async def live() -> None:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(running(max_model_len=256))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            async with session.get(server.url + "/openapi.json") as answer:
                document = await answer.json()
            started.append(Range(server, asyncio.get_running_loop(), session, document))
            is_up.set()
            await asyncio.to_thread(is_over.wait)

    class Traces(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and started:
                started[0].traces.append(logging.Formatter().format(record))

    handler = Traces(logging.ERROR)
    logging.getLogger().addHandler(handler)
    thread = threading.Thread(target=asyncio.run, args=(live(),), daemon=True)
    thread.start()
    assert is_up.wait(240)
    yield started[0]
    logging.getLogger().removeHandler(handler)
    is_over.set()
    thread.join(60)


def _fire_many(target: Range, num_shots: int) -> None:
    strategy = st.lists(shots(target.document, MODEL), min_size=PER_EXAMPLE, max_size=PER_EXAMPLE)

    @settings(QUIET, max_examples=-(-num_shots // PER_EXAMPLE))
    @given(strategy)
    def volleys(volley: list[Shot]) -> None:
        target.fire(volley)

    volleys()
    target.check_log()


def test_a_thousand_requests(shooting_range: Range) -> None:
    _fire_many(shooting_range, 80)  # first uses, caches, pools of connections
    tasks, _ = shooting_range.at_rest()
    _fire_many(shooting_range, NUM_QUICK)
    seen = shooting_range.seen
    assert sum(seen.values()) >= NUM_QUICK
    assert {200, 400, 404, 405} <= set(seen), seen  # right ones get through, and wrong ones of each kind
    assert shooting_range.at_rest()[0] <= tasks + PER_EXAMPLE  # idle connections of the client's pool
    assert httpx.get(shooting_range.server.url + "/readyz").status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(7200)  # twelve minutes where nothing else runs
def test_a_hundred_thousand_requests(shooting_range: Range) -> None:
    _fire_many(shooting_range, NUM_MANY // 10)
    tasks, early = shooting_range.at_rest()
    _fire_many(shooting_range, NUM_MANY - NUM_MANY // 10)
    after, late = shooting_range.at_rest()
    print(f"{sum(shooting_range.seen.values())} requests: {dict(shooting_range.seen)}")
    print(f"resident after a tenth {early / 2**20:.0f} MiB, at the end {late / 2**20:.0f} MiB")
    assert after <= tasks + PER_EXAMPLE
    assert late < early * 1.25 + 64 * 2**20  # the caches of the tool that makes them count too
