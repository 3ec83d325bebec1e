"""`bench run`: one arm at a fixed concurrency or a Poisson rate, or its largest concurrency within SLOs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specgate.bench.capacity import Probe, endless_jobs, find_concurrency
from specgate.bench.load import closed_loop
from specgate.bench.progress import Meter
from specgate.bench.record import Record, read_answer
from specgate.bench.runner import Cell, Measured, Sample, Slice, Turn
from specgate.bench.setting import Bench, Options, open_bench
from specgate.bench.workload import make_jobs, poisson_arrivals
from specgate.clock import Clock

MAX_CONCURRENCY = 512


@dataclass(frozen=True, slots=True)
class Single:
    """One load. `rate` None means a closed loop of `concurrency`."""

    concurrency: int = 1
    rate: float | None = None
    duration_s: float = 30.0
    is_search: bool = False  # look for the largest concurrency that meets the SLOs
    slo_share: float = 0.95  # of the requests that must meet them
    max_concurrency: int = 64


async def run_single(
    options: Options, load: Single, clock: Clock, meter: Meter
) -> tuple[dict[str, Any], Measured]:
    """The report's document, and every request. One row per sampling setting (or per probe)."""
    async with open_bench(options, clock, meter) as bench:
        found: dict[str, Any] = {}
        if load.is_search:
            found, measured = await _search(bench, load)
        elif load.rate is not None:
            measured = await bench.measure(_poisson(bench, load, load.rate))
        else:
            measured = Measured.joined(
                [await _closed(bench, load, load.concurrency, i) for i in range(len(options.samplings))]
            )
        return await bench.report("run", measured, load=asdict(load), **found), measured


def _poisson(bench: Bench, load: Single, rate: float) -> list[Slice]:
    out = []
    for asking in bench.options.askings():
        cell = Cell(f"{asking.sampling} at {rate:g} requests/s", asking.sampling, rate)
        rng = random.Random(f"{bench.options.seed} {cell.name}")
        jobs = make_jobs(
            cell.name, poisson_arrivals(rate, load.duration_s, rng), bench.pool.draw(rng), asking
        )
        out.append(Slice(cell, cell.name, load.duration_s, jobs))
    return out


async def _closed(bench: Bench, load: Single, concurrency: int, sampling: int) -> Measured:
    asking = bench.options.askings()[sampling]
    (client,) = bench.fleet.clients.values()
    cell = Cell(f"{asking.sampling}, {concurrency} at a time", asking.sampling)
    bench.meter.say(f"{client.arm}: {cell.name}")
    jobs = endless_jobs(cell.name, bench.pool, asking, bench.options.seed)
    started_s = bench.clock.monotonic()
    answers = await closed_loop(
        jobs, client.ask, bench.clock, concurrency=concurrency, duration_s=load.duration_s
    )
    seconds = bench.clock.monotonic() - started_s
    records = [read_answer(answer, client.arm) for answer in answers]
    samples = tuple(Sample(cell, cell.name, record) for record in records)
    return Measured(samples, (Turn(cell, client.arm, seconds),))


async def _search(bench: Bench, load: Single) -> tuple[dict[str, Any], Measured]:
    slo = bench.options.slo
    parts: list[Measured] = []

    async def probe(concurrency: int) -> Probe:
        part = await _closed(bench, load, concurrency, 0)
        parts.append(part)
        records: Sequence[Record] = [sample.record for sample in part.samples]
        num_met = sum(slo.is_met(record) for record in records)
        return Probe(concurrency, num_met / max(1, len(records)), len(records) / part.turns[0].seconds)

    largest, probes = await find_concurrency(
        probe, load.slo_share, min(load.max_concurrency, MAX_CONCURRENCY)
    )
    found = {"largest_concurrency": largest, "probes": [asdict(probe) for probe in probes]}
    in_order = sorted(zip(probes, parts, strict=True), key=lambda pair: pair[0].concurrency)
    return found, Measured.joined([part for _, part in in_order])
