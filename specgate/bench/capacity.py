"""How much a server takes: requests per second at saturation, and concurrency within SLOs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specgate.bench.client import BenchError, Client
from specgate.bench.load import closed_loop
from specgate.bench.record import Job, Record, read_answer
from specgate.bench.workload import Asking, Pool, make_job

RAMP_SHARE = 0.25  # of a closed loop's duration, left out of the count
GAIN = 1.05  # more concurrency must give this much more to be worth it


@dataclass(frozen=True, slots=True)
class Capacity:
    """Baseline throughput at saturation: a closed loop at `concurrency`."""

    requests_per_s: float
    output_tokens_per_s: float | None
    concurrency: int | None  # None: the rate was given, not measured
    seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet, in ms. None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def is_set(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def is_met(self, record: Record) -> bool:
        """False for a failed request. A request without a second token has no TPOT to miss."""
        if not record.is_ok or record.ttft_ms is None:
            return False
        if self.ttft_ms is not None and record.ttft_ms > self.ttft_ms:
            return False
        return self.tpot_ms is None or record.tpot_ms is None or record.tpot_ms <= self.tpot_ms


def endless_jobs(name: str, pool: Pool, asking: Asking, seed: int) -> Iterator[Job]:
    """Jobs for a closed loop."""
    prompts = pool.draw(random.Random(f"{name} {seed}"))
    return (make_job(f"{name}/{index}", prompt, asking) for index, prompt in enumerate(prompts))


async def measure_capacity(
    client: Client, jobs: Iterator[Job], concurrencies: Sequence[int], duration_s: float
) -> Capacity:
    """Closed loops at growing concurrency until more gives no more. Raises BenchError on failures."""
    best: Capacity | None = None
    for concurrency in concurrencies:
        started_s = client.clock.monotonic()
        answers = await closed_loop(
            jobs, client.ask, client.clock, concurrency=concurrency, duration_s=duration_s
        )
        records = [read_answer(answer, client.arm) for answer in answers]
        for record in records:
            if not record.is_ok:
                raise BenchError(f"the server failed while its capacity was measured: {record.error}")
        found = _throughput(records, started_s + RAMP_SHARE * duration_s, started_s + duration_s)
        if found is None:
            raise BenchError("no token came while the capacity was measured: give a longer --capacity-s")
        here = Capacity(*found, concurrency, duration_s)
        if best is not None and here.requests_per_s < GAIN * best.requests_per_s:
            return max(best, here, key=lambda capacity: capacity.requests_per_s)
        best = here
    assert best is not None
    return best


def _throughput(records: Sequence[Record], from_s: float, to_s: float) -> tuple[float, float] | None:
    """(requests/s, output tokens/s) within a window in which the load was steady.

    A request counts by the share of its emissions that fell into the window.
    """
    requests = tokens = 0.0
    for record in records:
        if not record.emitted_s:
            continue
        share = sum(from_s <= at_s < to_s for at_s in record.emitted_s) / len(record.emitted_s)
        requests += share
        tokens += share * (record.num_output_tokens or 0)
    if requests == 0:
        return None
    return requests / (to_s - from_s), tokens / (to_s - from_s)


@dataclass(frozen=True, slots=True)
class Probe:
    """One closed loop on the way to the largest concurrency."""

    concurrency: int
    share_met: float
    requests_per_s: float


async def find_concurrency(
    probe: Callable[[int], Awaitable[Probe]], share: float, limit: int
) -> tuple[int | None, list[Probe]]:
    """The largest concurrency at which at least `share` of the requests meet their SLOs.

    Doubles until it fails, then bisects. None when even one request at a time does not meet them.
    """
    probes: list[Probe] = []

    async def is_fine(concurrency: int) -> bool:
        probes.append(await probe(concurrency))
        return probes[-1].share_met >= share

    good, bad = 0, limit + 1
    for doubling in itertools.count():
        concurrency = min(2**doubling, limit)
        if await is_fine(concurrency):
            good = concurrency
            if concurrency == limit:
                break
        else:
            bad = concurrency
            break
    while bad - good > 1:
        middle = (good + bad) // 2
        if await is_fine(middle):
            good = middle
        else:
            bad = middle
    return good or None, probes
