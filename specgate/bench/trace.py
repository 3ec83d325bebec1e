"""Load traces: JSON lines of `arrival_s`, `input_tokens`, `output_tokens`."""

from __future__ import annotations

import bisect
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specgate.bench.client import BenchError
from specgate.bench.workload import Pool, Prompt

_NEAREST = 4  # prompts of about the right length, one of which is taken
_CHARS_PER_TOKEN = 4  # where a prompt's tokens were not counted


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; seconds since the first."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


def load_trace(path: Path) -> list[TraceRow]:
    """The rows in order of arrival. Raises BenchError naming the line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read the trace {path}: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found = TraceRow(float(row["arrival_s"]), int(row["input_tokens"]), int(row["output_tokens"]))
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(
                f"{path}:{number} is no trace row: it needs arrival_s, input_tokens and output_tokens"
            ) from error
        if not math.isfinite(found.arrival_s) or min(found.input_tokens, found.output_tokens) < 0:
            raise BenchError(f"{path}:{number}: arrival_s must be a number, lengths must not be negative")
        rows.append(found)
    if not rows:
        raise BenchError(f"the trace {path} is empty")
    return sorted(rows, key=lambda row: row.arrival_s)


def shaped_arrivals(
    trace: Sequence[TraceRow], rate: float, duration_s: float, rng: random.Random
) -> list[float]:
    """Arrivals at `rate` on average, as bursty as a random stretch of the trace with as many requests."""
    num = max(1, min(round(rate * duration_s), len(trace) - 1))
    first = rng.randrange(len(trace) - num)
    times = [row.arrival_s for row in trace[first : first + num + 1]]
    span_s = (times[-1] - times[0]) or 1.0
    return [(at_s - times[0]) / span_s * duration_s for at_s in times[:-1]]


class LengthPicker:
    """Finds a prompt of about a wanted length."""

    def __init__(self, pool: Pool) -> None:
        self._prompts = sorted(pool.prompts, key=num_tokens)
        self._lengths = [num_tokens(prompt) for prompt in self._prompts]

    def pick(self, wanted: int, rng: random.Random) -> Prompt:
        """One of the `_NEAREST` prompts whose lengths are nearest to `wanted` tokens."""
        at = bisect.bisect_left(self._lengths, wanted)
        around = range(max(0, at - _NEAREST), min(len(self._prompts), at + _NEAREST))
        near = sorted(around, key=lambda index: abs(self._lengths[index] - wanted))[:_NEAREST]
        return self._prompts[rng.choice(near)]


def num_tokens(prompt: Prompt) -> int:
    """As counted in the file, else a guess from the number of characters."""
    if prompt.num_tokens is not None:
        return prompt.num_tokens
    return len(json.dumps(prompt.body, ensure_ascii=False)) // _CHARS_PER_TOKEN
