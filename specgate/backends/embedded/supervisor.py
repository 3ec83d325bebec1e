"""Keeps one engine process alive and carries messages to and from it.

The process is watched by three signs: its exit, the end of its socket, and silence. It hangs when
it answers no ping for `hang_timeout_s`, or runs no step that long while it has requests; then it
is killed. After a crash it is started again with growing pauses; a failure that would repeat
itself (model not found, drafter of another vocabulary) is reported and left alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.types import EngineLoad, EngineRequest, StepRecord
from specgate.backends.base import BackendStatus
from specgate.backends.embedded import wire
from specgate.backends.embedded.link import Link, Lost, Mail, Mailbox
from specgate.clock import Clock
from specgate.errors import EngineLost, InternalError, NotReady
from specgate.policy.shut import Shut

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "specgate.backends.embedded.worker")
_EXIT_GRACE_S = 2.0  # from the end of the socket to the end of the process


@dataclass(frozen=True, slots=True)
class Supervision:
    """How the engine process is started and when it is given up."""

    command: tuple[str, ...] = WORKER_COMMAND  # `--fd N` is added
    load_timeout_s: float = 600.0
    hang_timeout_s: float = 60.0  # must exceed the longest step
    backoff_min_s: float = 0.2  # pause before the first restart; doubles with each failure
    backoff_max_s: float = 30.0
    backoff_reset_s: float = 60.0  # serving this long makes the next failure a first one
    stop_grace_s: float = 5.0
    tick_s: float = 0.5  # between pings, and between looks at the signs of life


@dataclass(slots=True)
class _Life:
    """What is known of the engine process that runs now."""

    ready: wire.Ready | None = None
    fatal: wire.Fatal | None = None
    hang: str | None = None
    ready_at_s: float | None = None
    loading_s: float = 0.0
    silent_s: float = 0.0  # since the last message of any kind
    stuck_s: float = 0.0  # since the last step, while there are requests


@dataclass(slots=True)
class _Desired:
    """State that a restarted process must be told again."""

    force: str | None = None
    shut: tuple[Shut, ...] = ()
    drafters: tuple[str, ...] | None = None  # None: all that are configured
    snapshot: dict[str, Any] | None = None


class Supervisor:
    """One engine process at a time, from `start` to `stop`."""

    def __init__(self, start: wire.Start, config: Supervision, clock: Clock) -> None:
        self._start = start
        self._config = config
        self._clock = clock
        self._mailboxes: dict[str, Mailbox] = {}
        self._life = _Life()
        self._link: Link | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # readiness or finality changed
        self._desired = _Desired()
        self._step_listeners: list[Callable[[StepRecord], None]] = []
        self._load: EngineLoad | None = None
        self._awaiting_drafters: deque[asyncio.Future[wire.Drafters]] = deque()
        self._detail = "not started"
        self._is_final = False  # no process will be started any more
        self._num_restarts = 0

    @property
    def ready(self) -> wire.Ready | None:
        """What the running process serves; None while there is none that does."""
        return self._life.ready

    @property
    def load(self) -> EngineLoad | None:
        """As of the last step; None while no process serves."""
        return self._load if self._life.ready is not None else None

    @property
    def pid(self) -> int | None:
        """The engine process, if one runs."""
        return self._process.pid if self._process is not None else None

    @property
    def num_open(self) -> int:
        """Requests handed over that have not had their last word."""
        return len(self._mailboxes)

    def status(self) -> BackendStatus:
        """Ready or not, in words."""
        is_ready = self._life.ready is not None
        detail = "ready" if is_ready else self._detail
        return BackendStatus(is_ready, detail, self._num_restarts, is_final=self._is_final)

    def start(self) -> None:
        """Begin; returns at once."""
        if self._task is None:
            self._detail = "starting the engine process"
            self._task = asyncio.get_running_loop().create_task(self._run(), name="engine-supervisor")

    async def stop(self) -> None:
        """Ask the process to leave, make it leave after the grace time; running requests are lost."""
        self._end("the server is stopping")
        if self._link is not None:
            self._link.send(wire.Shutdown())
        task, self._task = self._task, None
        if task is None:
            return
        if self._process is not None:
            await asyncio.wait({task}, timeout=self._config.stop_grace_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def wait_ready(self, timeout_s: float) -> bool:
        """True once a process serves; False if the time is up or none will ever come."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._life.ready is None and not self._is_final:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return self._life.ready is not None

    def submit(self, request: EngineRequest) -> Mailbox:
        """Hand a request over. Its mail ends with a finish reason, Refused or Lost. Raises NotReady."""
        if self._life.ready is None or self._link is None:
            raise NotReady(f"the model is not ready: {self._detail}")
        if not self._mailboxes:
            self._life.stuck_s = 0.0
        mailbox = self._mailboxes[request.request_id] = Mailbox()
        self._link.send(wire.Submit(request))
        return mailbox

    def is_open(self, request_id: str) -> bool:
        """True while the request's last word is to come."""
        return request_id in self._mailboxes

    def abort(self, request_id: str) -> None:
        """Have the engine drop the request; its last word still comes to the mailbox."""
        if request_id in self._mailboxes and self._link is not None:
            self._link.send(wire.Abort(request_id))

    def release(self, request_id: str) -> None:
        """The reader is gone: abort what runs, forget the mailbox."""
        self.abort(request_id)
        self._mailboxes.pop(request_id, None)

    def set_force(self, policy: str | None) -> None:
        """Kill switch; kept over restarts."""
        self._desired.force = policy
        self._send_if_ready(wire.SetForce(policy))

    def set_shut(self, entries: tuple[Shut, ...]) -> None:
        """Policies that may not draft; kept over restarts."""
        self._desired.shut = entries
        self._send_if_ready(wire.SetShut(entries))

    async def set_drafters(self, methods: tuple[str, ...]) -> None:
        """Have these loaded; kept over restarts. Raises NotReady, EngineLost or InternalError; whatever
        was not loaded then is not tried again at a restart."""
        if self._life.ready is None or self._link is None:
            raise NotReady(f"the model is not ready: {self._detail}")
        answer: asyncio.Future[wire.Drafters] = asyncio.get_running_loop().create_future()
        self._awaiting_drafters.append(answer)
        self._link.send(wire.SetDrafters(methods))
        said = await answer
        if said.error is not None:
            raise InternalError(f"The drafters cannot be loaded: {said.error}")

    def push_snapshot(self, state: dict[str, Any]) -> None:
        """Model state for the planner; the newest is kept over restarts."""
        self._desired.snapshot = state
        self._send_if_ready(wire.Snapshot(state))

    def on_step(self, listener: Callable[[StepRecord], None]) -> None:
        """Call `listener` with every step's record."""
        self._step_listeners.append(listener)

    def _send_if_ready(self, message: wire.ToWorker) -> None:
        if self._life.ready is not None and self._link is not None:
            self._link.send(message)

    # -- the life of processes ---------------------------------------------------------------

    async def _run(self) -> None:
        pause_s = self._config.backoff_min_s
        while True:
            why = await self._live()
            if self._is_final:
                return
            life = self._life
            if life.fatal is not None and life.fatal.is_permanent:
                logger.error("the engine cannot start: %s", why)
                self._end(why)
                return
            self._lose(why)
            if life.ready_at_s is not None:
                served_s = self._clock.monotonic() - life.ready_at_s
                if served_s >= self._config.backoff_reset_s:
                    pause_s = self._config.backoff_min_s
            self._num_restarts += 1
            self._detail = f"engine restarting after {why}"
            logger.error("the engine process is gone (%s); restarting in %.1f s", why, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, self._config.backoff_max_s)

    async def _live(self) -> str:
        """Run one process to its end and say why it ended."""
        self._life = life = _Life()
        ours, theirs = socket.socketpair()
        process: asyncio.subprocess.Process | None = None
        try:
            with theirs:
                process = await self._spawn(theirs)
            link = Link(self._on_message)
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
        except BaseException as error:
            ours.close()
            if process is not None:  # it runs, and nobody will ever speak to it
                await _end_process(process, 0.0)
            if isinstance(error, OSError):
                return f"a failed start ({error})"
            raise
        self._process, self._link = process, link
        try:
            link.send(self._start)
            await self._watch(life, link)
        finally:
            life.ready = None  # from here on nothing is submitted
            if not self._is_final:
                self._detail = "the engine process has ended"
            left_by_itself = link.closed.is_set() and life.hang is None
            link.close()
            await _end_process(process, _EXIT_GRACE_S if left_by_itself else 0.0)
            self._process = self._link = None
        if life.fatal is not None:
            return life.fatal.message
        return life.hang or link.fault or _cause(process.returncode)

    async def _spawn(self, theirs: socket.socket) -> asyncio.subprocess.Process:
        fd = theirs.fileno()
        return await asyncio.create_subprocess_exec(
            *self._config.command,
            "--fd",
            str(fd),
            pass_fds=(fd,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            # Threads that spin at every barrier make a step ten times slower as soon as the cores
            # are shared with anybody, the gateway included; sleeping costs 2 to 4 % on idle cores.
            env={"OMP_WAIT_POLICY": "passive", **os.environ},
        )

    async def _watch(self, life: _Life, link: Link) -> None:
        """Return when the socket is closed or the process hangs."""
        before_s = self._clock.monotonic()
        while not link.closed.is_set():
            try:
                await asyncio.wait_for(link.closed.wait(), self._config.tick_s)
            except TimeoutError:
                pass  # the usual case: nothing happened during this tick
            now_s = self._clock.monotonic()
            # A gateway that was itself stopped for a while must not blame the engine for it.
            passed_s = min(now_s - before_s, 2 * self._config.tick_s)
            before_s = now_s
            life.hang = self._find_hang(life, passed_s)
            if life.hang is not None:
                return
            if life.ready is not None:
                link.send(wire.Ping())

    def _find_hang(self, life: _Life, passed_s: float) -> str | None:
        if life.ready is None:
            life.loading_s += passed_s
            limit_s = self._config.load_timeout_s
            return f"not being ready within {limit_s:g} s" if life.loading_s > limit_s else None
        life.silent_s += passed_s
        life.stuck_s = life.stuck_s + passed_s if self._mailboxes else 0.0
        limit_s = self._config.hang_timeout_s
        if max(life.silent_s, life.stuck_s) <= limit_s:
            return None
        # A process that stops between two steps was last heard a little after its last step.
        signs = [f"no sign of life for {life.silent_s:.1f} s"] if life.silent_s > limit_s / 2 else []
        signs += [f"no step for {life.stuck_s:.1f} s"] if life.stuck_s > limit_s else []
        return f"a hang ({', '.join(signs)}; {limit_s:g} s allowed)"

    def _lose(self, why: str) -> None:
        """Nobody serves any more: tell every reader."""
        self._life.ready = None
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in mailboxes.values():
            mailbox.put(Lost(why))
        while self._awaiting_drafters:
            if not (answer := self._awaiting_drafters.popleft()).done():
                answer.set_exception(EngineLost(f"the engine went away before its drafters changed ({why})"))

    def _end(self, detail: str) -> None:
        self._is_final = True
        self._detail = detail
        self._lose(detail)
        self._changed.set()

    # -- messages ----------------------------------------------------------------------------

    def _on_message(self, message: wire.FromWorker) -> None:
        self._life.silent_s = 0.0
        match message:
            case wire.Step():
                self._on_step(message)
            case wire.Refused():
                self._deliver(message.request_id, message, is_last=True)
            case wire.Drafters():
                self._on_drafters(message)
            case wire.Loading():
                share = "" if message.fraction is None else f" ({message.fraction * 100:.0f} %)"
                self._detail = f"{message.stage}{share}"
            case wire.Ready():
                self._on_ready(message)
            case wire.Fatal():
                self._life.fatal = message

    def _on_ready(self, message: wire.Ready) -> None:
        if self._is_final:
            return
        self._life.ready = message
        self._start = msgspec.structs.replace(self._start, sweep_s=0.0)  # once is enough
        self._life.ready_at_s = self._clock.monotonic()
        self._load = message.load
        if self._desired.force is not None:
            self._send_if_ready(wire.SetForce(self._desired.force))
        if self._desired.shut:
            self._send_if_ready(wire.SetShut(self._desired.shut))
        if self._desired.drafters is not None:
            self._send_if_ready(wire.SetDrafters(self._desired.drafters))
            nobody: asyncio.Future[wire.Drafters] = asyncio.get_running_loop().create_future()
            nobody.cancel()
            self._awaiting_drafters.append(nobody)
        if self._desired.snapshot is not None:
            self._send_if_ready(wire.Snapshot(self._desired.snapshot))
        self._changed.set()

    def _on_drafters(self, message: wire.Drafters) -> None:
        if (ready := self._life.ready) is not None:
            details = {**ready.details, "memory_bytes": message.memory_bytes}
            self._life.ready = msgspec.structs.replace(ready, methods=message.methods, details=details)
        self._desired.drafters = tuple(message.methods)
        if self._awaiting_drafters and not (answer := self._awaiting_drafters.popleft()).done():
            answer.set_result(message)

    def _on_step(self, step: wire.Step) -> None:
        self._life.stuck_s = 0.0
        self._load = step.load
        for output in step.outputs:
            self._deliver(output.request_id, output, is_last=output.finish_reason is not None)
        if step.record is not None:
            loop = asyncio.get_running_loop()
            for listener in self._step_listeners:  # by the loop, so that their faults are not the link's
                loop.call_soon(listener, step.record)

    def _deliver(self, request_id: str, mail: Mail, *, is_last: bool) -> None:
        mailbox = self._mailboxes.pop(request_id, None) if is_last else self._mailboxes.get(request_id)
        if mailbox is not None:
            mailbox.put(mail)


def _cause(returncode: int | None) -> str:
    if returncode is None:
        return "an unknown cause"
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


async def _end_process(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """Wait for the exit, at most `grace_s`, then kill."""
    try:
        await asyncio.wait_for(process.wait(), grace_s)
    except TimeoutError:
        try:
            process.kill()
        except ProcessLookupError:
            pass  # it left by itself just now
        await process.wait()
