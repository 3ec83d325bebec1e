"""Faults and leavers, with real processes: nothing leaks, nothing hangs, and it comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from engine.types import PolicyAssignment, SequenceStats
from specgate.backends.embedded.backend import EmbeddedBackend
from specgate.errors import EngineLost
from specgate.types import Delta
from tests.specgate.backends.embedded.requests_for_tests import (
    POLICIES,
    answer,
    completion,
    is_idle,
    stream,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = 6000  # tokens: far from done when a test acts
PROMPT = "over and over and over"


async def read_all(
    backend: EmbeddedBackend, into: list[Delta], prompt: str = PROMPT, max_tokens: int = LONG
) -> None:
    async for delta in stream(backend, completion(prompt), max_tokens=max_tokens):
        into.append(delta)  # noqa: PERF401  one by one, so that a watcher sees them come


async def signal_engine(backend: EmbeddedBackend, number: signal.Signals) -> int:
    """Returns the number of restarts before."""
    assert backend.engine_pid is not None
    before = backend.status().num_restarts
    os.kill(backend.engine_pid, number)
    return before


@pytest.mark.parametrize("policy", POLICIES[:3], ids=lambda policy: policy.method)
async def test_closing_a_stream_frees_everything(backend: EmbeddedBackend, policy: PolicyAssignment) -> None:
    deltas = stream(backend, completion(PROMPT), policy, LONG)
    await anext(deltas)
    assert not is_idle(backend)
    await deltas.aclose()  # type: ignore[attr-defined]
    await until(lambda: is_idle(backend))


async def test_closing_tells_the_engine_at_once(backend: EmbeddedBackend) -> None:
    """The abort is on its way when `aclose` returns, not when the garbage collector comes by."""
    deltas = stream(backend, completion(PROMPT), max_tokens=LONG)
    await anext(deltas)
    await deltas.aclose()  # type: ignore[attr-defined]
    assert backend.num_open == 0
    await until(lambda: is_idle(backend))


@pytest.mark.parametrize("is_shown", [False, True])
async def test_the_counts_of_an_answer_that_is_left_are_told(
    backend: EmbeddedBackend, is_shown: bool
) -> None:
    """They are the engine's own, and known when `aclose` returns."""
    told: list[SequenceStats] = []
    request = completion(PROMPT if is_shown else "x y " * 450)  # the latter takes several steps to prefill
    prepared = await backend.prepare(request)
    deltas = backend.generate(
        request, prepared, POLICIES[2], index=0, max_tokens=LONG, label="", on_cut=told.append
    )
    num_shown = 0
    reading = asyncio.create_task(anext(deltas))
    if is_shown:
        num_shown = (await reading).num_tokens
        async for delta in deltas:
            num_shown += delta.num_tokens
            if num_shown > 20:
                break
        await deltas.aclose()  # type: ignore[attr-defined]
    else:
        await until(lambda: backend.load().num_running == 1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    (stats,) = told
    assert stats.num_output_tokens >= num_shown
    assert stats.num_output_tokens == stats.num_target_steps + stats.num_accepted_tokens
    if is_shown:
        assert stats.num_drafts > 0
    assert stats.num_prompt_tokens == len(prepared.token_ids)
    await until(lambda: is_idle(backend))
    whole = backend.generate(
        request, prepared, POLICIES[2], index=0, max_tokens=4, label="", on_cut=told.append
    )
    assert [delta async for delta in whole][-1].stats is not None
    assert told == [stats]  # an answer that came to its end is not cut


async def test_counts_are_told_when_the_leaver_is_cancelled_while_they_are_awaited(
    backend: EmbeddedBackend,
) -> None:
    """A write to a client that went fails first and closes the stream; the connection's end cancels the
    handler a moment later, while the engine still owes its last word."""
    told: list[SequenceStats] = []
    request = completion(PROMPT)
    prepared = await backend.prepare(request)
    deltas = backend.generate(
        request, prepared, POLICIES[2], index=0, max_tokens=LONG, label="", on_cut=told.append
    )
    await anext(deltas)
    closing = asyncio.create_task(deltas.aclose())  # type: ignore[attr-defined]
    await asyncio.sleep(0)  # it waits now: the word needs a step of another process
    assert not told
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert len(told) == 1
    assert backend.num_open == 0
    await until(lambda: is_idle(backend))


async def test_cancelling_a_reader_frees_everything(backend: EmbeddedBackend) -> None:
    seen: list[Delta] = []
    reading = asyncio.create_task(read_all(backend, seen))
    await until(lambda: bool(seen))
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: is_idle(backend))


async def test_leaving_before_the_first_token_frees_everything(backend: EmbeddedBackend) -> None:
    """Two places in the engine are taken; the third and fourth leave while they wait for one."""
    seen: list[list[Delta]] = [[], [], [], []]
    tasks = [asyncio.create_task(read_all(backend, mine)) for mine in seen]
    await until(lambda: (backend.load().num_running, backend.load().num_waiting) == (2, 2))
    for task in tasks[2:]:
        task.cancel()
    await until(lambda: backend.load().num_waiting == 0)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert seen[2:] == [[], []]
    await until(lambda: is_idle(backend))


async def test_leaving_during_a_long_prefill_frees_everything(backend: EmbeddedBackend) -> None:
    seen: list[Delta] = []
    task = asyncio.create_task(read_all(backend, seen, prompt="x y " * 450, max_tokens=40))
    await until(lambda: backend.load().num_running == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: is_idle(backend))


async def test_many_leavers_at_random_moments(backend: EmbeddedBackend) -> None:
    async def leave_after(num_deltas: int, policy: PolicyAssignment) -> None:
        deltas = stream(backend, completion(PROMPT), policy, 60)
        async for _ in deltas:
            num_deltas -= 1
            if num_deltas <= 0:
                break
        await deltas.aclose()  # type: ignore[attr-defined]

    await asyncio.gather(*(leave_after(i * 7 % 23, POLICIES[i % len(POLICIES)]) for i in range(40)))
    await until(lambda: is_idle(backend))


async def test_sigkill_in_mid_stream(backend: EmbeddedBackend) -> None:
    """Who had text gets an error; who waited for the first token is served by the next process."""
    expected = await answer(backend, completion("waiting"), max_tokens=8)
    seen: list[list[Delta]] = [[], []]
    running = [asyncio.create_task(read_all(backend, mine)) for mine in seen]
    await until(lambda: all(seen))
    waiting = [asyncio.create_task(answer(backend, completion("waiting"), max_tokens=8)) for _ in range(3)]
    await until(lambda: backend.load().num_waiting == 3)
    before = await signal_engine(backend, signal.SIGKILL)
    await until(lambda: not backend.status().is_ready)
    for task in running:
        with pytest.raises(EngineLost, match="SIGKILL"):
            await task
    assert backend.status().detail == "engine restarting after SIGKILL" or "load" in backend.status().detail
    for task in waiting:
        assert (await task).token_ids == expected.token_ids
    assert backend.status().is_ready
    assert backend.status().num_restarts == before + 1
    await until(lambda: is_idle(backend))


async def test_a_drafter_that_was_unloaded_stays_so_after_a_crash(backend: EmbeddedBackend) -> None:
    await backend.set_loaded("draft", False)
    before = await signal_engine(backend, signal.SIGKILL)
    await until(lambda: backend.status().num_restarts == before + 1 and backend.status().is_ready)
    await until(lambda: dict(backend.card.methods) == {"ngram": 4})
    late = await answer(backend, completion("x y x y"), PolicyAssignment("draft", 3), max_tokens=8)
    assert late.last.stats is not None
    assert late.last.stats.num_drafts == 0
    await backend.set_loaded("draft", True)
    assert dict(backend.card.methods) == {"ngram": 4, "draft": 5}


async def test_a_hung_engine_is_replaced(backend: EmbeddedBackend) -> None:
    seen: list[Delta] = []
    running = asyncio.create_task(read_all(backend, seen))
    await until(lambda: bool(seen))
    before = await signal_engine(backend, signal.SIGSTOP)
    with pytest.raises(EngineLost, match="hang"):
        await running
    await until(lambda: backend.status().is_ready)
    assert backend.status().num_restarts == before + 1
    assert (await answer(backend, completion("again"), max_tokens=4)).last.finish_reason == "length"


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_the_engine_ends_with_its_gateway(tiny_folder: Path, is_stopped: bool) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", GATEWAY, str(tiny_folder), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    os.kill(pid, signal.SIGSTOP if is_stopped else 0)
    process.kill()
    await process.wait()
    await until(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


GATEWAY = """
import asyncio, sys
from engine.config import EngineConfig
from specgate.backends.embedded.backend import EmbeddedBackend, EmbeddedConfig
from specgate.clock import SystemClock

async def main():
    config = EmbeddedConfig("tiny", EngineConfig(model=sys.argv[1], num_blocks=64))
    backend = EmbeddedBackend(config, SystemClock())
    await backend.start()
    while not backend.status().is_ready:
        await asyncio.sleep(0.01)
    print(backend.engine_pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
