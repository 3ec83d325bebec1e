"""Clients that cannot be served: those that dribble a request head, those that do not read, and those
that do not speak HTTP.

A body that dribbles is cut off in `specgate.api.http`, where it is read.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from specgate.api.http import error_response
from specgate.config import ServerConfig
from specgate.errors import BadRequest

logger = logging.getLogger(__name__)


# Compressed bodies are refused by `specgate.api.http`; nothing may unpack them before.
_SETTINGS = {"access_log": None, "auto_decompress": False}


class Connection(RequestHandler):
    """One client's connection, watched from its first byte to its last."""

    __slots__ = ("_head_timer", "_is_busy", "_limits", "_write_timer")

    def __init__(
        self, manager: web.Server, limits: ServerConfig, *, loop: asyncio.AbstractEventLoop, **kwargs: Any
    ) -> None:
        super().__init__(manager, loop=loop, keepalive_timeout=limits.keepalive_s, **kwargs)
        self._limits = limits
        self._is_busy = False  # with a request whose head is whole
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # What is left in the kernel's buffer when the answer is over must not stay there for ever.
            wait_ms = int(self._limits.write_timeout_s * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, wait_ms)
        self._head_timer = self._loop.call_later(self._limits.head_timeout_s, self._cut_off)

    def data_received(self, data: bytes) -> None:
        if data and not self._is_busy and self._head_timer is None:
            self._head_timer = self._loop.call_later(self._limits.head_timeout_s, self._cut_off)
        super().data_received(data)

    def begin_request(self) -> None:
        """A head has come whole."""
        self._is_busy = True
        self._head_timer = _without(self._head_timer)

    def end_request(self) -> None:
        """It was answered; bytes from now on are the next head's."""
        self._is_busy = False

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self._loop.call_later(self._limits.write_timeout_s, self._cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer = _without(self._write_timer)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_timer = _without(self._head_timer)
        self._write_timer = _without(self._write_timer)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What cannot be read as a request: told in our own shape, and logged without what it held."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        kind = type(exc).__name__
        logger.info("what a client sent could not be read as an HTTP request (%s)", kind)
        response = error_response(BadRequest(f"This cannot be read as an HTTP request ({kind}).", code=None))
        response.force_close()
        return response

    def _cut_off(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def _without(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancelled, and gone."""
    if timer is not None:
        timer.cancel()
    return None


class _Server(web.Server):
    """As the base, with watched connections. `limits` gives the settings as they are now."""

    def __init__(self, inner: web.Server, limits: Callable[[], ServerConfig], kwargs: dict[str, Any]) -> None:
        super().__init__(
            inner.request_handler,
            request_factory=inner.request_factory,
            handler_cancellation=inner.handler_cancellation,
        )
        self._limits = limits
        self._connection_kwargs = kwargs

    def __call__(self) -> RequestHandler:
        return Connection(self, self._limits(), loop=self._loop, **self._connection_kwargs)


class Runner(web.AppRunner):
    """Runs an application on watched connections; cancels a handler as soon as its client is gone."""

    __slots__ = ("_limits",)

    def __init__(self, app: web.Application, limits: Callable[[], ServerConfig], **kwargs: Any) -> None:
        super().__init__(app, handler_cancellation=True, access_log=None, **kwargs)
        self._limits = limits

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self._limits, _SETTINGS)


@web.middleware
async def watched(request: web.Request, handler: Any) -> web.StreamResponse:
    """Tells the connection when a request begins and ends. To stand before all other middlewares."""
    connection = request.protocol
    if not isinstance(connection, Connection):
        return await handler(request)  # type: ignore[no-any-return]
    connection.begin_request()
    try:
        return await handler(request)  # type: ignore[no-any-return]
    finally:
        connection.end_request()
