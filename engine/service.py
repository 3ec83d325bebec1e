"""The engine behind an inbox: one thread that steps while there is work and sleeps while not.

The process entry (`specgate.backends.embedded.worker`) feeds the inbox from a socket and sends
what comes out back over it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.engine import Engine
from engine.errors import RequestRefused
from engine.types import EngineRequest, StepResult

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
class Shutdown:
    """Abort what runs, say so, and return from `run`."""


Message = Add | Abort | Call | Shutdown


class Inbox(Protocol):
    """Where messages come from; `queue.SimpleQueue[Message]` fits."""

    def get(self) -> Message:
        """The next message; waits for it."""
        ...

    def empty(self) -> bool:
        """True when `get` would wait. Only the service takes messages out."""
        ...


class EngineService:
    """Drives one engine. Everything happens in the thread that calls `run`."""

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

    def _handle(self, message: Add | Abort | Call) -> None:
        match message:
            case Add(request):
                try:
                    self._engine.add(request)
                except RequestRefused as refusal:
                    self._refuse(request.request_id, refusal)
            case Abort(request_id):
                self._engine.abort(request_id)
            case Call(function):
                try:
                    function()
                except Exception:  # part of the top loop: a bad control message must not end the process
                    log.exception("a control message failed; the engine goes on without it")
