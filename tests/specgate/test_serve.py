"""The server as a process: the ready line, draining on a signal, exit codes, and no torch."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

CONFIG = """
auth: {keyless_on_loopback: true}
models: [{id: m, backend: fake, fake: {step_s: 0.02, text: "0123456789"}}]
server: {drain_grace_s: %s}
decision_log: {path: %s}
"""
STREAM = {"model": "m", "prompt": "x", "max_tokens": 10, "stream": True}


@asynccontextmanager
async def served(
    tmp_path: Path, grace_s: float = 10.0
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG % (grace_s, tmp_path / "log.jsonl"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "specgate", "serve", "--config", str(config), "--port", "0",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("specgate ready on http://127.0.0.1:")
        yield process, line.split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_sigterm_drains_running_streams_and_exits_0(tmp_path: Path) -> None:
    async with served(tmp_path) as (process, url), httpx.AsyncClient(base_url=url, timeout=20) as client:
        # Long enough to outlast the questions asked meanwhile.
        long = STREAM | {"max_tokens": 150, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=long) as response:
            lines = response.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                while (await client.get("/readyz")).status_code != 503:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.005)
            refused = await client.post("/v1/completions", json=STREAM)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
            assert "data: [DONE]" in [line async for line in lines]
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.timeout(20):
            assert await process.wait() == 0
        assert await process.stdout.read() == b""  # the ready line was the only one
        assert b"Traceback" not in await process.stderr.read()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("second_signal", [True, False])
async def test_a_stream_longer_than_the_grace_does_not_keep_the_server(
    tmp_path: Path, second_signal: bool
) -> None:
    grace_s = 60.0 if second_signal else 0.1
    async with (
        served(tmp_path, grace_s) as (process, url),
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        endless = STREAM | {"max_tokens": 8000, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=endless) as response:
            lines = response.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGINT)
            if second_signal:
                process.send_signal(signal.SIGTERM)
            rest = [line async for line in lines if line]
            assert '"code":"draining"' in rest[-1]
        async with asyncio.timeout(20):
            assert await process.wait() == 0


def test_wrong_use_and_a_taken_port_have_their_exit_codes(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG % (1, "null"))

    def serve(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "specgate", "serve", "--config", str(config), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    wrong = serve("--set", "server.prot=1")
    assert wrong.returncode == 2
    assert "did you mean 'port'" in wrong.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = serve("--port", str(taken.getsockname()[1]))
    assert busy.returncode == 1
    assert "give another" in busy.stderr
    assert "Traceback" not in busy.stderr


def test_the_composition_root_is_free_of_torch() -> None:
    code = (
        "import sys, specgate.app, specgate.cli, specgate.backends.embedded.backend\n"
        "print([m for m in ('torch', 'transformers', 'numba', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"
