"""What `specgate serve` holds in memory at its peak, and how long it takes until it is ready.

    python tests/bench/memory.py [--sequences 16] [--tokens 2048] [--starts 2]

Starts the default configuration with an empty cache folder (cold: weights are packed anew; kernels already
compiled are taken along) and then again (warm), fills as many sequences at once as are asked for, and
prints the highest resident memory of gateway and engine, less the KV cache. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
MB = 1e6


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument(
        "--tokens", type=int, default=2048, help="of each sequence, prompt and answer together"
    )
    parser.add_argument("--answer", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--starts", type=int, default=2, help="the first is cold, the others are warm")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specgate" / "kernels"
        if kernels.exists():
            shutil.copytree(kernels, Path(folder) / "cache" / "specgate" / "kernels")
        for number in range(arguments.starts):
            await one_start("warm" if number else "cold", Path(folder), arguments)


async def one_start(name: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Start, load, read, stop."""
    settings = [f"learning.folder={folder / name}", "decision_log.path=null", "guards.force_path=null"]
    command = [sys.executable, "-m", "specgate", "serve", "--port", "0"]
    command += [word for setting in settings for word in ("--set", setting)]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    began_s = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        while (found := re.search(rb"http://\S+", line := await process.stdout.readline())) is None:
            if not line:
                raise RuntimeError("the server ended while starting")
        async with aiohttp.ClientSession(found[0].decode()) as session:
            ready_s = await _ready(session, began_s)
            print(f"{name}: ready after {ready_s:.1f} s; {_show(process.pid)}")
            await _fill(session, arguments)
            async with session.get("/admin/state") as answer:
                state = await answer.json()
        peaks = _peaks(process.pid)
        memory = next(value for key, value in _walk(state) if key == "memory_bytes")
        kv = sum(number for part, number in memory.items() if part.endswith("kv"))
        print(f"{name}: after {arguments.sequences} x {arguments.tokens} tokens; {_show(process.pid)}")
        print(
            f"{name}: as the server tells, MB: { ({part: round(n / MB, 1) for part, n in memory.items()}) }"
        )
        print(f"{name}: peak above the KV cache {sum(peaks.values()) / MB - kv / MB:.0f} MB")
    finally:
        process.terminate()
        await process.wait()


async def _ready(session: aiohttp.ClientSession, began_s: float) -> float:
    while True:
        async with session.get("/readyz") as answer:
            if answer.status == 200:
                return time.perf_counter() - began_s
        await asyncio.sleep(0.02)


async def _fill(session: aiohttp.ClientSession, arguments: argparse.Namespace) -> None:
    """So many requests at once, of random tokens: nothing is found in the cache."""
    chance = random.Random(1)
    async with session.get("/v1/models") as answer:
        model = (await answer.json())["data"][0]["id"]

    async def ask() -> None:
        prompt = [chance.randrange(1000, 40_000) for _ in range(arguments.tokens - arguments.answer)]
        body = {"model": model, "prompt": prompt, "max_tokens": arguments.answer, "ignore_eos": True}
        async with session.post("/v1/completions", json=body | {"temperature": 0}) as answer:
            if answer.status != 200:
                raise RuntimeError(await answer.text())

    await asyncio.gather(*(ask() for _ in range(arguments.sequences)))


def _peaks(pid: int) -> dict[int, int]:
    """Highest resident memory in bytes of a process and of its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = {pid: _field(pid, "VmHWM")}
    for child in children:
        found |= _peaks(int(child))
    return found


def _show(pid: int) -> str:
    parts = [
        f"peak {_field(p, 'VmHWM') / MB:.0f} MB, now {_field(p, 'RssAnon') / MB:.0f} MB of its"
        f" own and {_field(p, 'RssFile') / MB:.0f} MB of files"
        for p in _peaks(pid)
    ]
    return "; ".join(parts)


def _field(pid: int, name: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    value = next(line.split()[1] for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(value) * 1024 if value.isdecimal() else 0


def _walk(tree: object) -> list[tuple[str, dict[str, int]]]:
    found = []
    if isinstance(tree, dict):
        for key, value in tree.items():
            found += [(key, value), *_walk(value)]
    elif isinstance(tree, list):
        for value in tree:
            found += _walk(value)
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended all the same
    asyncio.run(main())
