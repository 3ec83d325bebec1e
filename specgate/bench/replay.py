"""`bench replay`: a trace, or a workload that shifts from minute to minute, under every arm.

Each window (a minute, unless told otherwise) runs under one arm after the other before the next
window does. A window is a cell of the report; the geometric mean over windows is what counts, so
that one overloaded minute does not decide.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from specgate.bench.capacity import Capacity
from specgate.bench.client import BenchError
from specgate.bench.progress import Meter
from specgate.bench.record import Job
from specgate.bench.runner import Cell, Measured, Slice
from specgate.bench.setting import Bench, Options, measure_anew
from specgate.bench.trace import LengthPicker, TraceRow, load_trace, shaped_arrivals
from specgate.bench.workload import make_job, make_jobs, poisson_arrivals
from specgate.clock import Clock
from specgate.types import TASKS


@dataclass(frozen=True, slots=True)
class Replay:
    """A stretch of a trace. Seconds are those of the replay, after stretching."""

    trace: Path
    stretch: float = 1.0  # 4 replays four times slower
    start_s: float = 0.0
    duration_s: float = 300.0
    window_s: float = 60.0
    max_output_tokens: int = 64
    jitter_s: float = 0.0  # for traces whose arrivals come in steps
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a shifting workload: rate as a share of the baseline's capacity, weights of tasks."""

    rate: float
    tasks: Mapping[str, float]

    def describe(self) -> str:
        return ", ".join(f"{task} {weight:g}" for task, weight in self.tasks.items())


@dataclass(frozen=True, slots=True)
class Shift:
    """A workload that changes with every segment. `trace` gives arrivals their bursts."""

    segments: tuple[Segment, ...]
    segment_s: float = 60.0
    trace: Path | None = None
    repeats: int = 1


def load_shift(path: Path | None) -> Shift:
    """A schedule from YAML; None: the shipped one. Raises BenchError saying what is wrong."""
    name = "the shipped schedule" if path is None else str(path)
    try:
        if path is None:
            text = resources.files("specgate.bench").joinpath("shift.yaml").read_text(encoding="utf-8")
        else:
            text = path.read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BenchError(f"cannot read the schedule {name}: {error}") from error
    if not isinstance(document, dict) or set(document) - {"segments", "segment_s"}:
        raise BenchError(f"{name}: a schedule has `segments` and `segment_s`, and no other keys")
    entries = document.get("segments")
    if not isinstance(entries, list) or not entries:
        raise BenchError(f"{name}: `segments` must be a list with at least one segment")
    segments = tuple(_segment(entry, f"{name}: segments.{number}") for number, entry in enumerate(entries))
    return Shift(segments, _positive(document.get("segment_s", 60), f"{name}: segment_s"))


def _segment(entry: Any, where: str) -> Segment:
    if not isinstance(entry, dict) or set(entry) != {"rate", "tasks"}:
        raise BenchError(f"{where}: a segment has `rate` and `tasks`, and no other keys")
    tasks = entry["tasks"]
    if not isinstance(tasks, dict) or not tasks:
        raise BenchError(f"{where}.tasks: must map tasks to weights")
    for task in tasks:
        if task not in TASKS:
            raise BenchError(f"{where}.tasks: {task!r} is none of {', '.join(TASKS)}")
    weights = {task: _positive(weight, f"{where}.tasks.{task}") for task, weight in tasks.items()}
    return Segment(_positive(entry["rate"], f"{where}.rate"), weights)


def _positive(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise BenchError(f"{where}: is {value!r}; must be a number above 0")
    return float(value)


async def run_replay(
    options: Options, replay: Replay, clock: Clock, meter: Meter
) -> tuple[dict[str, Any], Measured]:
    """The report's document, and every request."""
    trace = load_trace(replay.trace)
    # Lengths are the trace's, so answers must not end by themselves; a drafter of imposed
    # acceptance has to learn the longest.
    asking = replace(options.asking, max_tokens=replay.max_output_tokens, ignore_eos=True)
    options = replace(options, asking=asking)

    async def measure(bench: Bench, repeat: int) -> Measured:
        return await bench.measure(list(_trace_slices(bench, replay, trace, repeat)), repeat)

    found = await measure_anew(options, replay.repeats, clock, meter, measure)
    what = {
        "file": replay.trace.name,
        "stretch": replay.stretch,
        "start_s": replay.start_s,
        "duration_s": replay.duration_s,
        "window_s": replay.window_s,
        "repeats": replay.repeats,
    }
    return found.report("replay", trace=what), found.measured


def _trace_slices(bench: Bench, replay: Replay, trace: Sequence[TraceRow], repeat: int) -> Iterator[Slice]:
    picker = LengthPicker(bench.pool)
    rng = random.Random(f"trace {bench.options.seed}")
    windows: dict[int, list[Job]] = {}
    origin_s = trace[0].arrival_s
    for number, row in enumerate(trace):
        at_s = (row.arrival_s - origin_s) * replay.stretch - replay.start_s
        at_s += rng.uniform(0.0, replay.jitter_s)
        if not 0 <= at_s < replay.duration_s:
            continue
        window, offset_s = divmod(at_s, replay.window_s)
        num_out = max(1, min(row.output_tokens, replay.max_output_tokens))
        asking = replace(bench.options.askings()[0], max_tokens=num_out)
        job = make_job(f"trace/{number}", picker.pick(row.input_tokens, rng), asking, offset_s)
        windows.setdefault(int(window), []).append(job)
    if not windows:
        raise BenchError("no request of the trace falls into the time replayed: see --start, --stretch")
    sampling = bench.options.samplings[0]
    for window, jobs in sorted(windows.items()):
        length_s = min(replay.window_s, replay.duration_s - window * replay.window_s)
        cell = Cell(f"window {window + 1}", sampling, len(jobs) / length_s, segment=window)
        named = tuple(replace(job, id=f"{repeat}/{job.id}") for job in jobs)
        yield Slice(cell, f"{cell.name}/{repeat}", length_s, named)


async def run_shift(
    options: Options, shift: Shift, clock: Clock, meter: Meter
) -> tuple[dict[str, Any], Measured]:
    """The report's document, and every request. Rates follow from the measured capacity."""
    trace = None if shift.trace is None else load_trace(shift.trace)
    if trace is not None and len(trace) < 2:
        raise BenchError(f"the trace {shift.trace} has a single request: no burst can be read from it")
    capacity: Capacity | None = None

    async def measure(bench: Bench, repeat: int) -> Measured:
        nonlocal capacity
        for number, segment in enumerate(shift.segments):
            if not set(segment.tasks) & set(bench.pool.by_task):
                raise BenchError(f"no prompt for segment {number + 1}: none of {', '.join(segment.tasks)}")
        named = {task for segment in shift.segments for task in segment.tasks}
        if missing := sorted(named - set(bench.pool.by_task)):
            bench.meta["notes"].append(f"Left out of the schedule for want of prompts: {', '.join(missing)}.")
        capacity = capacity or await bench.measure_capacity()
        slices = _shift_slices(bench, shift, trace, capacity.requests_per_s, repeat)
        return await bench.measure(list(slices), repeat)

    found = await measure_anew(options, shift.repeats, clock, meter, measure)
    assert capacity is not None
    document = found.report(
        "shift",
        capacity=capacity.as_dict(),
        segments=[{"rate": s.rate, "tasks": dict(s.tasks)} for s in shift.segments],
        segment_s=shift.segment_s,
        trace=None if shift.trace is None else shift.trace.name,
    )
    return document, found.measured


def _shift_slices(
    bench: Bench, shift: Shift, trace: Sequence[TraceRow] | None, capacity: float, repeat: int
) -> Iterator[Slice]:
    asking = bench.options.askings()[0]
    for number, segment in enumerate(shift.segments):
        rate = segment.rate * capacity
        cell = Cell(f"segment {number + 1}", asking.sampling, rate, segment=number, tasks=segment.describe())
        name = f"{cell.name}/{repeat}"
        rng = random.Random(f"{bench.options.seed} {name}")
        if trace is None:
            arrivals = poisson_arrivals(rate, shift.segment_s, rng)
        else:
            arrivals = shaped_arrivals(trace, rate, shift.segment_s, rng)
        jobs = make_jobs(name, arrivals, bench.pool.draw(rng, segment.tasks), asking)
        yield Slice(cell, name, shift.segment_s, jobs)
