"""What nginx before specgate adds to the first token: the shipped front and the server itself, in turns.

    python tests/bench/front.py [--url http://127.0.0.1:8080 --model NAME] [--num 200]

Without --url a server with a scripted model (5 ms a step) is started. Each pair is one streamed request to
either, in random order; printed are the medians and the median of the paired differences, with a 95 %
interval by bootstrap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.deploy.support import free_port
from tests.deploy.test_nginx import front
from tests.e2e.server import serve

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name three rivers in Europe."}],
    "stream": True,
    "max_tokens": 8,
    "temperature": 0,
}


async def first_token_ms(client: httpx.AsyncClient, model: str) -> float:
    """From sending to the first event, in ms; the answer is read to its end."""
    began = time.perf_counter()
    first: float | None = None
    async with client.stream("POST", "/v1/chat/completions", json=BODY | {"model": model}) as response:
        response.raise_for_status()
        async for piece in response.aiter_bytes():
            if first is None and piece:
                first = time.perf_counter()
    assert first is not None
    return (first - began) * 1e3


async def measure(url: str, model: str, num: int) -> None:
    """Start nginx, ask in pairs, print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = free_port()
        process = await asyncio.create_subprocess_exec(*front(folder, url.removeprefix("http://"), port))
        try:
            async with (
                httpx.AsyncClient(base_url=url, timeout=60) as direct,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as fronted,
            ):
                await asyncio.sleep(1.0)
                pairs = await ask_in_turns(direct, fronted, model, num)
        finally:
            process.terminate()
            await process.wait()
    report(pairs)


async def ask_in_turns(
    direct: httpx.AsyncClient, fronted: httpx.AsyncClient, model: str, num: int
) -> list[tuple[float, float]]:
    """(direct, through nginx) in ms, the first few left out."""
    order = random.Random(1)
    pairs = []
    for _ in range(num + 10):
        took: dict[httpx.AsyncClient, float] = {}
        for client in order.sample([direct, fronted], 2):
            took[client] = await first_token_ms(client, model)
        pairs.append((took[direct], took[fronted]))
    return pairs[10:]


def report(pairs: list[tuple[float, float]]) -> None:
    """Medians, and how sure they are."""
    differences = [through - alone for alone, through in pairs]
    draws = random.Random(2)
    medians = sorted(statistics.median(draws.choices(differences, k=len(differences))) for _ in range(2000))
    print(f"pairs: {len(pairs)}; load average {os.getloadavg()[0]:.1f}")
    print(f"first token, direct: {statistics.median(a for a, _ in pairs):.2f} ms (median)")
    print(f"first token, through nginx: {statistics.median(t for _, t in pairs):.2f} ms (median)")
    print(
        f"difference: {statistics.median(differences):.2f} ms (median of pairs; "
        f"95 %: {medians[50]:.2f} to {medians[-51]:.2f})"
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--num", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "config.yaml"
        models = [{"id": args.model, "backend": "fake", "fake": {"prefill_s": 0.01, "step_s": 0.005}}]
        config.write_text(json.dumps({"auth": {"keyless_on_loopback": True}, "models": models}))
        with nullcontext() if args.url else serve(config, args.model) as server:
            asyncio.run(measure(args.url or server.url, args.model, args.num))


if __name__ == "__main__":
    main()
