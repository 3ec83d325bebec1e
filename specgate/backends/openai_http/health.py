"""Asks every replica for its health, over and over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

import aiohttp

from specgate.backends.openai_http.pool import Pool, Replica
from specgate.config.upstream import HealthConfig

logger = logging.getLogger(__name__)


class HealthChecks:
    """One task per replica, from `start` to `stop`."""

    def __init__(self, config: HealthConfig, session: aiohttp.ClientSession) -> None:
        self._config = config
        self._session = session
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, pools: Iterable[tuple[Pool, Mapping[str, str]]]) -> None:
        """Begin; each pool with the headers that its servers want."""
        self._tasks = [
            asyncio.create_task(self._watch(replica, pool.config.health_path, headers), name="health")
            for pool, headers in pools
            for replica in pool.replicas
        ]

    async def stop(self) -> None:
        """End."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, replica: Replica, path: str, headers: Mapping[str, str]) -> None:
        while True:
            note_health(replica, await self._fault(replica.url + path, headers), self._config.max_failures)
            await asyncio.sleep(self._config.every_s)

    async def _fault(self, url: str, headers: Mapping[str, str]) -> str | None:
        try:
            async with (
                asyncio.timeout(self._config.timeout_s),
                self._session.get(url, headers=headers, allow_redirects=False) as response,
            ):
                await response.content.read(1)
                return None if response.ok else f"its health check answers {response.status}"
        except TimeoutError:
            return "its health check does not answer in time"
        except (aiohttp.ClientError, OSError) as error:
            return f"its health check fails ({type(error).__name__})"


def note_health(replica: Replica, fault: str | None, max_failures: int) -> None:
    """What a check found. One that was never well counts as down at once."""
    before = replica.is_healthy
    if fault is None:
        replica.num_failed_checks = 0
        replica.is_healthy = True
    else:
        replica.num_failed_checks += 1
        replica.why = fault
        if replica.num_failed_checks >= max_failures or before is None:
            replica.is_healthy = False
    if replica.is_healthy is not before:
        level = logging.INFO if replica.is_healthy else logging.WARNING
        logger.log(level, "replica %s is %s", replica.url, "up" if replica.is_healthy else f"down: {fault}")
