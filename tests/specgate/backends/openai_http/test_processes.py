"""Real processes: the gateway and the servers behind it, one of which is killed."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from tests.specgate.gateway import events

pytestmark = pytest.mark.e2e

SERVER = """
server: {port: 0}
auth: {keyless_on_loopback: true}
requests: {allow_overrides: true}
models:
  - {id: small, backend: fake, fake: {text: "abcdefghijklmnopqrstuvwxyz", step_s: 0.02}}
"""
FRONT = """
server: {port: 0}
auth: {keyless_on_loopback: true}
requests: {allow_overrides: true}
models:
  - id: big
    backend: openai_http
    openai_http:
      health: {every_s: 0.1}
      pools:
        baseline: {replicas: [%s], model: small, headers: {X-SpecGate-Policy: baseline}}
        ngram: {replicas: [%s], model: small, headers: {X-SpecGate-Policy: ngram}}
"""
BODY = {"model": "big", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}


@asynccontextmanager
async def served(path: Path, config: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    path.write_text(config, encoding="utf-8")  # noqa: ASYNC240 - a few bytes
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "specgate", "serve", "--config", str(path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("specgate ready on ")
        yield process, line.split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_pool_killed_in_mid_stream_costs_that_stream_and_nothing_else(tmp_path: Path) -> None:
    async with (
        served(tmp_path / "plain.yaml", SERVER) as (_, plain),
        served(tmp_path / "ngram.yaml", SERVER) as (victim, ngram),
        served(tmp_path / "front.yaml", FRONT % (plain, ngram)) as (front, url),
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        answer = await openai.chat.completions.create(
            model="big",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=12,
            extra_headers={"X-SpecGate-Policy": "ngram"},
        )
        assert answer.choices[0].message.content == "abcdefghijkl"
        assert (answer.model_extra or {})["specgate"]["num_accepted_tokens"] == 8
        await openai.close()

        override = {"X-SpecGate-Policy": "ngram"}
        long = BODY | {"stream": True, "max_tokens": 2000, "ignore_eos": True}
        async with client.stream("POST", "/v1/chat/completions", json=long, headers=override) as response:
            pieces = response.aiter_text()
            text = await anext(pieces)
            victim.send_signal(signal.SIGKILL)
            text += "".join([piece async for piece in pieces])
        payloads = events(text)
        assert payloads[-1]["error"]["code"] == "upstream_failed"
        assert "[DONE]" not in payloads

        after = await client.post("/v1/chat/completions", json=BODY, headers=override)
        assert after.json()["choices"][0]["message"]["content"] == "abcdefghijkl"
        told = after.json()["specgate"]
        assert told["policy"] == "baseline" or told["policy_changes"][0]["policy"] == "baseline"
        async with asyncio.timeout(20):
            while after.headers["X-SpecGate-Reason"] != "drafter_error":
                await asyncio.sleep(0.05)
                after = await client.post("/v1/chat/completions", json=BODY, headers=override)
        assert after.headers["X-SpecGate-Policy"] == "baseline"
        assert (await client.get("/readyz")).status_code == 200
        state = json.loads((await client.get("/admin/state")).text)
        assert state["num_open_requests"] == 0
        assert "ngram" in state["models"]["big"]["closed"]
        front.send_signal(signal.SIGTERM)
        assert await front.wait() == 0
