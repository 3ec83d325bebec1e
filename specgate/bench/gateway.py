"""What the gateway itself costs: `make bench-gateway`.

The same requests go to an instant upstream directly, through nginx (where installed), through the
gateway as a proxy, and to the gateway with its scripted backend. Latency at one client is paired: the
targets take turns request by request. Throughput per core is requests over the CPU seconds of the
target's own process, so that clients and upstream on the same machine do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgate.bench.instant import NUM_CHUNKS
from specgate.bench.wire import Connection, Timed, WireError, connect, request_bytes

PROMPT = "Summarize this in one sentence: the quick brown fox jumps over the lazy dog, again and again."
_READY_S = 60.0
_TARGETS = {"added_p50_ms": 1.0, "added_p99_ms": 3.0, "whole_per_s": 2000.0, "streams_per_s": 1000.0}
_GATEWAY = """
server: {{port: 0}}
auth: {{keyless_on_loopback: true}}
learning: {{folder: null}}
logging: {{level: warning}}
models:
  - id: m
    {model}
"""
_FAKE = "backend: fake\n    fake: {{text: '{text}'}}"
_PROXY = """backend: openai_http
    openai_http:
      pools:
        baseline: {{replicas: [{url}]}}
        ngram: {{replicas: [{url}]}}"""
_NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log stderr error;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 1000000;
  upstream up {{ server 127.0.0.1:{upstream}; keepalive 64; keepalive_requests 1000000; }}
  server {{ listen 127.0.0.1:{port};
    location / {{ proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection "";
                  proxy_buffering off; }} }}
}}
"""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `pid`: whose CPU time is read."""

    name: str
    port: int
    pid: int


@dataclass(frozen=True, slots=True)
class Options:
    """How long and how much."""

    num_paired: int
    seconds: float
    concurrency: int


async def measure(options: Options) -> dict[str, Any]:
    """Start everything, measure, stop everything."""
    async with AsyncExitStack() as stack:
        targets = await _start_all(stack)
        found: dict[str, dict[str, Any]] = {target.name: {} for target in targets}
        for kind in ("whole", "stream"):
            latencies = await _paired(targets, kind, options.num_paired)
            for name, timed in latencies.items():
                found[name][kind] = _quantiles([t.whole_s for t in timed])
                found[name][f"{kind}_first_byte"] = _quantiles([t.first_s for t in timed])
            for target in targets:
                try:
                    found[target.name][f"{kind}_load"] = await _load(target, kind, options)
                except WireError as error:
                    raise WireError(f"{target.name}, {kind}: {error}") from error
        direct = found["direct"]
        for name in found:
            if name != "direct":
                found[name]["added_ms"] = {
                    kind: {q: found[name][kind][q] - direct[kind][q] for q in ("p50", "p99")}
                    for kind in ("whole", "whole_first_byte", "stream", "stream_first_byte")
                }
        return {"machine": _machine(), "chunks": NUM_CHUNKS, "targets": _TARGETS, "found": found}


# --- servers ---------------------------------------------------------------------------------


async def _start_all(stack: AsyncExitStack) -> list[Target]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    upstream = await stack.enter_async_context(
        _server("direct", [sys.executable, "-m", "specgate.bench.instant"])
    )
    targets = [upstream]
    if (nginx := shutil.which("nginx")) is not None:
        targets.append(await stack.enter_async_context(_nginx(nginx, folder, upstream.port)))
    models = {
        "specgate, proxy": _PROXY.format(url=f"http://127.0.0.1:{upstream.port}"),
        "specgate, scripted": _FAKE.format(text="x" * NUM_CHUNKS),
    }
    for name, model in models.items():
        config = folder / f"{len(targets)}.yaml"
        config.write_text(_GATEWAY.format(model=model), encoding="utf-8")
        command = [sys.executable, "-m", "specgate", "serve", "--config", str(config)]
        targets.append(await stack.enter_async_context(_server(name, command)))
    return targets


@asynccontextmanager
async def _server(name: str, command: Sequence[str]) -> AsyncIterator[Target]:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_READY_S):
            line = (await process.stdout.readline()).decode()
        yield Target(name, int(line.rsplit(":", 1)[1]), process.pid)
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def _nginx(binary: str, folder: Path, upstream: int) -> AsyncIterator[Target]:
    port = _free_port()
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, upstream=upstream, port=port), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(binary, "-c", str(config), "-p", str(folder))
    try:
        async with asyncio.timeout(_READY_S):
            while True:
                try:
                    (await connect(port)).close()
                    break
                except OSError:
                    await asyncio.sleep(0.05)
        yield Target("nginx", port, process.pid)
    finally:
        process.terminate()
        await process.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- measuring -------------------------------------------------------------------------------


async def _paired(targets: Sequence[Target], kind: str, num: int) -> dict[str, list[Timed]]:
    """`num` requests to each target, one after another, the targets in turns."""
    connections = [await connect(target.port) for target in targets]
    requests = [_request(target, kind) for target in targets]
    out: dict[str, list[Timed]] = {target.name: [] for target in targets}
    for number in range(num + num // 10):
        for target, connection, request in zip(targets, connections, requests, strict=True):
            timed = await connection.ask(request)
            if number >= num // 10:  # the first tenth warms up
                out[target.name].append(timed)
    for connection in connections:
        connection.close()
    return out


async def _load(target: Target, kind: str, options: Options) -> dict[str, float]:
    """As many requests as `concurrency` clients get through in the time."""
    request = _request(target, kind)
    connections = [await connect(target.port) for _ in range(options.concurrency)]
    await asyncio.gather(*(_until(time.perf_counter() + 0.5, c, request) for c in connections))
    cpu, began = cpu_s(target.pid), time.perf_counter()
    counts = await asyncio.gather(*(_until(began + options.seconds, c, request) for c in connections))
    spent, lasted = cpu_s(target.pid) - cpu, time.perf_counter() - began
    for connection in connections:
        connection.close()
    num = sum(counts)
    return {
        "requests": num,
        "per_s": num / lasted,
        "cpu_us_per_request": spent / num * 1e6,
        "per_s_and_core": num / spent if spent else float("inf"),
    }


async def _until(ends: float, connection: Connection, request: bytes) -> int:
    num = 0
    while time.perf_counter() < ends:
        await connection.ask(request)
        num += 1
    return num


def _request(target: Target, kind: str) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": NUM_CHUNKS}
    return request_bytes(target.port, body | ({"stream": True} if kind == "stream" else {}))


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": cuts[49] * 1e3, "p90": cuts[89] * 1e3, "p99": cuts[98] * 1e3}


def _machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "commit": _commit(),
    }


def _commit() -> str | None:
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


# --- showing ---------------------------------------------------------------------------------


def show(report: dict[str, Any]) -> None:
    """One table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="One client (ms), and throughput by CPU seconds of the target's own process")
    table.add_column("")
    for column in ("whole p50", "p99", "added p50", "added p99", "stream p50", "1st byte added p50",
                   "whole/s per core", "streams/s per core"):  # fmt: skip
        table.add_column(column, justify="right")
    for name, row in report["found"].items():
        added = row.get("added_ms")
        table.add_row(
            name,
            f"{row['whole']['p50']:.2f}",
            f"{row['whole']['p99']:.2f}",
            f"{added['whole']['p50']:.2f}" if added else "",
            f"{added['whole']['p99']:.2f}" if added else "",
            f"{row['stream']['p50']:.2f}",
            f"{added['stream_first_byte']['p50']:.2f}" if added else "",
            f"{row['whole_load']['per_s_and_core']:,.0f}",
            f"{row['stream_load']['per_s_and_core']:,.0f}",
        )
    console = Console()
    console.print(table)
    console.print(f"a stream has {report['chunks']} chunks; machine: {report['machine']}", highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m specgate.bench.gateway", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="paired requests a target")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="clients of each load")
    parser.add_argument("--out", type=Path, default=Path("out/bench/gateway.json"))
    args = parser.parse_args(arguments)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(measure(Options(args.requests, args.seconds, args.concurrency)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
