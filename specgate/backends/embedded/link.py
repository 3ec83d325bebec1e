"""The gateway's end of the socket to an engine process, and the mailboxes of the requests on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from engine.types import SequenceOutput, SequenceStats
from specgate.backends.embedded import wire


@dataclass(frozen=True, slots=True)
class Lost:
    """The engine process went away while it ran this request."""

    why: str


Mail = SequenceOutput | wire.Refused | Lost


class Mailbox:
    """What the engine process says about one request, for one reader."""

    def __init__(self) -> None:
        self._mail: list[Mail] = []
        self._arrived = asyncio.Event()
        self.last_stats: SequenceStats | None = None  # of the engine's last word, once it is here

    def put(self, mail: Mail) -> None:
        """Add mail and wake the reader."""
        self._mail.append(mail)
        if isinstance(mail, SequenceOutput) and mail.stats is not None:
            self.last_stats = mail.stats
        self._arrived.set()

    async def get(self) -> list[Mail]:
        """Everything that came since the last call, at least one piece."""
        await self._arrived.wait()
        self._arrived.clear()
        mail, self._mail = self._mail, []
        return mail


class Link(asyncio.Protocol):
    """The socket to one engine process."""

    def __init__(self, on_message: Callable[[wire.FromWorker], None]) -> None:
        self._on_message = on_message
        self._frames = wire.FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self.closed = asyncio.Event()
        self.fault: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A stream's transport by the protocol's contract, though uvloop's is not of asyncio's class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._on_message(wire.decode_from_worker(body))
        except wire.WireError as error:
            self.fault = str(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def send(self, message: wire.ToWorker) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.encode(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
