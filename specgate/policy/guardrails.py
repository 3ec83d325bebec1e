"""What a rollout must not do to its users: each guardrail compares the arms batch by batch.

A batch is `batch_samples` requests of each arm from the same stretch of time. What it says about
a guardrail is one number (a difference of the arms' statistics), so load that comes and goes hits
both arms alike and cancels, and requests that resemble their neighbours do not count as many.
Latencies are taken for the size of prompt and answer: the logarithm's residual from a regression
over both arms of the batch together. So the p95 speaks of slow requests and not of long ones. "Typically"
is the geometric mean: it finds a general slow-down with far fewer requests than the p95, which is
there for a tail that gets worse alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specgate.policy.sequential import EventTest, MeanTest

Array = NDArray[np.float64]
MIN_BATCHES = 4  # before anything is concluded
PASS_ERROR_CHANCE = 0.05  # of letting a candidate pass a stage at, or beyond, the limit
_NOISE = 1e-3  # log ratios below 0.1 % are none
_NOISE_S = 1e-3  # nor are waits below 1 ms


class Limits(Protocol):
    """Where each guardrail stands; None: not watched. See `config.rollout.GuardrailsConfig`."""

    @property
    def ttft_ratio(self) -> float | None: ...
    @property
    def tpot_ratio(self) -> float | None: ...
    @property
    def e2e_ratio(self) -> float | None: ...
    @property
    def ttft_p95_ratio(self) -> float | None: ...
    @property
    def tpot_p95_ratio(self) -> float | None: ...
    @property
    def e2e_p95_ratio(self) -> float | None: ...
    @property
    def error_ratio(self) -> float | None: ...
    @property
    def acceptance_ratio(self) -> float | None: ...
    @property
    def queue_wait_p95_ms(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class ArmSample:
    """What a finished request says about its arm. None where it says nothing."""

    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    queue_wait_s: float | None = None
    num_accepted: int = 0
    num_reached: int = 0  # draft tokens that verification came to
    is_error: bool = False


Samples = Sequence[ArmSample]
Statistic = Callable[[Samples, Samples], float | None]


@dataclass(slots=True)
class Guardrail:
    """One comparison. `is_due`: a stage is passed only once it is shown to be kept."""

    name: str
    unit: str
    limit: float  # as configured
    test: MeanTest
    statistic: Statistic
    is_due: bool
    is_floor: bool = False  # worse is less

    def add(self, candidate: Samples, control: Samples) -> None:
        """One batch."""
        value = self.statistic(candidate, control)
        if value is not None:
            self.test.add(value)

    def is_broken(self, alpha: float) -> bool:
        """Worse than tolerated, beyond doubt."""
        if self.test.num < MIN_BATCHES:
            return False
        return self.test.is_below(alpha) if self.is_floor else self.test.is_above(alpha)

    def is_kept(self) -> bool:
        """Within what is tolerated, beyond doubt."""
        return self.test.num >= MIN_BATCHES and self.test.is_below(PASS_ERROR_CHANCE)

    @property
    def reading(self) -> float | None:
        """In the guardrail's unit."""
        if not self.test.num:
            return None
        return self.test.mean * 1e3 if self.unit == "ms" else math.exp(self.test.mean)

    def describe(self, alpha: float) -> dict[str, Any]:
        """For /admin/state."""
        broken, kept = self.is_broken(alpha), self.is_due and self.is_kept()
        return {
            "guardrail": self.name,
            "reading": self.reading,
            "limit": self.limit,
            "unit": self.unit,
            "num_batches": self.test.num,
            "log_evidence": self.test.log_evidence,
            "verdict": "broken" if broken else "kept" if kept else "open",
        }


_LATENCIES: tuple[tuple[str, Callable[[ArmSample], float | None], bool], ...] = (
    ("ttft", lambda sample: sample.ttft_s, False),
    ("tpot", lambda sample: sample.tpot_s, True),
    ("e2e", lambda sample: sample.e2e_s, True),
)
"""Name, value, and whether the answer's size is taken into account beside the prompt's."""


def make_guardrails(limits: Limits) -> list[Guardrail]:
    """Those that are watched, but for the errors (see `make_error_test`)."""

    rails = []
    for quantity, of, by_answer in _LATENCIES:
        residuals = _Residuals(of, by_answer)
        for name, statistic in ((f"{quantity}_ratio", _typical), (f"{quantity}_p95_ratio", _p95)):
            limit = getattr(limits, name)
            if limit is not None:
                test = MeanTest(math.log(limit), _NOISE)
                compare = partial(residuals.log_ratio, statistic)
                rails.append(Guardrail(name, "ratio", limit, test, compare, is_due=True))
    if (floor := limits.acceptance_ratio) is not None:
        test = MeanTest(math.log(floor), _NOISE)
        rails.append(
            Guardrail("acceptance_ratio", "ratio", floor, test, _acceptance_log_ratio, False, is_floor=True)
        )
    if (wait := limits.queue_wait_p95_ms) is not None:
        rails.append(
            Guardrail(
                "queue_wait_p95_ms", "ms", wait, MeanTest(wait / 1e3, _NOISE_S), _wait_difference, False
            )
        )
    return rails


def make_error_test(limits: Limits) -> EventTest | None:
    """None: errors are not watched."""
    return None if limits.error_ratio is None else EventTest(limits.error_ratio)


class _Residuals:
    """One latency of a batch's requests, for their size: logarithms left by the regression.

    Typical value and p95 ask for the same batch one after the other; it is computed once.
    """

    def __init__(self, of: Callable[[ArmSample], float | None], by_answer: bool) -> None:
        self._of = of
        self._by_answer = by_answer
        self._batch: tuple[Samples, Samples] = ((), ())
        self._found: tuple[Array, Array] | None = None

    def log_ratio(
        self, statistic: Callable[[Array], float], candidate: Samples, control: Samples
    ) -> float | None:
        """Of the arms' statistics. None where less than half of a batch has the quantity."""
        if self._batch[0] is not candidate or self._batch[1] is not control:
            self._batch, self._found = (candidate, control), self._compute(candidate, control)
        if self._found is None:
            return None
        return statistic(self._found[0]) - statistic(self._found[1])

    def _compute(self, candidate: Samples, control: Samples) -> tuple[Array, Array] | None:
        rows: list[tuple[float, ...]] = []
        values: list[float] = []
        counts = []
        for samples in (candidate, control):
            before = len(values)
            for sample in samples:
                value = self._of(sample)
                if value is not None and value > 0:
                    sizes = (sample.num_prompt_tokens, sample.num_output_tokens)
                    rows.append(sizes if self._by_answer else sizes[:1])
                    values.append(value)
            counts.append(len(values) - before)
        if min(counts) < len(candidate) // 2:
            return None
        residuals = _residuals(np.log1p(np.array(rows, dtype=np.float64)), np.log(np.array(values)))
        return residuals[: counts[0]], residuals[counts[0] :]


def _residuals(rows: Array, values: Array) -> Array:
    """What a least-squares fit leaves. A whiff of ridge keeps constant columns harmless."""
    centred = rows - rows.mean(axis=0)
    gram = centred.T @ centred + 1e-6 * np.eye(rows.shape[1])
    slopes: Array = np.linalg.solve(gram, centred.T @ (values - values.mean()))
    left: Array = values - centred @ slopes
    return left


def _typical(values: Array) -> float:
    return float(values.mean())


def _p95(values: Array) -> float:
    """Median-unbiased (Hyndman and Fan 1996, type 8)."""
    ordered = np.sort(values)
    place = (len(ordered) + 1 / 3) * 0.95 + 1 / 3 - 1
    low = min(len(ordered) - 1, max(0, math.floor(place)))
    high = min(len(ordered) - 1, low + 1)
    return float(ordered[low] + (place - low) * (ordered[high] - ordered[low]))


def _acceptance_log_ratio(candidate: Samples, control: Samples) -> float | None:
    """None where an arm hardly drafted: then there is nothing to compare."""
    shares = []
    for samples in (candidate, control):
        reached = sum(sample.num_reached for sample in samples)
        accepted = sum(sample.num_accepted for sample in samples)
        if reached < len(samples):
            return None
        shares.append((accepted + 0.5) / (reached + 1))
    return math.log(shares[0] / shares[1])


def _wait_difference(candidate: Samples, control: Samples) -> float | None:
    waits = [[s.queue_wait_s for s in arm if s.queue_wait_s is not None] for arm in (candidate, control)]
    if not all(waits):
        return None
    return _p95(np.array(waits[0])) - _p95(np.array(waits[1]))
