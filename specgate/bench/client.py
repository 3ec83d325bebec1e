"""Sends requests to one server under one arm, and notes when each piece came."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from specgate.bench.record import Job, RawAnswer
from specgate.clock import Clock

DEFAULT_ARM = "default"
"""The arm that asks for nothing: no policy header. For servers that know none."""
CONNECT_TIMEOUT_S = 30.0


class BenchError(Exception):
    """A bench cannot go on. The message is one sentence saying what to do."""


class Client:
    """One arm on one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, arm: str, clock: Clock) -> None:
        self.url = url.rstrip("/")
        self.arm = arm
        self.model_id = ""  # set once the server has told it
        self.clock = clock
        self._session = session
        self._headers = {} if arm == DEFAULT_ARM else {"X-SpecGate-Policy": arm}

    def under(self, arm: str) -> Client:
        """Another arm on the same server."""
        other = Client(self._session, self.url, arm, self.clock)
        other.model_id = self.model_id
        return other

    async def ask(self, job: Job, due_s: float) -> RawAnswer:
        """Stream one answer. Never raises for what the server or the connection does."""
        answer = RawAnswer(job, due_s, sent_s=self.clock.monotonic())
        body = {
            **job.body,
            "model": self.model_id,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        now = self.clock.monotonic
        try:
            async with self._session.post(
                f"{self.url}/v1/{job.endpoint}", json=body, headers=self._headers
            ) as response:
                answer.status = response.status
                answer.headers = response.headers
                async for piece in response.content.iter_any():
                    answer.pieces.append((now(), piece))
        except TimeoutError:
            answer.fault = "no whole answer in time"
        except aiohttp.ClientError as error:
            answer.fault = f"the connection failed ({type(error).__name__}: {error})"
        answer.ended_s = now()
        return answer

    async def get_json(self, path: str) -> Any:
        """A document of the server; None where there is none (404, 401, no JSON)."""
        try:
            async with self._session.get(self.url + path) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ContentTypeError, ValueError):
            return None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchError(f"no server answers at {self.url}: start one or give another --url") from error

    async def find_model(self) -> dict[str, Any]:
        """The first model's entry in /v1/models; remembers its id."""
        answer = await self.get_json("/v1/models")
        try:
            entry: dict[str, Any] = answer["data"][0]
            self.model_id = str(entry["id"])
        except (TypeError, KeyError, IndexError) as error:
            raise BenchError(f"{self.url}/v1/models lists no model: is it an OpenAI server?") from error
        return entry


@contextlib.asynccontextmanager
async def open_session(token: str | None, timeout_s: float) -> AsyncIterator[aiohttp.ClientSession]:
    """One pool of connections for all arms, without a limit of its own."""
    timeout = aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as session:
        yield session
        await asyncio.sleep(0)  # lets closed transports go before the loop does
