"""The engine process: `python -m specgate.backends.embedded.worker --fd N`.

Three threads. The main one loads the engine and runs its steps; a reader turns frames from the
gateway into the engine's inbox and answers pings; a writer sends what the steps say, so that a
slow reader on the other side never holds up a step. The process lives no longer than its
gateway: it ends when the socket does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import queue
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from engine.engine import Engine
from engine.errors import EngineError, RequestRefused
from engine.factory import build_engine, keep_drafters
from engine.service import Abort, Add, Call, EngineService, Message, Shutdown
from engine.types import BASELINE, EngineRequest, PolicyAssignment, SamplingParams, StepRecord, StepResult
from specgate import collector
from specgate.backends.embedded import wire
from specgate.backends.embedded.sweep import sweep
from specgate.policy.plan_step import StepPlanner

logger = logging.getLogger(__name__)

_MAX_BACKLOG = 100_000  # messages unread by the gateway before it counts as dead
_PROCESS_NAME = b"specgate-engine"
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_PROGRESS_STEP = 0.01


@runtime_checkable
class TakesSnapshots(Protocol):
    """A planner that learns from the gateway's models."""

    def update(self, state: dict[str, Any]) -> None: ...


class Outbox:
    """Sends messages in order from a thread of its own; `put` never waits."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: queue.Queue[wire.FromWorker | None] = queue.Queue(_MAX_BACKLOG)
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: wire.FromWorker) -> None:
        """Queue a message. A gateway that stopped reading long ago ends the process."""
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            logger.error("the gateway has not read %d messages: giving up", _MAX_BACKLOG)
            os._exit(1)

    def close(self) -> None:
        """Send what is queued, then return."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(self._queue.get_nowait())
            is_open = None not in batch
            frames = b"".join(wire.encode(message) for message in batch if message is not None)
            try:
                self._sock.sendall(frames)
            except OSError:  # the gateway is gone; the reader sees it too and ends the process
                return


class Reader:
    """Takes frames from the gateway. Its thread ends the process when the gateway is gone."""

    def __init__(self, sock: socket.socket, outbox: Outbox, planner: StepPlanner) -> None:
        self._sock = sock
        self._outbox = outbox
        self._planner = planner
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.is_serving = threading.Event()
        self.on_drafters: Callable[[tuple[str, ...]], None] = lambda methods: None  # once there is an engine
        self._start: queue.SimpleQueue[wire.Start] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="reader", daemon=True).start()

    def wait_start(self) -> wire.Start:
        """The first message."""
        return self._start.get()

    def _run(self) -> None:
        frames = wire.FrameSplitter()
        try:
            while data := self._sock.recv(1 << 18):
                for body in frames.feed(data):
                    self._handle(wire.decode_to_worker(body))
        except (OSError, wire.WireError) as error:
            logger.error("the gateway's socket failed: %s", error)
        os._exit(1)

    def _handle(self, message: wire.ToWorker) -> None:
        match message:
            case wire.Submit(request):
                self.inbox.put(Add(request))
            case wire.Abort(request_id):
                self.inbox.put(Abort(request_id))
            case wire.SetForce(policy):
                self.inbox.put(Call(lambda: self._planner.set_force(policy)))
            case wire.SetShut(entries):
                self.inbox.put(Call(lambda: self._planner.set_shut(entries)))
            case wire.SetDrafters(methods):
                self.inbox.put(Call(lambda: self.on_drafters(methods)))
            case wire.Snapshot(state):
                self.inbox.put(Call(lambda: self._update_planner(state)))
            case wire.Ping():
                self._outbox.put(wire.Pong())
            case wire.Shutdown():
                if not self.is_serving.is_set():
                    os._exit(0)
                self.inbox.put(Shutdown())
            case wire.Start():
                self._start.put(message)

    def _update_planner(self, state: dict[str, Any]) -> None:
        if isinstance(self._planner, TakesSnapshots):
            self._planner.update(state)


class Progress:
    """Load progress to the gateway, at most one message per percent."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._last = ("", -1.0)

    def __call__(self, stage: str, fraction: float) -> None:
        last_stage, last_fraction = self._last
        if stage != last_stage or fraction - last_fraction >= _PROGRESS_STEP:
            self._last = (stage, fraction)
            self._outbox.put(wire.Loading(stage, fraction))


def main(argv: list[str] | None = None) -> int:
    """Serve one gateway over the inherited socket. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="specgate-engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the gateway")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="engine: %(levelname)s %(name)s: %(message)s")
    _settle_process()
    with socket.socket(fileno=args.fd) as sock:
        outbox = Outbox(sock)
        try:
            return _serve(sock, outbox)
        finally:
            outbox.close()


def _serve(sock: socket.socket, outbox: Outbox) -> int:
    planner = StepPlanner()
    reader = Reader(sock, outbox, planner)
    start = reader.wait_start()
    outbox.put(wire.Loading("starting the engine"))
    seeds = random.SystemRandom()

    def emit_record(record: StepRecord) -> None:
        outbox.put(wire.Step((), record, engine.load()))

    try:
        engine = build_engine(
            start.config, planner, time.perf_counter, lambda: seeds.getrandbits(63), Progress(outbox)
        )
        tokens = threading.Thread(target=_load_tokens, args=(engine,), name="grammar-tokens", daemon=True)
        tokens.start()
        kernels = warm_up(engine)
        tokens.join()  # steps are timed from here on
        if start.sweep_s > 0:
            sweep(engine, start.sweep_s, time.perf_counter, emit_record, Progress(outbox))
    except (EngineError, ValueError) as error:
        outbox.put(wire.Fatal(str(error), is_permanent=True))
        return 1
    except Exception as error:  # the process's boundary: whatever it is, the gateway is told
        logger.exception("the engine did not start")
        why = f"the engine did not start: {type(error).__name__}: {error}"
        outbox.put(wire.Fatal(why, is_permanent=False))
        return 1

    def emit(result: StepResult) -> None:
        outbox.put(wire.Step(result.outputs, result.record, result.load))

    def refuse(request_id: str, refusal: RequestRefused) -> None:
        outbox.put(wire.Refused(request_id, str(refusal), refusal.param))

    def set_drafters(methods: tuple[str, ...]) -> None:
        error = None
        try:
            keep_drafters(engine, methods)
        except (EngineError, MemoryError, RuntimeError) as fault:  # torch's out-of-memory is a RuntimeError
            error = str(fault)
        collector.settle()  # frees what was kept for good and is not any more
        outbox.put(wire.Drafters(dict(engine.methods), _memory_bytes(engine), error))

    reader.on_drafters = set_drafters
    service = EngineService(engine, reader.inbox, emit, refuse)
    reader.is_serving.set()
    collector.settle()
    outbox.put(_ready(engine, kernels))
    service.run()
    return 0


def _load_tokens(engine: Engine) -> None:
    """What grammars need to know of the model's tokens, so that the first request need not wait for it."""
    try:
        if engine.grammars is not None:
            engine.grammars.load()
    except RequestRefused as refusal:
        logger.info("requests with a format will be refused: %s", refusal)


def warm_up(engine: Engine) -> str:
    """Short requests under every policy, so that the first caller does not pay for first uses.

    Returns the names of the kernels that ran.
    """
    kernels = ""
    for method, depth in {BASELINE: 0, **engine.methods}.items():
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True)
            policy = PolicyAssignment(method, depth, is_exact=True)
            engine.add(EngineRequest(f"warm-up {method} {temperature}", (0,) * 8, sampling, policy))
    while engine.has_work:
        record = engine.step().record
        kernels = record.kernels if record is not None else kernels
    return kernels


def _ready(engine: Engine, kernels: str) -> wire.Ready:
    config = engine.config
    details = {
        "model": config.model,
        "device": config.device,
        "dtype": engine.precision,
        "kernels": kernels,
        "num_blocks": config.num_blocks,
        "block_size": config.block_size,
        "torch": str(torch.__version__),
        "num_threads": torch.get_num_threads(),
        "memory_bytes": _memory_bytes(engine),
    }
    if config.imposed is not None:
        details["imposed_acceptance"] = list(config.imposed.acceptance)
    return wire.Ready(engine.max_model_len, engine.vocab_size, dict(engine.methods), engine.load(), details)


def _memory_bytes(engine: Engine) -> dict[str, int]:
    """By part; on a GPU also what its allocator holds beside them."""
    parts = engine.memory_bytes()
    if torch.device(engine.config.device).type == "cuda":
        parts["other"] = max(0, torch.cuda.memory_reserved() - sum(parts.values()))
    return parts


def _settle_process() -> None:
    """Give the process a name, and leave ending it to the gateway.

    Ctrl-C and a service manager's SIGTERM reach the whole group; the gateway may still have
    streams to finish, and says when it has not.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.setswitchinterval(0.0005)  # s; the outbox's thread should not wait for the step loop's turn
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NAME, _PROCESS_NAME, 0, 0, 0)
        # The reader ends an orphan everywhere; this also ends one that is stopped or stuck in C code.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
