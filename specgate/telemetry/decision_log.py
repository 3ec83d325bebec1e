"""Every decision with its inputs and outcome: the last ones in memory, all of them as JSON lines.

No text of prompts or answers. A disk that is full or gone costs lines, never a request.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from engine.types import DeviceUse, SequenceStats
from specgate.clock import Clock
from specgate.config import DecisionLogConfig
from specgate.costs import RequestCost, device_of, saved_steps
from specgate.types import Decision, RequestOutcome, Timings

logger = logging.getLogger(__name__)


CHECK = "consistency_check"  # `kind` of lines that are no decisions


class DecisionLog:
    """A ring in memory and a file that is rotated by size."""

    def __init__(self, config: DecisionLogConfig, clock: Clock) -> None:
        self._clock = clock
        self._ring: deque[dict[str, Any]] = deque()
        self._file: FileIO | None = None
        self.reconfigure(config)
        self._is_broken = False
        self.num_lost = 0  # lines that could not be written

    def add_check(self, model: str, stats: SequenceStats) -> None:
        """A greedy answer that was decoded again: only what it took, and only in the file."""
        if self._path is not None:
            entry = {"time": self._clock.wall(), "kind": CHECK, "model": model, "device": _device((stats,))}
            self._write(self._path, msgspec.json.encode(entry) + b"\n")

    def reconfigure(self, config: DecisionLogConfig) -> None:
        """Other settings from the next line on."""
        self._config = config
        self._ring = deque(self._ring, maxlen=config.ring_size)
        self._path = Path(config.path) if config.path is not None else None
        self.close()

    def add(self, outcome: RequestOutcome, cost: RequestCost | None = None) -> None:
        """A request that was decided, when it ended."""
        entry = {"time": self._clock.wall()} | outcome_entry(outcome, cost)
        self._ring.append(entry)
        if self._path is not None:
            self._write(self._path, msgspec.json.encode(entry) + b"\n")

    def last(self, limit: int, since: float = -math.inf) -> list[dict[str, Any]]:
        """Newest first; those that ended after `since` (Unix seconds)."""
        newest = (self._ring[-1 - i] for i in range(min(limit, len(self._ring))))
        return list(itertools.takewhile(lambda entry: entry["time"] > since, newest))

    def close(self) -> None:
        """Close the file; `add` would open it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, path: Path, line: bytes) -> None:
        try:
            if self._file is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("ab", buffering=0)
            if self._file.tell() + len(line) > self._config.max_bytes and self._file.tell():
                self._rotate(path)
            start = self._file.tell()
            if self._file.write(line) != len(line):  # the disk filled up within the line
                self._file.truncate(start)
                raise OSError("no space left for a whole line")
            self._is_broken = False
        except OSError as error:
            self.num_lost += 1
            if not self._is_broken:  # say it once, not once a request
                logger.warning("the decision log %s cannot be written: %s", path, error)
            self._is_broken = True
            self.close()

    def _rotate(self, path: Path) -> None:
        self.close()
        numbered = [path.with_name(f"{path.name}.{n}") for n in range(1, self._config.max_files)]
        for older, newer in zip(reversed(numbered), [*reversed(numbered[:-1]), path], strict=False):
            if newer.exists():
                os.replace(newer, older)
        self._file = path.open("ab" if numbered else "wb", buffering=0)


def outcome_entry(outcome: RequestOutcome, cost: RequestCost | None = None) -> dict[str, Any]:
    """One line of the log, for an encoder that knows dataclasses."""
    request, sampling = outcome.request, outcome.request.sampling
    counts = {
        name: sum(getattr(stats, name) for stats in outcome.stats)
        for name in (
            "num_cached_tokens", "num_target_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens",
            "num_preemptions", "draft_s",
        )
    }  # fmt: skip
    return {
        "request_id": request.request_id,
        "model": request.model,
        "endpoint": request.endpoint,
        "tenant": request.tenant,
        "num_answers": request.n * (1 + len(request.more_prompts)),
        "is_stream": request.is_stream,
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "is_seeded": sampling.seed is not None,
            "max_tokens": sampling.max_tokens if request.has_explicit_max_tokens else None,
        },
        **decision_entry(outcome.decision),
        "outcome": outcome.outcome,
        "num_prompt_tokens": outcome.num_prompt_tokens,
        "num_output_tokens": outcome.num_output_tokens,
        "timings": timings_ms(outcome.timings),
        "counts": counts | {"num_target_steps_saved": saved_steps(outcome.stats)} if outcome.stats else None,
        "policy_changes": outcome.policy_changes,
        "device": _device(outcome.stats),
        "costs": cost,
    }


def _device(stats: Sequence[SequenceStats]) -> list[DeviceUse]:
    """By method, all answers together."""
    return list(device_of(stats))


def decision_entry(decision: Decision) -> dict[str, Any]:
    """A decision as /admin/explain shows it, for an encoder that knows dataclasses."""
    return {
        "policy": decision.policy,
        "reason": decision.reason,
        "num_speculative_tokens": decision.num_speculative_tokens,
        "arm": decision.arm,
        "rollout": decision.rollout,
        "shadow": decision.shadow,
        "task": decision.task.label,
        "task_probabilities": {t: round(p, 4) for t, p in decision.task.probabilities.items()},
        "output_tokens": {"p50": decision.length.p50, "p90": decision.length.p90},
        "load": decision.load,
        "predicted": decision.predicted,
        "candidates": [
            {
                "policy": candidate.policy,
                "num_speculative_tokens": candidate.num_speculative_tokens,
                "allowed": candidate.is_allowed,
                "why_not": candidate.why_not,
                "predicted": candidate.predicted,
                "terms": candidate.terms,
            }
            for candidate in decision.candidates
        ],
    }


def timings_ms(timings: Timings) -> dict[str, float | None]:
    """Milliseconds, to the microsecond."""

    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1e3, 3)

    return {
        "queue_wait_ms": ms(timings.queue_wait_s),
        "ttft_ms": ms(timings.ttft_s),
        "tpot_ms": ms(timings.tpot_s),
        "e2e_ms": ms(timings.e2e_s),
    }
