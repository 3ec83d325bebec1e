"""Answers of models that other servers run: their bytes, with `specgate` added where the contract has it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from specgate.api.sse import DONE
from specgate.api.usage import decision_headers, specgate_object
from specgate.backends.openai_http.events import payload
from specgate.backends.openai_http.outgoing import with_member
from specgate.generation import Generation


async def relay_whole(generation: Generation) -> web.Response:
    """The server's JSON as it came, with `specgate`."""
    body = b""
    async with generation.deadline(), aclosing(generation.deltas()) as deltas:
        async for _, delta in deltas:
            body = delta.raw or body
    whole = with_member(body, "specgate", specgate_object(generation))
    return web.Response(
        body=whole, content_type="application/json", headers=decision_headers(generation.decision)
    )


async def relay_events(generation: Generation) -> AsyncGenerator[bytes, None]:
    """The server's events as they come; the one with usage, if it was asked for, gets `specgate`."""
    tail = b""
    async with aclosing(generation.deltas()) as deltas:
        async for _, delta in deltas:
            if delta.raw is None:
                continue
            if delta.stats is None:
                yield delta.raw
            else:
                tail = delta.raw
    data = payload(tail) if tail else None
    if data is not None:
        tail = b"data: " + with_member(data, "specgate", specgate_object(generation)) + b"\n\n"
    yield tail + DONE
