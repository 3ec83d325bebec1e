"""What `run`, `sweep` and `replay` have in common: servers, prompts, warm-up, measuring, writing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.types import BASELINE
from specgate.bench.capacity import Capacity, Slo, endless_jobs, measure_capacity
from specgate.bench.client import BenchError, Client
from specgate.bench.fleet import AUTO, DRAFT, Fleet, ServerOptions, open_fleet
from specgate.bench.meta import describe
from specgate.bench.progress import Meter
from specgate.bench.report import build_report, latency_model
from specgate.bench.runner import Measured, Slice, ask_all, run_slices, warm_up
from specgate.bench.stats import mean
from specgate.bench.workload import Asking, Choice, Pool, load_pool
from specgate.clock import Clock


@dataclass(frozen=True, slots=True)
class Options:
    """The options all benches share."""

    arms: tuple[str, ...]
    server: ServerOptions = field(default_factory=ServerOptions)
    data: Path | None = None
    choice: Choice = field(default_factory=Choice)
    asking: Asking = field(default_factory=Asking)
    samplings: tuple[str, ...] = ("greedy",)
    slo: Slo = field(default_factory=Slo)
    warmup_s: float = 8.0
    capacity: float | None = None  # requests/s; None: measured
    capacity_s: float = 15.0
    concurrencies: tuple[int, ...] = (8, 16, 32)
    seed: int = 0

    def askings(self) -> list[Asking]:
        """One for each sampling setting."""
        return [replace(self.asking, sampling=name) for name in self.samplings]


@dataclass(frozen=True, slots=True)
class Bench:
    """A warm fleet with its prompts, ready to be measured."""

    options: Options
    fleet: Fleet
    pool: Pool
    meta: dict[str, Any]
    meter: Meter
    clock: Clock

    async def measure_capacity(self) -> Capacity:
        """Of the baseline arm (of the only arm, where there is no baseline), unless it was given."""
        options = self.options
        if options.capacity is not None:
            return Capacity(options.capacity, None, None)
        client = self.fleet.clients.get(BASELINE) or next(iter(self.fleet.clients.values()))
        self.meter.say(f"measuring the capacity of {client.arm}")
        jobs = endless_jobs("capacity", self.pool, options.askings()[0], options.seed)
        return await measure_capacity(client, jobs, options.concurrencies, options.capacity_s)

    async def measure(self, slices: Sequence[Slice], repeat: int = 0) -> Measured:
        """Run all slices under all arms, with progress."""
        num_arms = len(self.fleet.clients)
        started_s, cpu_s = self.clock.monotonic(), _cpu_s()
        self.meter.begin(sum(piece.duration_s for piece in slices) * num_arms)

        told: list[Slice] = []

        def on_turn(piece: Slice, arm: str, seconds: float) -> None:
            done_s = piece.duration_s
            if self.fleet.lockstep:  # the arms of a slice end together
                done_s = 0.0 if piece in told[-1:] else done_s * num_arms
                told.append(piece)
            self.meter.advance(done_s, f"{piece.cell.name}: {arm} took {seconds:.0f} s")

        measured = await run_slices(slices, self.fleet.clients, on_turn, self.fleet.lockstep, repeat)
        passed_s = self.clock.monotonic() - started_s
        self.meta["client_cpu_share"] = round((_cpu_s() - cpu_s) / passed_s, 4) if passed_s > 0 else None
        return measured

    async def report(self, kind: str, measured: Measured, **meta: Any) -> dict[str, Any]:
        """The report's document, with what the servers say of their latency model."""
        document = build_report(kind, {**self.meta, **meta}, measured, self.fleet.arms, self.options.slo)
        return document | {"latency_model": await latency_model(self.fleet)}


@dataclass(frozen=True, slots=True)
class Repeated:
    """What was measured on one fleet after another."""

    options: Options
    arms: tuple[str, ...]
    meta: Mapping[str, Any]  # of the first, but for notes and load of the client: those of all
    measured: Measured
    latency_models: tuple[Mapping[str, Any], ...]

    def report(self, kind: str, **meta: Any) -> dict[str, Any]:
        """The report's document. The latency model is the last one, its scores the means over all."""
        meta = {**self.meta, **meta, "repeats": len(self.latency_models)}
        document = build_report(kind, meta, self.measured, self.arms, self.options.slo)
        found = {name: [model[name] for model in self.latency_models] for name in ("r2", "mape")}
        means = {name: mean([v for v in values if v is not None]) for name, values in found.items()}
        return document | {"latency_model": {**self.latency_models[-1], **means, "by_repeat": found}}


async def measure_anew(
    options: Options,
    repeats: int,
    clock: Clock,
    meter: Meter,
    measure: Callable[[Bench, int], Awaitable[Measured]],
) -> Repeated:
    """`measure` each repeat on servers started for it: equal servers differ by a percent or two from one
    start to the next, and by much more in latency past saturation. (A server at a URL stays the same.)"""
    first: Bench | None = None
    parts: list[Measured] = []
    models: list[Mapping[str, Any]] = []
    metas: list[dict[str, Any]] = []
    for number in range(repeats):
        if repeats > 1:
            meter.say(f"repeat {number + 1} of {repeats}")
        async with open_bench(options, clock, meter) as bench:
            first = first or bench
            parts.append((await measure(bench, number)).of_repeat(number))
            models.append(await latency_model(bench.fleet))
            metas.append(bench.meta)
    assert first is not None
    shares = [share for meta in metas if (share := meta.get("client_cpu_share")) is not None]
    meta = {
        **first.meta,
        "notes": list(dict.fromkeys(note for meta in metas for note in meta.get("notes", ()))),
        "client_cpu_share": max(shares, default=None),
    }
    return Repeated(options, first.fleet.arms, meta, Measured.joined(parts), tuple(models))


def _cpu_s() -> float:
    """CPU time of this process, the load generator, in seconds."""
    times = os.times()
    return times.user + times.system


@contextlib.asynccontextmanager
async def open_bench(options: Options, clock: Clock, meter: Meter) -> AsyncIterator[Bench]:
    """Start the servers, load the prompts, warm up. Raises BenchError."""
    async with open_fleet(options.server, options.arms, clock, meter.say) as fleet:
        pool = load_pool(options.data, options.choice, fleet.max_model_len, options.asking.max_tokens)
        meta = await describe(fleet, options.server, options.data, options.samplings)
        meta |= {
            "seed": options.seed,
            "max_tokens": options.asking.max_tokens,
            "ignore_eos": options.asking.ignore_eos,
            "prompts": {task: len(prompts) for task, prompts in pool.by_task.items()},
            "slo": {"ttft_ms": options.slo.ttft_ms, "tpot_ms": options.slo.tpot_ms},
        }
        bench = Bench(options, fleet, pool, meta, meter, clock)
        await _warm(bench)
        yield bench


async def _warm(bench: Bench) -> None:
    options, fleet = bench.options, bench.fleet
    for arm, client in fleet.clients.items():
        if options.server.imposed:
            bench.meter.say(f"{arm}: reading the answers whose acceptance will be imposed")
            await _read_all(client, bench, {})
        else:
            bench.meter.say(f"{arm}: reading the prompts")
            await _read_all(client, bench, {"max_tokens": 1})
        bench.meter.say(f"warming up {arm}")
        jobs = endless_jobs("warm-up", bench.pool, options.askings()[0], options.seed)
        records = await warm_up(client, jobs, options.warmup_s)
        if records and not any(record.is_ok for record in records):
            raise BenchError(f"every request of the warm-up of {arm} failed: {records[0].error}")


async def _read_all(client: Client, bench: Bench, extra: Mapping[str, Any]) -> None:
    """Every arm hears every prompt once, so that prefix caches are equally warm and past outputs equally
    known. A drafter of imposed acceptance drafts nothing when it hears an answer for the first time:
    of that nothing is learned."""
    options, reader = bench.options, client
    if options.server.imposed:
        reader = client.under(DRAFT if client.arm in (AUTO, DRAFT) else client.arm)
    extra = {"specgate": {"learn": False}, **extra} if bench.fleet.is_specgate else extra
    for record in await ask_all(reader, bench.pool, options.askings(), extra):
        if not record.is_ok:
            raise BenchError(f"the prompt {record.prompt_id} cannot be read: {record.error}")
