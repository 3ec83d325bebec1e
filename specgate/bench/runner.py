"""Runs slices of load under every arm in turn, so that a drifting machine hits all alike."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specgate.bench.client import Client
from specgate.bench.load import closed_loop, open_loop
from specgate.bench.lockstep import Lockstep
from specgate.bench.record import Job, Record, read_answer
from specgate.bench.workload import Asking, Pool, make_job

WARM_CONCURRENCY = 4


@dataclass(frozen=True, slots=True)
class Cell:
    """A setting under which arms are compared: one column of the report."""

    name: str  # unique
    sampling: str
    rate: float | None = None  # requests/s; None for a closed loop
    fraction: float | None = None  # of the measured baseline capacity
    segment: int | None = None  # of a shifting workload or a trace
    tasks: str | None = None  # a word on the mix, where it differs between cells


@dataclass(frozen=True, slots=True)
class Slice:
    """A few seconds of a cell: the same jobs under every arm, each from an idle server."""

    cell: Cell
    name: str
    duration_s: float
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A record with the slice it comes from."""

    cell: Cell
    slice_name: str
    record: Record
    repeat: int = 0  # of everything, with servers started anew


@dataclass(frozen=True, slots=True)
class Turn:
    """One arm's run of one slice: how long it took, for throughput."""

    cell: Cell
    arm: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """All that was measured."""

    samples: tuple[Sample, ...]
    turns: tuple[Turn, ...]

    def cells(self) -> tuple[Cell, ...]:
        """In order of first appearance."""
        return tuple(dict.fromkeys(turn.cell for turn in self.turns))

    @classmethod
    def joined(cls, parts: Sequence[Measured]) -> Measured:
        """All of them, in order."""
        return cls(
            tuple(sample for part in parts for sample in part.samples),
            tuple(turn for part in parts for turn in part.turns),
        )

    def of_repeat(self, number: int) -> Measured:
        """The same, marked as that repeat's."""
        return replace(self, samples=tuple(replace(sample, repeat=number) for sample in self.samples))


def rotated(arms: Sequence[str], by: int) -> list[str]:
    """The arms in an order that starts with another one each time."""
    at = by % len(arms)
    return [*arms[at:], *arms[:at]]


async def run_slices(
    slices: Sequence[Slice],
    clients: Mapping[str, Client],
    on_turn: Callable[[Slice, str, float], object],
    lockstep: Lockstep | None = None,
    first: int = 0,
) -> Measured:
    """Every slice under every arm, one at a time or in lockstep. `on_turn` hears slice, arm and seconds
    after each. `first`: which arm begins."""
    samples: list[Sample] = []
    turns: list[Turn] = []
    for number, piece in enumerate(slices, start=first):

        async def run(arm: str, piece: Slice = piece) -> None:
            client = clients[arm]
            started_s = client.clock.monotonic()
            answers = await open_loop(piece.jobs, client.ask, client.clock)
            seconds = client.clock.monotonic() - started_s
            samples.extend(Sample(piece.cell, piece.name, read_answer(answer, arm)) for answer in answers)
            turns.append(Turn(piece.cell, arm, seconds))
            on_turn(piece, arm, seconds)

        arms = rotated(list(clients), number)
        if lockstep is None:
            for arm in arms:
                await run(arm)
        else:
            async with asyncio.TaskGroup() as group:
                running = {arm: group.create_task(run(arm)) for arm in arms}
                await lockstep.take_turns(running)
    return Measured(tuple(samples), tuple(turns))


async def warm_up(client: Client, prompts: Iterator[Job], duration_s: float) -> list[Record]:
    """Requests that do not count. Raises nothing: what fails here will fail again where it counts."""
    answers = await closed_loop(
        prompts, client.ask, client.clock, concurrency=WARM_CONCURRENCY, duration_s=duration_s
    )
    return [read_answer(answer, client.arm) for answer in answers]


async def ask_all(
    client: Client, pool: Pool, askings: Sequence[Asking], extra: Mapping[str, Any]
) -> list[Record]:
    """Every prompt once under every sampling: so a drafter of imposed acceptance learns the texts.
    `extra` goes into each body."""
    jobs = [
        make_job(f"all/{asking.sampling}/{prompt.id}", prompt, asking)
        for asking, prompt in itertools.product(askings, pool.prompts)
    ]
    jobs = [replace(job, body={**job.body, **extra}) for job in jobs]
    answers = await closed_loop(iter(jobs), client.ask, client.clock, concurrency=2 * WARM_CONCURRENCY)
    return [read_answer(answer, client.arm) for answer in answers]
