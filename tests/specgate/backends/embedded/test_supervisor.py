"""The supervisor against a scripted process: start, crash, hang, refusal, restart, stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.types import EngineRequest, FinishReason, SequenceOutput, StepRecord
from specgate.backends.embedded import wire
from specgate.backends.embedded.link import Lost, Mail, Mailbox
from specgate.backends.embedded.supervisor import Supervision, Supervisor
from specgate.clock import SystemClock
from specgate.errors import NotReady
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut

COMMAND = (sys.executable, "-m", "tests.specgate.backends.embedded.scripted_worker")
QUICK = Supervision(
    command=COMMAND,
    backoff_min_s=0.01,
    backoff_max_s=0.02,
    hang_timeout_s=60.0,
    stop_grace_s=5.0,
    tick_s=0.05,
)
READY = ["ready"]


class Stage:
    """One supervisor under test and the log its processes write."""

    def __init__(self, folder: Path, acts: list[list[str]], supervision: Supervision) -> None:
        self.log = folder / "log"
        start = wire.Start(EngineConfig(model=json.dumps({"log": str(self.log), "acts": acts})))
        self.supervisor = Supervisor(start, supervision, SystemClock())

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():  # noqa: ASYNC110  the condition has no event
                await asyncio.sleep(0.01)

    async def ready(self) -> None:
        assert await self.supervisor.wait_ready(30), self.supervisor.status()

    def submit(self, request_id: str, label: str = "") -> Mailbox:
        return self.supervisor.submit(EngineRequest(request_id, (1, 2), label=label))


@asynccontextmanager
async def stage(folder: Path, *acts: list[str], supervision: Supervision = QUICK) -> AsyncIterator[Stage]:
    scene = Stage(folder, list(acts), supervision)
    scene.supervisor.start()
    try:
        yield scene
    finally:
        await scene.supervisor.stop()
        assert scene.supervisor.pid is None


async def collect(mailbox: Mailbox) -> list[Mail]:
    """All mail up to the last word."""
    mail: list[Mail] = []
    async with asyncio.timeout(30):
        while not mail or (isinstance(mail[-1], SequenceOutput) and mail[-1].finish_reason is None):
            mail += await mailbox.get()
    return mail


async def test_loading_then_ready(tmp_path: Path) -> None:
    async with stage(tmp_path, ["slow"]) as scene:
        await scene.until(lambda: scene.supervisor.status().detail == "loading weights (42 %)")
        assert not scene.supervisor.status().is_ready
        assert scene.supervisor.load is None
        with pytest.raises(NotReady, match="loading weights"):
            scene.submit("a")
    async with stage(tmp_path, READY) as scene:
        await scene.ready()
        assert scene.supervisor.status().detail == "ready"
        assert scene.supervisor.status().num_restarts == 0
        assert scene.supervisor.load is not None
        assert scene.supervisor.ready is not None
        assert scene.supervisor.ready.max_model_len == 64


async def test_a_request_and_its_steps(tmp_path: Path) -> None:
    async with stage(tmp_path, READY) as scene:
        await scene.ready()
        records: list[StepRecord] = []
        scene.supervisor.on_step(records.append)
        mail = await collect(scene.submit("a"))
        assert [entry.token_ids for entry in mail if isinstance(entry, SequenceOutput)] == [(1,), (2,), (3,)]
        await scene.until(lambda: len(records) == 3)
        (refusal,) = await collect(scene.submit("b", "refuse"))
        assert refusal == wire.Refused("b", "too long", "prompt")


async def test_release_aborts_what_runs_and_only_that(tmp_path: Path) -> None:
    async with stage(tmp_path, READY) as scene:
        await scene.ready()
        await collect(scene.submit("done"))
        scene.submit("running", "wait")
        scene.supervisor.release("running")
        scene.supervisor.release("done")
        await collect(scene.submit("last"))
        assert [line for line in scene.lines() if line.startswith("Abort")] == ["Abort running"]


async def test_killed_in_mid_stream(tmp_path: Path) -> None:
    async with stage(tmp_path, READY) as scene:
        await scene.ready()
        mailbox = scene.submit("a", "first")
        assert await mailbox.get() == [SequenceOutput("a", (1,))]
        assert scene.supervisor.pid is not None
        os.kill(scene.supervisor.pid, signal.SIGKILL)
        assert await collect(mailbox) == [Lost("SIGKILL")]
        assert not scene.supervisor.status().is_ready
        assert scene.supervisor.status().detail == "engine restarting after SIGKILL"
        await scene.ready()
        assert scene.supervisor.status().num_restarts == 1
        assert len(await collect(scene.submit("b"))) >= 1


async def test_exit_code_and_garbage_are_named(tmp_path: Path) -> None:
    async with stage(tmp_path, ["die 3"], ["garbage"], READY) as scene:
        details = set()
        async with asyncio.timeout(30):
            while not scene.supervisor.status().is_ready:
                details.add(scene.supervisor.status().detail)
                await asyncio.sleep(0)
        assert "engine restarting after exit code 3" in details
        assert any("not a message from an engine process" in detail for detail in details)
        assert scene.supervisor.status().num_restarts == 2


async def test_a_permanent_failure_is_said_and_not_repeated(tmp_path: Path) -> None:
    async with stage(tmp_path, ["permanent The model is missing; install it."], READY) as scene:
        assert not await scene.supervisor.wait_ready(30)
        status = scene.supervisor.status()
        assert status.is_final
        assert status.detail == "The model is missing; install it."
        await asyncio.sleep(0.2)
        assert scene.lines() == ["Start"]


async def test_a_failure_that_may_pass_is_tried_again(tmp_path: Path) -> None:
    async with stage(tmp_path, ["fatal out of memory"], ["fatal out of memory"], READY) as scene:
        await scene.ready()
        assert scene.supervisor.status().num_restarts == 2
        assert scene.lines() == ["Start"] * 3


async def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    supervision = replace(QUICK, command=(str(tmp_path / "missing"),))
    async with stage(tmp_path, READY, supervision=supervision) as scene:
        await scene.until(lambda: scene.supervisor.status().num_restarts > 1)
        assert "failed start" in scene.supervisor.status().detail


@pytest.mark.parametrize(("word", "sign"), [("deaf", "no sign of life"), ("mute", "no step")])
async def test_a_hang_with_work_is_ended(tmp_path: Path, word: str, sign: str) -> None:
    supervision = replace(QUICK, hang_timeout_s=0.5)
    async with stage(tmp_path, ["ready", word], READY, supervision=supervision) as scene:
        await scene.ready()
        (lost,) = await collect(scene.submit("a", "wait"))
        assert isinstance(lost, Lost)
        assert sign in lost.why
        await scene.ready()
        assert scene.supervisor.status().num_restarts == 1


async def test_a_stopped_process_is_noticed_without_work(tmp_path: Path) -> None:
    supervision = replace(QUICK, hang_timeout_s=0.5)
    async with stage(tmp_path, READY, supervision=supervision) as scene:
        await scene.ready()
        assert scene.supervisor.pid is not None
        os.kill(scene.supervisor.pid, signal.SIGSTOP)
        await scene.until(lambda: scene.supervisor.status().num_restarts == 1)
        await scene.ready()


async def test_an_idle_engine_is_left_alone(tmp_path: Path) -> None:
    supervision = replace(QUICK, hang_timeout_s=0.5)
    async with stage(tmp_path, ["ready", "mute"], supervision=supervision) as scene:
        await scene.ready()
        await asyncio.sleep(1.5)
        assert scene.supervisor.status().num_restarts == 0


async def test_never_ready_is_given_up(tmp_path: Path) -> None:
    supervision = replace(QUICK, load_timeout_s=0.5)
    async with stage(tmp_path, ["slow"], READY, supervision=supervision) as scene:
        await scene.ready()
        assert scene.supervisor.status().num_restarts == 1


async def test_force_and_snapshot_are_told_again_after_a_crash(tmp_path: Path) -> None:
    async with stage(tmp_path, READY) as scene:
        await scene.ready()
        scene.supervisor.set_force("ngram")
        scene.supervisor.set_force("baseline")
        scene.supervisor.set_shut((Shut("draft", Reason.LATENCY_GUARD, "chat", lets_probes=True),))
        scene.supervisor.push_snapshot({"version": 3})
        await collect(scene.submit("a", "die"))
        await scene.until(lambda: scene.supervisor.status().num_restarts == 1)
        await scene.ready()
        await collect(scene.submit("b"))
        after = scene.lines()[scene.lines().index("Start", 1) :]
        start, force, shut, snapshot, submit = after
        assert (start, force) == ("Start", "SetForce(policy='baseline')")
        assert shut.startswith("SetShut(entries=(Shut(policy='draft', reason=<Reason.LATENCY_GUARD")
        assert (snapshot, submit) == ("Snapshot(state={'version': 3})", "Submit b")


@pytest.mark.parametrize("acts", [["ready"], ["ready", "stay"], ["slow"]])
async def test_stop_ends_the_process_and_its_requests(tmp_path: Path, acts: list[str]) -> None:
    supervision = replace(QUICK, stop_grace_s=0.5)
    async with stage(tmp_path, acts, supervision=supervision) as scene:
        await scene.until(lambda: bool(scene.lines()))
        pid = scene.supervisor.pid
        assert pid is not None
        mailbox = None
        if "ready" in acts:
            await scene.ready()
            mailbox = scene.submit("a", "wait")
        await scene.supervisor.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        if mailbox is not None:
            assert await collect(mailbox) == [Lost("the server is stopping")]
        assert scene.supervisor.status().is_final
        assert not scene.supervisor.status().is_ready
        assert "Shutdown" in scene.lines()


async def test_an_aborted_request_has_a_last_word(tmp_path: Path) -> None:
    async with stage(tmp_path, READY) as scene:
        await scene.ready()
        mailbox = scene.submit("a", "first")
        scene.supervisor.abort("a")
        last = (await collect(mailbox))[-1]
        assert isinstance(last, SequenceOutput)
        assert last.finish_reason is FinishReason.ABORT


async def test_a_process_nobody_can_speak_to_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started, and then the connection to it failed: it is ended, waited for, and replaced."""
    loop = asyncio.get_running_loop()
    connect = loop.create_unix_connection
    seen: list[set[int]] = []

    def children() -> set[int]:
        lists = Path("/proc/self/task").glob("*/children")
        return {int(pid) for pids in lists for pid in pids.read_text().split()}

    before = children()

    async def fail_once(*args: object, **kwargs: object) -> object:
        seen.append(children() - before)
        if len(seen) == 1:
            raise OSError("no more file descriptors")
        return await connect(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "create_unix_connection", fail_once)
    async with stage(tmp_path, READY, READY) as scene:
        await scene.ready()
        (first,) = seen[0]
        assert seen[1] == {scene.supervisor.pid} != {first}  # not even as a zombie
        assert scene.supervisor.status().num_restarts == 1
