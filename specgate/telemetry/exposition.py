"""The metrics as Prometheus text, without holding up the event loop for the whole of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class _One(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


async def exposition(registry: CollectorRegistry) -> bytes:
    """A busy server has thousands of series, which take tens of milliseconds to write down: streams and
    health probes get their turn after each family. What families say is then as of slightly different
    moments; no two of them are promised to agree."""
    parts = []
    for family in registry.collect():
        parts.append(generate_latest(_One(family)))
        await asyncio.sleep(0)
    return b"".join(parts)
