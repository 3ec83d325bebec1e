"""Small real servers that behave badly in one way each, and a gateway in front of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from aiohttp import web

from specgate.app import build_app, make_runner
from specgate.backends.openai_http.backend import OpenAIHttpBackend
from specgate.config import AuthConfig, Config, ModelConfig, RequestsConfig
from specgate.config.upstream import (
    BreakerConfig,
    HealthConfig,
    OpenAIHttpConfig,
    PoolConfig,
    RetryConfig,
    UpstreamTimeouts,
)
from specgate.gateway import GATEWAY, Gateway

MODEL = "big"
MESSAGES = [{"role": "user", "content": "hi"}]
QUICK = UpstreamTimeouts(connect_s=1.0, first_byte_s=0.4, gap_s=0.4, whole_s=0.4)
WHOLE = {
    "id": "x-1",
    "object": "chat.completion",
    "created": 1,
    "model": "served-name",
    "system_fingerprint": "fp_7",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "finish_reason": "stop",
            "odd": 1.50,
        }
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
}


def chunk(content: str | None = None, finish: str | None = None, **extra: Any) -> bytes:
    """One event of a chat stream."""
    delta = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x-1", "choices": [choice], **extra}).encode() + b"\n\n"


def usage_event(**extra: Any) -> bytes:
    """The last event before `[DONE]` of a stream that was asked for usage."""
    body = {"id": "x-1", "choices": [], "usage": WHOLE["usage"], **extra}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


STREAM = (chunk("Hel"), chunk("lo"), chunk(finish="stop"), usage_event(), b"data: [DONE]\n\n")
Behaviour = Callable[["Upstream", web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Upstream:
    """A server that counts what reaches it. `behave` answers; it may be changed at any time."""

    behave: Behaviour
    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    num_open: int = 0  # requests being answered
    num_left: int = 0  # requests whose connection was closed before they were answered
    health: int = 200

    async def handle(self, http: web.Request) -> web.StreamResponse:
        self.bodies.append(await http.read())
        self.headers.append(http.headers)
        self.num_open += 1
        try:
            return await self.behave(self, http)
        except (asyncio.CancelledError, ConnectionError):
            self.num_left += 1
            raise
        finally:
            self.num_open -= 1

    async def look(self, _http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []}, status=self.health)


async def stream(http: web.Request, pieces: tuple[bytes, ...] | list[bytes]) -> web.StreamResponse:
    """Send events and stay open: the caller ends it."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    for piece in pieces:
        await response.write(piece)
    return response


async def well(_: Upstream, http: web.Request) -> web.StreamResponse:
    """As a good server answers."""
    if json.loads(await http.read()).get("stream"):
        response = await stream(http, STREAM)
        await response.write_eof()
        return response
    return web.json_response(WHOLE)


def answers(status: int, body: Any = None, **headers: str) -> Behaviour:
    """Always this status."""
    told = {"error": {"message": "no", "type": "t", "param": None, "code": None}} if body is None else body

    async def behave(_: Upstream, http: web.Request) -> web.StreamResponse:
        return web.json_response(told, status=status, headers=headers)

    return behave


async def hang_before_headers(_: Upstream, http: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def hang_before_first_byte(_: Upstream, http: web.Request) -> web.StreamResponse:
    response = await stream(http, [b": a comment is no event\n\n"])
    await asyncio.Event().wait()
    return response


async def hang_in_the_middle(_: Upstream, http: web.Request) -> web.StreamResponse:
    response = await stream(http, [chunk("Hel")])
    await asyncio.Event().wait()
    return response


async def reset_in_the_middle(_: Upstream, http: web.Request) -> web.StreamResponse:
    response = await stream(http, [chunk("Hel")])
    await asyncio.sleep(0.05)
    assert http.transport is not None
    http.transport.abort()
    return response


async def reset_at_once(_: Upstream, http: web.Request) -> web.StreamResponse:
    assert http.transport is not None
    http.transport.abort()
    await asyncio.sleep(0.05)
    return web.Response()


async def ends_too_early(_: Upstream, http: web.Request) -> web.StreamResponse:
    response = await stream(http, [chunk("Hel")])
    await response.write_eof()
    return response


async def error_first(_: Upstream, http: web.Request) -> web.StreamResponse:
    error = {"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}}
    response = await stream(http, [b"data: " + json.dumps(error).encode() + b"\n\n"])
    await response.write_eof()
    return response


async def error_in_the_middle(_: Upstream, http: web.Request) -> web.StreamResponse:
    error = {"error": {"message": "lost it", "type": "InternalServerError", "code": 500, "odd": [1]}}
    response = await stream(http, [chunk("Hel") + b"data: " + json.dumps(error).encode() + b"\n\n"])
    await response.write_eof()
    return response


@asynccontextmanager
async def upstream(behave: Behaviour = well) -> AsyncIterator[Upstream]:
    """Serve on a free port of loopback."""
    server = Upstream(behave)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    app.router.add_post("/v1/completions", server.handle)
    app.router.add_get("/v1/models", server.look)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


@dataclass(frozen=True, slots=True)
class Proxy:
    """The gateway in front, and a client for it."""

    url: str
    gateway: Gateway
    client: httpx.AsyncClient

    @property
    def backend(self) -> OpenAIHttpBackend:
        found = self.gateway.models[MODEL].backend
        assert isinstance(found, OpenAIHttpBackend)
        return found

    async def chat(self, policy: str | None = None, **body: Any) -> httpx.Response:
        """POST /v1/chat/completions with defaults."""
        headers = {} if policy is None else {"X-SpecGate-Policy": policy}
        whole = {"model": MODEL, "messages": MESSAGES} | body
        return await self.client.post("/v1/chat/completions", json=whole, headers=headers)

    async def decision(self) -> dict[str, Any]:
        """The last one, with its outcome."""
        found = (await self.client.get("/admin/decisions", params={"limit": 1})).json()["decisions"]
        return dict(found[0])


def settings(**pools: list[str]) -> OpenAIHttpConfig:
    """Quick to notice and to forget. Keywords: by policy, URLs."""
    return OpenAIHttpConfig(
        pools={name: PoolConfig(replicas=tuple(urls)) for name, urls in pools.items()},
        timeouts=QUICK,
        retries=RetryConfig(pause_s=0.0),
        breaker=BreakerConfig(open_s=0.2),
        health=HealthConfig(every_s=0.05, timeout_s=1.0),
    )


@asynccontextmanager
async def proxy(config: OpenAIHttpConfig, *, is_ready: bool = True, **changes: Any) -> AsyncIterator[Proxy]:
    """Serve on a free port of loopback; waits until it is ready."""
    whole = Config(
        models=(ModelConfig(id=MODEL, backend="openai_http", openai_http=config),),
        auth=AuthConfig(keyless_on_loopback=True),
        requests=RequestsConfig(allow_overrides=True),
    )
    app = build_app(replace(whole, **changes))
    async with AsyncExitStack() as stack:
        runner = make_runner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
        served = Proxy(url, app[GATEWAY], client)
        async with asyncio.timeout(10):
            while is_ready and _unchecked(served):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
        yield served


def _unchecked(served: Proxy) -> bool:
    replicas = [r for pool in served.backend.pools.values() for r in pool.replicas]
    return any(replica.is_healthy is None for replica in replicas) or bool(served.gateway.missing())
