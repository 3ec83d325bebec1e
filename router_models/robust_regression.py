"""A positive cost as a sum of non-negative parts, learned online from noisy measurements.

`y = exp(pace) * sum_i theta_i * x_i`, theta >= 0, errors relative to y. Around the filter that
follows both (see `least_squares`) stand: a bound to what one outcome can teach (Huber 1964), the
outcomes' own relative spread, a drift test for what the pace cannot follow, which rescales the
model and doubts it, and one knee in one regressor where the data show it to be needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from router_models.base import StateError, finite
from router_models.drift import PageHinkley
from router_models.least_squares import Array, PacedLeastSquares

_FLOOR_S = 1e-7  # nothing measured is shorter
_MIN_SPREAD, _FIRST_SPREAD = 0.01, 0.2
_HUBER = 2.0  # standard deviations beyond which an outcome loses weight
_CHOOSE_EVERY = 16  # outcomes between two looks at the rival knees
_BELIEVED = 3.0  # standard deviations: of a larger miss only as much is learned
_RECENT = 5  # outcomes whose median says how far things drifted
_DOUBT = (
    0.2  # at least, of every coefficient after a drift: not all parts of a step change by the same factor
)


@dataclass(frozen=True, slots=True)
class RegressionSpec:
    """Names and typical sizes of the regressors, and where a knee may lie.

    `names[knee_at]` may bend at one of `knees`; above it the extra regressor `<name>_above` counts.
    """

    names: tuple[str, ...]
    scales: tuple[float, ...]
    knees: tuple[float, ...] = ()
    knee_at: int = 0
    memory: float = 400.0  # outcomes

    @property
    def all_names(self) -> tuple[str, ...]:
        """The regressors, the one above the knee last where a knee is possible."""
        return (*self.names, f"{self.names[self.knee_at]}_above") if self.knees else self.names


class RobustRegression:
    """See the module. `x` is one value per name of the spec; `y` is in seconds and positive."""

    def __init__(self, spec: RegressionSpec) -> None:
        self.spec = spec
        self._rivals: Array = np.array([math.inf, *spec.knees])  # knee of each; none is infinity
        scales = (*spec.scales, spec.scales[spec.knee_at]) if spec.knees else spec.scales
        self._fit = PacedLeastSquares(len(self._rivals), scales, spec.memory)
        self._loss: Array = np.zeros(len(self._rivals))
        self._chosen = 0
        self._variance = _FIRST_SPREAD**2  # around what was predicted
        self._noise = _FIRST_SPREAD**2  # of outcomes themselves
        self._recent: list[float] = []
        self._drift = PageHinkley()
        self.num_outcomes = 0
        self.num_drifts = 0

    @property
    def knee(self) -> float | None:
        """Where the knee lies; None: there is none."""
        return None if self._chosen == 0 else float(self._rivals[self._chosen])

    @property
    def spread(self) -> float:
        """Relative standard deviation of outcomes around predictions."""
        return math.sqrt(max(self._variance, _MIN_SPREAD**2))

    def expand(self, x: Sequence[float], knee: float | None) -> Array:
        """The regressors with the knee applied. [len(all_names)]"""
        if not self.spec.knees:
            return np.asarray(x, dtype=np.float64)
        at = self.spec.knee_at
        top = math.inf if knee is None else knee
        row = np.empty(len(x) + 1)
        row[:-1] = x
        row[at] = min(x[at], top)
        row[-1] = max(x[at] - top, 0.0)
        return row

    def coefficients(self) -> Array:
        """Of the chosen rival, in seconds per unit, at the usual pace. [len(all_names)]"""
        return self._fit.theta(self._chosen)

    def coefficients_now(self) -> Array:
        """The same at the machine's present pace: what predictions are made of."""
        theta: Array = self.coefficients() * math.exp(self._fit.pace(self._chosen))
        return theta

    def predict(self, x: Sequence[float]) -> tuple[float, float]:
        """Mean and standard deviation of y."""
        row = self.expand(x, self.knee)
        mean = float(row @ self.coefficients_now())
        return mean, math.sqrt(self._noise * mean**2 + self._fit.doubt(self._chosen, row))

    def observe(self, x: Sequence[float], y: float) -> None:
        """Take in one outcome. Raises ValueError, unchanged, for values that are no measurement."""
        for name, value in zip(self.spec.names, x, strict=True):
            if finite(name, value) < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if finite("seconds", y) < 0:
            raise ValueError(f"seconds must not be negative, got {y}")
        y = max(y, _FLOOR_S)
        rows = np.stack([self.expand(x, None if math.isinf(k) else float(k)) for k in self._rivals])
        self._fit.update(rows, self._judge(rows, y), math.sqrt(self._noise))
        self.num_outcomes += 1
        if self.num_outcomes % _CHOOSE_EVERY == 0:
            self._choose()

    def _judge(self, rows: Array, y: float) -> Array:
        """Compare with what was predicted by all rivals; returns the outcome, less of it where it is too far
        off to be believed. [rivals] Rescales the model where it has drifted."""
        predicted, doubt = self._fit.expect(rows, y)
        misses = np.log(y / predicted)
        usual = np.sqrt(self._noise + doubt)
        bounded = np.clip(misses, -_BELIEVED * usual, _BELIEVED * usual)
        if self.num_outcomes < 3:
            return np.full(len(rows), y)
        at, first = self._chosen, 1.0 / (self.num_outcomes + 1)
        self._loss += max(0.01, first) * (bounded**2 - self._loss)
        self._variance += max(0.02, first) * (float(bounded[at]) ** 2 - self._variance)
        own = max(float(bounded[at]) ** 2 - float(doubt[at]), _MIN_SPREAD**2)
        self._noise += max(0.02, first) * (own - self._noise)
        self._recent = [*self._recent[1 - _RECENT :], float(misses[at]) + self._fit.pace(at)]
        if self._drift.observe(float(misses[at] / usual[at])):
            self.num_drifts += 1
            size = float(np.median(self._recent))
            self._fit.shift(size, min(max(_DOUBT, abs(size)), 1.0))
            # What was missed before was the model's fault, not the outcomes' own scatter.
            self._noise = min(self._noise, _FIRST_SPREAD**2)
            self._variance = min(self._variance, _FIRST_SPREAD**2)
            predicted, doubt = self._fit.expect(rows, y)
            usual = np.sqrt(self._noise + doubt)
            bounded = np.clip(np.log(y / predicted), -_BELIEVED * usual, _BELIEVED * usual)
        bounded_y: Array = predicted * np.exp(bounded)
        return bounded_y

    def _choose(self) -> None:
        """Take a knee only where it explains clearly more; leave it only for a clear gain."""
        if len(self._rivals) == 1 or self.num_outcomes < 64:
            return
        best = int(self._loss.argmin())
        if self._loss[best] < 0.85 * self._loss[self._chosen]:
            self._chosen = best
        elif self._chosen != 0 and self._loss[0] <= self._loss[self._chosen]:
            self._chosen = 0

    def state(self) -> dict[str, Any]:
        """Everything learned, readable: the coefficients by name come first."""
        return {
            "coefficients": dict(zip(self.spec.all_names, self.coefficients().tolist(), strict=True)),
            "knee": self.knee,
            "num_outcomes": self.num_outcomes,
            "num_drifts": self.num_drifts,
            "variance": self._variance,
            "noise": self._noise,
            "recent": list(self._recent),
            "chosen": self._chosen,
            "loss": self._loss.tolist(),
            "drift": self._drift.state(),
            "fit": self._fit.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises StateError."""
        try:
            loss = np.asarray(state["loss"], dtype=np.float64)
            chosen, counts = int(state["chosen"]), (int(state["num_outcomes"]), int(state["num_drifts"]))
            variance, noise = (finite(name, float(state[name])) for name in ("variance", "noise"))
            recent = [finite("recent", float(r)) for r in state["recent"]]
            names = tuple(state["coefficients"])
            drift, fit = state["drift"], state["fit"]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StateError(f"regression state: {error}") from error
        if min(variance, noise, *counts) < 0 or len(recent) > _RECENT or (loss < 0).any():
            raise StateError("regression state: a count, a variance or a loss is below 0")
        fits = loss.shape == self._loss.shape and bool(np.isfinite(loss).all())
        if not fits or names != self.spec.all_names or not 0 <= chosen < len(self._rivals):
            raise StateError("regression state: it is of another shape")
        self._drift.load(drift)
        self._fit.load(fit)
        self._loss, self._chosen, self._variance = loss, chosen, variance
        self._noise, self._recent = noise, recent
        self.num_outcomes, self.num_drifts = counts
