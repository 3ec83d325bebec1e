"""A gateway on a real socket with scripted backends, for the tests beside this file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from aiohttp import web

from specgate.app import build_app, make_runner
from specgate.backends.fake import FakeBackend
from specgate.clock import SystemClock
from specgate.config import AuthConfig, Config, FakeConfig, ModelConfig, RequestsConfig
from specgate.gateway import GATEWAY, Gateway

MODEL = "fake-1"
TEXT = "Hello there, 世界! Bye."
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SUMMARY: list[dict[str, Any]] = [
    {"role": "user", "content": "Summarize this:\n" + "All work and no play. " * 60}
]


def make_config(**changes: Any) -> Config:
    """A permissive configuration; keyword arguments replace whole sections."""
    base = Config(
        models=(ModelConfig(id=MODEL, backend="fake"),),
        auth=AuthConfig(keyless_on_loopback=True),
        requests=RequestsConfig(allow_overrides=True),
    )
    return replace(base, **changes)


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway that listens, its scripted backend, and a client for it."""

    url: str
    gateway: Gateway
    fake: FakeBackend
    client: httpx.AsyncClient

    async def chat(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        """POST /v1/chat/completions with defaults."""
        whole = {"model": MODEL, "messages": HELLO} | body
        return await self.client.post("/v1/chat/completions", json=whole, headers=headers)

    async def complete(self, **body: Any) -> httpx.Response:
        """POST /v1/completions with defaults."""
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": "hi"} | body)

    async def metric(self, series: str) -> float:
        """The value of one series as exported, 0 where it has no sample yet."""
        text = (await self.client.get("/metrics")).text
        found = [line for line in text.splitlines() if line.startswith(series + " ")]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0

    async def settled(self) -> None:
        """Wait until nothing runs; fails if that never comes."""
        await eventually(lambda: self.fake.num_running == 0 and self.gateway.pipeline.num_open == 0)
        admission = self.gateway.models[MODEL].admission
        assert (admission.num_running, admission.num_queued, admission._num_used) == (0, 0, 0)
        assert self.fake.load().num_used_blocks == 0


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for a condition that other tasks bring about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    config: Config | None = None, others: tuple[str, ...] = (), **script: Any
) -> AsyncIterator[Running]:
    """Serve on a free port of loopback. `others` are further models of the configuration, scripted alike."""
    scripted = FakeConfig(**({"text": TEXT} | script))
    fakes = {name: FakeBackend(name, scripted, SystemClock()) for name in (MODEL, *others)}
    fake = fakes[MODEL]
    app = build_app(config or make_config(), backends=fakes)
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield Running(url, app[GATEWAY], fake, client)
    finally:
        await runner.cleanup()


def events(text: str) -> list[Any]:
    """The payloads of a stream, `[DONE]` as that string; checks that nothing else is in it."""
    out: list[Any] = []
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        assert block.startswith("data: ")
        assert "\n" not in block
        data = block.removeprefix("data: ")
        out.append(data if data == "[DONE]" else json.loads(data))
    return out


def streamed_text(payloads: list[Any], index: int = 0) -> str:
    """What the chunks of one choice add up to, chat or completions."""
    choices = [c for p in payloads if p != "[DONE]" for c in p.get("choices", ()) if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)
