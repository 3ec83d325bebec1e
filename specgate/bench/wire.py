"""An HTTP client as cheap as Python allows: it sends bytes made beforehand, waits for the end, and looks at
nothing but the status. For measurements on the machine that serves."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds from sending to the first byte and to the last."""

    first_s: float
    whole_s: float


class WireError(Exception):
    """The answer was no 200, or the connection broke."""


def request_bytes(port: int, body: dict[str, Any], path: str = "/v1/chat/completions") -> bytes:
    """A POST."""
    data = json.dumps(body, separators=(",", ":")).encode()
    return (
        b"POST %b HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (path.encode(), port, len(data), data)
    )


def get_bytes(port: int, path: str) -> bytes:
    """A GET."""
    return b"GET %b HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % (path.encode(), port)


class Connection(asyncio.Protocol):
    """One connection, kept alive; one request at a time."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._done: asyncio.Future[float] | None = None
        self._first_s: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        if self._first_s is None:
            self._first_s = time.perf_counter()
        self._data += data
        if self._done is not None and not self._done.done() and _is_whole(self._data):
            self._done.set_result(time.perf_counter())

    def connection_lost(self, _error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(WireError("the connection broke"))

    async def ask(self, request: bytes) -> Timed:
        """Send and wait for the whole answer. Raises WireError."""
        took, answer = await self.exchange(request)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise WireError(answer[:400].decode("utf-8", "replace"))
        return took

    async def exchange(self, request: bytes) -> tuple[Timed, bytes]:
        """The same for an answer of any status: how long it took, and all its bytes. Raises WireError
        when the connection breaks."""
        self._done = self._begin()
        began = time.perf_counter()
        self._transport.write(request)
        ended = await self._done
        return Timed((self._first_s or ended) - began, ended - began), bytes(self._data)

    def _begin(self) -> asyncio.Future[float]:
        self._data.clear()
        self._first_s = None
        return asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Close it."""
        self._transport.close()


async def connect(port: int) -> Connection:
    """To a server on this machine."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return connection


def _is_whole(data: bytearray) -> bool:
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = bytes(data[:end]).lower()
    _, found, rest = head.partition(b"content-length:")
    if found:
        return len(data) >= end + 4 + int(rest.split(b"\r\n", 1)[0])
    return len(data) > end + 4 and data.endswith(b"\r\n0\r\n\r\n")
