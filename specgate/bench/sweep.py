"""`bench sweep`: arms x rates, the same requests at the same moments for each arm.

Rates are fractions of the baseline's measured capacity. Every cell is cut into short slices; a
slice runs under one arm after the other, in an order that rotates, before the next cell's slice
does, so that a machine that drifts does it to all alike. Each slice starts from an idle server
and ends when its last answer has come. Each repeat of everything starts new servers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specgate.bench.capacity import Capacity
from specgate.bench.progress import Meter
from specgate.bench.runner import Cell, Measured, Slice
from specgate.bench.setting import Bench, Options, measure_anew
from specgate.bench.workload import Asking, make_jobs, poisson_arrivals
from specgate.clock import Clock


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is swept. `duration_s` is the time of each arm at each rate, per repeat."""

    fractions: tuple[float, ...] = (0.2, 0.5, 0.8, 1.1)
    duration_s: float = 60.0
    slice_s: float = 15.0
    repeats: int = 1

    def slice_lengths(self) -> list[float]:
        """The duration in equal parts of about `slice_s`."""
        num = max(1, round(self.duration_s / self.slice_s))
        return [self.duration_s / num] * num


async def run_sweep(
    options: Options, sweep: Sweep, clock: Clock, meter: Meter
) -> tuple[dict[str, Any], Measured]:
    """Start, warm up, measure the capacity, sweep. The report's document, and every request."""
    capacity: Capacity | None = None  # of the first servers: rates are the same in all repeats

    async def measure(bench: Bench, repeat: int) -> Measured:
        nonlocal capacity
        capacity = capacity or await bench.measure_capacity()
        return await bench.measure(list(plan_slices(bench, sweep, capacity.requests_per_s, repeat)), repeat)

    found = await measure_anew(options, sweep.repeats, clock, meter, measure)
    assert capacity is not None
    document = found.report(
        "sweep",
        capacity=capacity.as_dict(),
        fractions=list(sweep.fractions),
        duration_s=sweep.duration_s,
        slice_s=sweep.slice_lengths()[0],
    )
    return document, found.measured


def plan_slices(bench: Bench, sweep: Sweep, capacity: float, repeat: int = 0) -> Iterator[Slice]:
    """A repeat's slices in the order they are run. Nothing in them depends on the arm."""
    for number, length_s in enumerate(sweep.slice_lengths()):
        for asking in bench.options.askings():
            for fraction in sweep.fractions:
                cell = _cell(asking, fraction, capacity)
                name = f"{cell.name}/{repeat}.{number}"
                yield _slice(bench, cell, name, length_s, asking)


def _cell(asking: Asking, fraction: float, capacity: float) -> Cell:
    return Cell(
        name=f"{asking.sampling} at {fraction:g} of capacity",
        sampling=asking.sampling,
        rate=fraction * capacity,
        fraction=fraction,
    )


def _slice(bench: Bench, cell: Cell, name: str, length_s: float, asking: Asking) -> Slice:
    assert cell.rate is not None
    rng = random.Random(f"{bench.options.seed} {name}")
    arrivals = poisson_arrivals(cell.rate, length_s, rng)
    jobs = make_jobs(name, arrivals, bench.pool.draw(rng), asking)
    return Slice(cell, name, length_s, jobs)
