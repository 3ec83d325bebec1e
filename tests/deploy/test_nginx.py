"""The nginx front, run for real: events come through one by one, errors and ids as they were made."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.deploy.support import DEPLOY, free_port, tool
from tests.specgate.gateway import HELLO, MODEL, Running, events, eventually, running

CONF = DEPLOY / "nginx" / "specgate.conf"
MAIN = """
{user}
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/specgate.conf;
}}
"""


def front(folder: Path, upstream: str, port: int) -> list[str]:
    """Writes the shipped front for this upstream and port; the command that runs it."""
    nginx = tool("nginx", "nginx")
    text = CONF.read_text(encoding="utf-8")
    text, num_servers = re.subn(r"server 127\.0\.0\.1:8080", f"server {upstream}", text)
    text, num_ports = re.subn(r"listen 80;", f"listen 127.0.0.1:{port};", text)
    assert (num_servers, num_ports) == (1, 1)
    (folder / "specgate.conf").write_text(text)
    (folder / "nginx.conf").write_text(
        MAIN.format(folder=folder, user="user root;" if os.geteuid() == 0 else "")
    )
    return [nginx, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]


@asynccontextmanager
async def fronted(server: Running, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client that talks to `server` through nginx."""
    port = free_port()
    command = front(folder, server.url.removeprefix("http://"), port)
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            async with asyncio.timeout(20):
                while True:
                    try:
                        await client.get("/healthz")
                        break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.02)
            yield client
    finally:
        process.terminate()
        await process.wait()


def test_the_front_is_valid(tmp_path: Path) -> None:
    command = [*front(tmp_path, "127.0.0.1:9", free_port()), "-t"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


async def test_events_come_through_one_by_one(tmp_path: Path) -> None:
    """Each event is read before the server makes the next: a front that gathers them would wait forever."""
    async with running(step_s=0.0) as server, fronted(server, tmp_path) as client:
        gate = asyncio.Semaphore(0)
        stumble = server.fake._stumble

        async def gated(num_out: int) -> None:
            await gate.acquire()
            await stumble(num_out)

        server.fake._stumble = gated  # type: ignore[method-assign]
        body = {"model": MODEL, "messages": HELLO, "stream": True, "max_tokens": 6}
        body["specgate"] = {"policy": "baseline"}
        gate.release()  # the headers come with the first event
        pieces = []
        async with asyncio.timeout(20), client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            async for piece in response.aiter_text():
                pieces.append(piece)
                gate.release()
        payloads = events("".join(pieces))
        assert payloads[-1] == "[DONE]"
        contents = [p["choices"][0]["delta"].get("content") for p in payloads[:-1]]
        assert "".join(c for c in contents if c) == "Hello "
        assert len(pieces) >= 6


async def test_headers_errors_and_limits_are_the_servers_own(tmp_path: Path) -> None:
    async with running() as server, fronted(server, tmp_path) as client:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 3}
        kept = await client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine-1"})
        assert kept.status_code == 200
        assert kept.headers["X-Request-Id"] == "mine-1"
        assert kept.headers["X-SpecGate-Policy"]
        made = await client.post("/v1/chat/completions", json=body)
        assert re.fullmatch(r"[0-9a-f]{32}", made.headers["X-Request-Id"])
        wrong = await client.post("/v1/chat/completions", json=body | {"model": "none"})
        assert wrong.status_code == 404
        assert wrong.json()["error"]["code"] == "model_not_found"
        large = await client.post("/v1/chat/completions", json=body | {"user": "x" * 7_000_000})
        assert large.status_code == 200, "a body that the server takes passes nginx too"
        assert (await client.get("/readyz")).status_code == 200


async def test_the_inside_is_not_reached_from_outside(tmp_path: Path) -> None:
    async with running() as server, fronted(server, tmp_path) as client:
        for path in ("/metrics", "/admin/state", "/ui", "/v1/../admin/state", "//admin/state"):
            assert (await client.get(path)).status_code in (400, 404), path


async def test_a_client_that_leaves_is_noticed_behind_the_front(tmp_path: Path) -> None:
    async with running(step_s=0.01, text="a" * 5000) as server, fronted(server, tmp_path) as client:
        body = {"model": MODEL, "messages": HELLO, "stream": True, "max_tokens": 5000}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                break
        await eventually(lambda: server.fake.num_running == 0)
