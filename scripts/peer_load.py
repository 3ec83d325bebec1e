"""What `bench_peers` sends to a server, and what it reads off the answers."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True)
class Load:
    """What one task gave at one concurrency."""

    task: str
    concurrency: int
    num_answers: int
    num_failed: int
    tpot_ms: float | None  # median over answers, and so is ttft_ms
    ttft_ms: float | None
    output_tokens_per_s: float


@dataclass(frozen=True)
class Client:
    """One server as this bench talks to it: every connection is new, so that none has timed out meanwhile."""

    url: str
    model: str
    headers: Mapping[str, str]
    max_tokens: int

    async def measure(self, task: str, prompts: Sequence[Any], concurrency: int) -> Load:
        """All prompts of a task, so many open at once."""
        gate = asyncio.Semaphore(concurrency)
        answers: list[tuple[float, float | None, int]] = []
        num_failed = 0

        async def one(session: aiohttp.ClientSession, messages: Any) -> None:
            nonlocal num_failed
            async with gate:
                try:
                    answers.append(await self._ask(session, messages))
                except (RuntimeError, aiohttp.ClientError, ValueError) as error:
                    num_failed += 1
                    print(f"  {task}: {error}", flush=True)

        async with session_to(self.url) as session:
            started_s = time.perf_counter()
            await asyncio.gather(*(one(session, messages) for messages in prompts))
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

    async def _ask(self, session: aiohttp.ClientSession, messages: Any) -> tuple[float, float | None, int]:
        """(TTFT, TPOT, output tokens) of one streamed greedy answer. Raises RuntimeError for a refusal."""
        body = {"model": self.model, "messages": messages, "max_tokens": self.max_tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        started_s = time.perf_counter()
        first_s = last_s = None
        num_tokens = 0
        async with session.post("/v1/chat/completions", json=body, headers=self.headers) as answer:
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


def session_to(url: str) -> aiohttp.ClientSession:
    """As many connections as are asked for, none of them kept."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=600), connector=connector)
