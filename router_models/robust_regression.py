"""A positive cost as a sum of non-negative parts, learned online from noisy measurements.

`y = sum_i theta_i * x_i`, theta >= 0, errors relative to y. Around the least squares stand: less
weight for outliers (Huber 1964), a running relative spread, a drift test that rescales the model
and doubts it, and one knee in one regressor where the data show it to be needed. A machine is not
equally fast from second to second: the last residuals' mean scales what is predicted next, but is
kept out of what is learned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from router_models.base import StateError, finite
from router_models.drift import PageHinkley
from router_models.least_squares import Array, DiscountedNormalEquations

_FLOOR_S = 1e-7  # nothing measured is shorter
_MIN_SPREAD, _FIRST_SPREAD = 0.01, 0.2
_HUBER = 2.0  # standard deviations beyond which an outcome loses weight
_PACE = 0.2  # weight of an outcome in how fast the machine is just now
_MAX_PACE = 0.7  # of its logarithm
_REFIT_EVERY = 16  # outcomes between two refits of the rival knees
_KEPT = 0.03  # of the evidence after a drift: not all parts of a step change by the same factor
_DOUBTED = 64  # outcomes after a drift in which the model, not the outcome, counts as the outlier
_RECENT = 9  # residuals whose median says how far things drifted


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
        self._equations = DiscountedNormalEquations(len(self._rivals), scales, spec.memory)
        self._theta: Array = np.zeros((len(self._rivals), len(scales)))
        self._loss: Array = np.zeros(len(self._rivals))
        self._chosen = 0
        self._variance = _FIRST_SPREAD**2  # around the learned part alone
        self._pace = 0.0  # logarithm: above 0, steps take longer just now than they usually do
        self._pace_variance = _FIRST_SPREAD**2  # around what was predicted
        self._recent: list[float] = []
        self._drift = PageHinkley()
        self._num_since_drift = _DOUBTED + 1
        self.num_outcomes = 0
        self.num_drifts = 0

    @property
    def knee(self) -> float | None:
        """Where the knee lies; None: there is none."""
        return None if self._chosen == 0 else float(self._rivals[self._chosen])

    @property
    def spread(self) -> float:
        """Relative standard deviation of outcomes around predictions."""
        return math.sqrt(max(self._pace_variance, _MIN_SPREAD**2))

    @property
    def _usual_spread(self) -> float:
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
        theta: Array = self._theta[self._chosen]
        return theta

    def coefficients_now(self) -> Array:
        """The same at the machine's present pace: what predictions are made of."""
        theta: Array = self._theta[self._chosen] * math.exp(self._pace)
        return theta

    def predict(self, x: Sequence[float]) -> tuple[float, float]:
        """Mean and standard deviation of y."""
        row = self.expand(x, self.knee)
        mean = float(row @ self.coefficients_now())
        doubt = self._equations.doubt(self._chosen, row)
        return mean, self.spread * math.sqrt(mean * mean + doubt)

    def observe(self, x: Sequence[float], y: float) -> None:
        """Take in one outcome. Raises ValueError, unchanged, for values that are no measurement."""
        for name, value in zip(self.spec.names, x, strict=True):
            if finite(name, value) < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if finite("seconds", y) < 0:
            raise ValueError(f"seconds must not be negative, got {y}")
        y = max(y, _FLOOR_S)
        rows = np.stack([self.expand(x, None if math.isinf(k) else float(k)) for k in self._rivals])
        weight = 1.0
        if self.num_outcomes >= 3:
            predicted = np.maximum((rows * self._theta).sum(axis=1), _FLOOR_S)
            weight = self._judge(np.log(y / predicted))
        usual = float(rows[self._chosen] @ self._theta[self._chosen])
        center = y if self.num_outcomes < 3 else max(usual, 0.1 * y)
        self._equations.update(rows, y, weight / center**2)
        self.num_outcomes += 1
        self._refit()

    def _judge(self, residuals: Array) -> float:
        """Learn from the log residuals of all rivals; returns this outcome's weight."""
        r = float(residuals[self._chosen])
        spread = self._usual_spread
        self._keep_pace(r)
        clipped = np.clip(residuals, -4 * spread, 4 * spread)
        squares = clipped**2
        first = 1.0 / (self.num_outcomes + 1)
        self._loss += max(0.01, first) * (squares - self._loss)
        self._variance += max(0.02, first) * (float(squares[self._chosen]) - self._variance)
        self._recent = [*self._recent[1 - _RECENT :], r]
        z = r / spread
        if self._drift.observe(z):
            self._follow_drift()
            return 1.0
        self._num_since_drift += 1
        is_doubted = self._num_since_drift <= _DOUBTED
        return 1.0 if abs(z) <= _HUBER or is_doubted else _HUBER / abs(z)

    def _keep_pace(self, r: float) -> None:
        """Follow the last residuals, and how far off that was."""
        miss = max(-4 * self.spread, min(r - self._pace, 4 * self.spread))
        first = 1.0 / (self.num_outcomes + 1)
        self._pace_variance += max(0.02, first) * (miss**2 - self._pace_variance)
        self._pace = max(-_MAX_PACE, min(self._pace + _PACE * miss, _MAX_PACE))

    def _follow_drift(self) -> None:
        shift = float(np.median(self._recent[-_RECENT:]))
        if abs(shift) < 0.05:
            return
        self.num_drifts += 1
        self._num_since_drift = 0
        self._equations.rescale(math.exp(shift), keep=_KEPT)
        self._variance = max(self._variance, 0.1**2)
        self._theta *= math.exp(shift)
        self._pace = 0.0

    def _refit(self) -> None:
        if self.num_outcomes % _REFIT_EVERY == 0 or self.num_outcomes <= 3:
            for rival in range(len(self._rivals)):
                self._theta[rival] = self._equations.solve(rival)
            self._choose()
        self._theta[self._chosen] = self._equations.solve(self._chosen)

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
            "pace": self._pace,
            "pace_variance": self._pace_variance,
            "chosen": self._chosen,
            "theta": self._theta.tolist(),
            "loss": self._loss.tolist(),
            "recent": list(self._recent),
            "num_since_drift": self._num_since_drift,
            "drift": self._drift.state(),
            "equations": self._equations.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises StateError."""
        try:
            theta = np.asarray(state["theta"], dtype=np.float64)
            loss = np.asarray(state["loss"], dtype=np.float64)
            chosen, recent = int(state["chosen"]), [finite("recent", float(r)) for r in state["recent"]]
            counts = int(state["num_outcomes"]), int(state["num_drifts"]), int(state["num_since_drift"])
            variance = finite("variance", float(state["variance"]))
            pace = finite("pace", float(state["pace"]))
            pace_variance = finite("pace_variance", float(state["pace_variance"]))
            names = tuple(state["coefficients"])
            drift, equations = state["drift"], state["equations"]
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"regression state: {error}") from error
        fits = theta.shape == self._theta.shape and loss.shape == self._loss.shape
        if not fits or names != self.spec.all_names or not 0 <= chosen < len(self._rivals):
            raise StateError("regression state: it is of another shape")
        if not (np.isfinite(theta).all() and np.isfinite(loss).all()):
            raise StateError("regression state: values that are not finite")
        self._drift.load(drift)
        self._equations.load(equations)
        self._theta, self._loss, self._chosen = theta, loss, chosen
        self._recent, self._variance = recent, variance
        self._pace, self._pace_variance = pace, pace_variance
        self.num_outcomes, self.num_drifts, self._num_since_drift = counts
