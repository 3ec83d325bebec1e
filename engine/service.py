"""The engine behind an inbox: one thread that steps while there is work and sleeps while not.

The process entry (`specgate.backends.embedded.worker`) feeds the inbox from a socket and sends
what comes out back over it. A request with a grammar that is not compiled yet waits for a thread
beside this one to do it; the steps of the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from engine.engine import Engine
from engine.errors import RequestRefused
from engine.types import EngineRequest, FinishReason, SequenceOutput, SequenceStats, StepResult

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Add:
    """Run this request."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop this request before the next step; unknown and finished ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Call:
    """Run `function` in the engine's thread between two steps, e.g. to hand the planner new state.

    If it raises, that is logged and nothing else happens.
    """

    function: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Compiled:
    """The grammar that this request waits for was compiled, or refused."""

    request: EngineRequest
    refusal: RequestRefused | None


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Abort what runs, say so, and return from `run`."""


Message = Add | Abort | Call | Compiled | Shutdown


class Inbox(Protocol):
    """Where messages come from; `queue.SimpleQueue[Message]` fits."""

    def get(self) -> Message:
        """The next message; waits for it."""
        ...

    def empty(self) -> bool:
        """True when `get` would wait. Only the service takes messages out."""
        ...

    def put(self, message: Message) -> None:
        """Add a message; from any thread."""
        ...


class EngineService:
    """Drives one engine. Everything but compiling grammars happens in the thread that calls `run`."""

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        emit: Callable[[StepResult], None],
        refuse: Callable[[str, RequestRefused], None],
    ) -> None:
        """`emit` gets every step's result; `refuse` the requests that can never run."""
        self._engine = engine
        self._inbox = inbox
        self._emit = emit
        self._refuse = refuse
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiling: dict[str, tuple[EngineRequest, Future[None]]] = {}

    def run(self) -> None:
        """Serve until `Shutdown`. A failing step ends the requests it worked on, not the engine."""
        engine = self._engine
        while True:
            while not engine.has_work or not self._inbox.empty():
                message = self._inbox.get()  # sleeps while there is nothing to do
                if isinstance(message, Shutdown):
                    return self._stop()
                self._handle(message)
            self._emit(self._step())

    def _stop(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        for request_id in tuple(self._compiling):
            self._abort(request_id)
        for request_id in self._engine.request_ids:
            self._engine.abort(request_id)
        if self._engine.has_work:
            self._emit(self._engine.step())

    def _step(self) -> StepResult:
        try:
            return self._engine.step()
        except Exception as error:  # the top loop: one bad step must not end the process
            log.exception("step failed; its requests end with an error")
            return self._engine.fail_step(f"{type(error).__name__}: {error}")

    def _handle(self, message: Add | Abort | Call | Compiled) -> None:
        match message:
            case Add(request):
                self._take(request)
            case Compiled(request, refusal):
                self._compiled(request, refusal)
            case Abort(request_id):
                self._abort(request_id)
            case Call(function):
                try:
                    function()
                except Exception:  # part of the top loop: a bad control message must not end the process
                    log.exception("a control message failed; the engine goes on without it")

    def _take(self, request: EngineRequest) -> None:
        name = request.request_id
        if name in self._compiling:
            self._refuse(name, RequestRefused(f"request id {name!r} is already waiting", "request_id"))
        elif self._must_wait(request):
            self._compile(request)
        else:
            self._add(request)

    def _compiled(self, request: EngineRequest, refusal: RequestRefused | None) -> None:
        waiting = self._compiling.get(request.request_id)
        if waiting is None or waiting[0] is not request:
            return  # it was aborted; another may wait under its id by now
        del self._compiling[request.request_id]
        if refusal is not None:
            self._refuse(request.request_id, refusal)
        else:
            self._add(request)

    def _add(self, request: EngineRequest) -> None:
        try:
            self._engine.add(request)
        except RequestRefused as refusal:
            self._refuse(request.request_id, refusal)

    def _abort(self, request_id: str) -> None:
        waiting = self._compiling.pop(request_id, None)
        if waiting is None:
            self._engine.abort(request_id)
            return
        request, compiling = waiting
        compiling.cancel()  # unless it runs already: nobody waits for it any more
        stats = SequenceStats(num_prompt_tokens=len(request.prompt_token_ids))
        last = SequenceOutput(request_id, finish_reason=FinishReason.ABORT, stats=stats)
        self._emit(StepResult((last,), None, self._engine.load()))

    def _must_wait(self, request: EngineRequest) -> bool:
        grammars = self._engine.grammars
        return request.grammar is not None and grammars is not None and not grammars.has(request.grammar)

    def _compile(self, request: EngineRequest) -> None:
        """In the other thread; `Compiled` comes back through the inbox."""
        grammars, spec = self._engine.grammars, request.grammar
        assert grammars is not None
        assert spec is not None

        def report(done: Future[None]) -> None:
            if done.cancelled():
                return
            error = done.exception()
            if error is not None and not isinstance(error, RequestRefused):
                log.error("a grammar could not be compiled", exc_info=error)
                error = RequestRefused(f"the grammar could not be compiled: {error}", spec.param)
            self._inbox.put(Compiled(request, error))

        compiling = self._compilers.submit(grammars.compile, spec)
        self._compiling[request.request_id] = request, compiling
        compiling.add_done_callback(report)
