"""Quantiles of a positive quantity from named features, learned online.

The logarithm is linear in the features. Coefficients follow a Kalman filter whose state drifts
back to its prior (an Ornstein-Uhlenbeck walk): it forgets slowly, and never grows unsure beyond
the prior. The median and the 90 % point are the running quantiles of its residuals, per group,
by stochastic approximation (Robbins and Monro 1951).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router_models.base import StateError, finite

Array = NDArray[np.float64]
_LEVELS = (0.5, 0.9)
_NORMAL = (0.0, 1.2816)  # their place in a normal distribution
_CLIP = 3.0  # standard deviations at which a residual stops pulling


class _Tail:
    """Running quantiles of one group's residuals."""

    def __init__(self, spread: float) -> None:
        self.count = 0
        self.offsets = [z * spread for z in _NORMAL]

    def observe(self, residual: float, spread: float) -> None:
        self.count += 1
        step = spread * max(0.02, 0.5 * self.count**-0.6)
        for i, level in enumerate(_LEVELS):
            self.offsets[i] += step * (level - (residual < self.offsets[i]))


class LogRegression:
    """`log y ~ prior + coefficients * features`, with quantiles. `names` fixes the features' order."""

    def __init__(
        self,
        names: Sequence[str],
        prior_mean: Sequence[float],
        prior_sd: Sequence[float],
        spread: float = 0.8,
        memory: float = 5000.0,
    ) -> None:
        self.names = tuple(names)
        self._mean0: Array = np.asarray(prior_mean, dtype=np.float64)
        self._cov0: Array = np.diag(np.asarray(prior_sd, dtype=np.float64) ** 2)
        self._stay = math.exp(-1.0 / memory)
        self._drift: Array = (1 - self._stay**2) * self._cov0
        self._theta: Array = self._mean0.copy()
        self._cov: Array = self._cov0.copy()
        self._variance = spread**2
        self._count = 0
        self._tails: dict[str, _Tail] = {}

    def observe(self, x: Array, log_y: float, group: str) -> None:
        """Take in one outcome; `group` names whose residual quantiles it belongs to."""
        if not np.isfinite(x).all():
            raise ValueError(f"features must be finite, got {x.tolist()}")
        finite("log y", log_y)
        self._theta = self._mean0 + self._stay * (self._theta - self._mean0)
        self._cov *= self._stay**2
        self._cov += self._drift
        residual = log_y - float(x @ self._theta)
        spread = math.sqrt(self._variance)
        self._count += 1
        for name in {group, ""}:
            self._tail(name).observe(residual, spread)
        clipped = max(-_CLIP * spread, min(_CLIP * spread, residual))
        column = self._cov @ x
        scale = float(x @ column) + self._variance
        self._theta += column * (clipped / scale)
        self._cov -= np.multiply.outer(column, column) / scale  # symmetric to the bit
        self._variance += max(0.01, 1.0 / (self._count + 20)) * (clipped**2 - self._variance)

    def _tail(self, group: str) -> _Tail:
        if group not in self._tails:
            fresh = _Tail(math.sqrt(self._variance))
            if "" in self._tails:
                fresh.offsets = list(self._tails[""].offsets)
            self._tails[group] = fresh
        return self._tails[group]

    def _offsets(self, group: str) -> tuple[float, float]:
        tail = self._tails.get(group) or self._tails.get("")
        low, high = tail.offsets if tail else [z * math.sqrt(self._variance) for z in _NORMAL]
        return low, max(low, high)

    def predict(self, x: Array, group: str) -> tuple[float, float]:
        """The logarithms of the median and of the 90 % point."""
        center = float(x @ self._theta)
        low, high = self._offsets(group)
        return center + low, center + high

    def terms(self, x: Array, group: str) -> list[tuple[str, float, float]]:
        """(name, value, coefficient) of the features that count, then the median's own offset."""
        values = zip(self.names, x.tolist(), self._theta.tolist(), strict=True)
        return [*(t for t in values if t[1] != 0.0), ("typical residual", 1.0, self._offsets(group)[0])]

    def state(self) -> dict[str, Any]:
        """Everything learned; the coefficients by name come first."""
        return {
            "coefficients": dict(zip(self.names, self._theta.tolist(), strict=True)),
            "variance": self._variance,
            "count": self._count,
            "tails": {g: {"count": t.count, "offsets": list(t.offsets)} for g, t in self._tails.items()},
            "covariance": self._cov.tolist(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises StateError."""
        try:
            if tuple(state["coefficients"]) != self.names:
                raise StateError("log regression: other features")
            theta = np.array(list(state["coefficients"].values()), dtype=np.float64)
            cov = np.array(state["covariance"], dtype=np.float64)
            variance, count = finite("variance", float(state["variance"])), int(state["count"])
            tails: dict[str, _Tail] = {}
            for group, part in state["tails"].items():
                tails[str(group)] = tail = _Tail(0.0)
                tail.count = int(part["count"])
                tail.offsets = [finite("offset", float(v)) for v in part["offsets"]]
                if len(tail.offsets) != len(_LEVELS):
                    raise StateError("log regression: other quantiles")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"log regression: {error}") from error
        if cov.shape != self._cov.shape or not (np.isfinite(cov).all() and np.isfinite(theta).all()):
            raise StateError("log regression: shapes or values do not fit")
        self._theta, self._cov, self._variance, self._count, self._tails = theta, cov, variance, count, tails
