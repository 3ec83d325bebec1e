"""Non-negative least squares that learns online, on a machine whose pace changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router_models.base import StateError

Array = NDArray[np.float64]
_MAX_PACE = 0.7  # of its logarithm
_PACE_KEPT = 0.95  # from one outcome to the next
_PACE_MOVES = 0.3  # from one outcome to the next, in spreads of an outcome
_MOST_OF_SPREAD = 0.1  # outcomes that scatter more do so by themselves: the machine's pace does not
_SCALE_MOVES = 0.015  # of all coefficients together, from one outcome to the next
_LEAST_SHARE = 0.02  # of a typical outcome: no coefficient's part is taken to be smaller when it is doubted
_LEAST = 1e-3  # of a typical outcome: nothing predicted is smaller
_FIRST_DOUBT = 100.0  # times the first outcome


def solve_nonnegative(a: Array, b: Array) -> Array:
    """The theta >= 0 that minimises `theta' A theta / 2 - b' theta`; A [n, n] positive definite.

    Lawson and Hanson (1974), chapter 23, on the normal equations.
    """
    theta: Array = np.asarray(np.linalg.solve(a, b), dtype=np.float64)
    if (theta >= 0).all():
        return theta
    n = len(b)
    free = np.zeros(n, dtype=bool)
    theta = np.zeros(n)
    tolerance = 1e-12 * float(np.abs(b).max(initial=0.0)) + 1e-300
    for _ in range(4 * n):
        gradient = b - a @ theta
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while True:
            trial = np.zeros(n)
            trial[free] = np.linalg.solve(a[np.ix_(free, free)], b[free])
            if (trial[free] > 0).all():
                theta = trial
                break
            back = free & (trial <= 0)
            step = (theta[back] / (theta[back] - trial[back])).min()
            theta = theta + step * (trial - theta)
            free &= theta > 1e-15 * max(1.0, float(theta.max()))
            if not free.any():
                return np.zeros(n)
    return theta


class PacedLeastSquares:
    """`y = exp(s) * x' theta` for several rival regressions (the leading axis) over the same outcomes.

    A Kalman filter (Kalman 1960) over theta and `s`, the logarithm of the machine's present pace. The
    pace is free to move from outcome to outcome and falls back to 0; theta moves slowly as a whole and
    hardly in its parts. So what slows all work alike is the pace for some seconds, then theta's scale;
    what tells kinds of work apart, one right after the other, is theta's shape. Where work is all alike
    nothing moves the shape: doubt about it only grows, as a random walk with steps of a spread divided by
    `memory`. Where work differs, about `memory` outcomes are remembered.

    Regressors are divided by `scales` so that all are of order one.
    """

    def __init__(self, num_rivals: int, scales: Sequence[float], memory: float) -> None:
        self._scales: Array = np.asarray(scales, dtype=np.float64)
        n = len(self._scales)
        self._fade = 1.0 / memory
        self._mean: Array = np.zeros((num_rivals, n))
        self._pace: Array = np.zeros(num_rivals)
        self._cov: Array = np.zeros((num_rivals, n + 1, n + 1))
        self._typical = 0.0  # running mean of y

    def expect(self, x: Array, first: float) -> tuple[Array, Array]:
        """The next outcome as each rival predicts it at the present pace, and the relative variance of
        that, without the outcome's own. `first` stands in before there is any. x [rivals, n]"""
        if self._typical == 0.0:
            return np.full(len(x), first), np.zeros(len(x))
        mean, h = self._observed(x)
        size = np.maximum(mean, _LEAST * self._typical)
        return size, self._along(h) / size**2

    def doubt(self, rival: int, x: Array) -> float:
        """Variance of what one rival predicts at the present pace, without the outcome's own. x [n]"""
        u = x / self._scales
        pace = math.exp(self._pace[rival])
        h = np.append(pace * u, pace * float(u @ self._mean[rival]))
        return max(float(h @ self._cov[rival] @ h), 0.0)

    def _along(self, h: Array) -> Array:
        """Variance of what is predicted. [rivals] Never below 0, as rounding could have it."""
        variance: Array = np.maximum(np.einsum("ci,cij,cj->c", h, self._cov, h), 0.0)
        return variance

    def _observed(self, x: Array) -> tuple[Array, Array]:
        """Predicted outcomes [rivals], and their derivative by theta and the pace [rivals, n + 1]."""
        u, pace = x / self._scales, np.exp(self._pace)
        mean: Array = pace * np.einsum("ci,ci->c", u, self._mean)
        return mean, np.concatenate([pace[:, None] * u, mean[:, None]], axis=1)

    def update(self, x: Array, y: Array, spread: float) -> None:
        """Take in one outcome of relative standard deviation `spread`. x [rivals, n]; y [rivals], for what
        is an outlier to one is none to another."""
        n = len(self._scales)
        if self._typical == 0.0:
            self._typical = float(y[0])
            self._cov[:, range(n), range(n)] = (_FIRST_DOUBT * self._typical) ** 2
        self._typical += 0.05 * (float(y[0]) - self._typical)
        mean, h = self._observed(x)
        gain = np.einsum("cij,cj->ci", self._cov, h)
        variance = self._along(h) + (spread * np.maximum(mean, 0.1 * y)) ** 2
        step = gain * ((y - mean) / variance)[:, None]
        self._mean += step[:, :n]
        self._pace = np.clip(self._pace + step[:, n], -_MAX_PACE, _MAX_PACE)
        self._cov -= gain[:, :, None] * gain[:, None, :] / variance[:, None, None]
        self._cov = (self._cov + self._cov.transpose(0, 2, 1)) / 2  # but for rounding it is symmetric anyway
        for rival in np.flatnonzero((self._mean < 0).any(axis=1)):
            self._mean[rival] = self._nearest(int(rival))
        self._drift(spread)

    def _drift(self, spread: float) -> None:
        """What may change until the next outcome."""
        n = len(self._scales)
        self._pace *= _PACE_KEPT
        self._cov[:, n, :] *= _PACE_KEPT
        self._cov[:, :, n] *= _PACE_KEPT
        self._cov[:, n, n] += (_PACE_MOVES * min(spread, _MOST_OF_SPREAD)) ** 2
        whole = self._mean[:, :, None] * self._mean[:, None, :]  # first, for it is the same on both sides
        self._cov[:, :n, :n] += _SCALE_MOVES**2 * whole
        self._doubt_more(spread * self._fade, most=1.0)

    def _doubt_more(self, share: float, most: float = math.inf) -> None:
        """Widen what is known of each coefficient by `share` of its size, where it is not in doubt by `most`
        of that already."""
        n = len(self._scales)
        size = self._mean**2 + (_LEAST_SHARE * self._typical) ** 2
        is_known = self._cov[:, range(n), range(n)] < most**2 * size
        self._cov[:, range(n), range(n)] += np.where(is_known, share**2 * size, 0.0)

    def _nearest(self, rival: int) -> Array:
        """The non-negative coefficients that are likeliest."""
        n = len(self._scales)
        cov = self._cov[rival, :n, :n]
        floor = np.diag(1e-12 * np.diagonal(cov))
        a: Array = np.asarray(np.linalg.inv(cov + floor), dtype=np.float64)
        return solve_nonnegative(a, a @ self._mean[rival])

    def pace(self, rival: int) -> float:
        """Logarithm: above 0, outcomes are larger just now than they usually are."""
        return float(self._pace[rival])

    def theta(self, rival: int) -> Array:
        """The coefficients of one rival at the usual pace, in units of y per unit of x. [n]"""
        theta: Array = self._mean[rival] / self._scales
        return theta

    def shift(self, size: float, doubt: float) -> None:
        """All outcomes are `exp(size)` times as large from now on, and every coefficient is in doubt by
        the share `doubt` of it."""
        n = len(self._scales)
        factor = np.exp(size)
        self._mean *= factor
        self._typical *= float(factor)
        self._cov[:, :n, :] *= factor
        self._cov[:, :, :n] *= factor
        self._pace[:] = 0.0
        self._doubt_more(doubt)

    def state(self) -> dict[str, Any]:
        """Means and covariances, per rival."""
        return {
            "mean": self._mean.tolist(),
            "pace": self._pace.tolist(),
            "cov": self._cov.tolist(),
            "typical": self._typical,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises StateError."""
        try:
            mean, pace, cov = (np.asarray(state[name], dtype=np.float64) for name in ("mean", "pace", "cov"))
            typical = float(state["typical"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"least-squares state: {error}") from error
        own = self._mean, self._pace, self._cov
        fits = all(a.shape == b.shape for a, b in zip((mean, pace, cov), own, strict=True))
        if not fits or not all(np.isfinite(a).all() for a in (mean, pace, cov, typical)):
            raise StateError(f"least-squares state: shapes {mean.shape}, {cov.shape} or values do not fit")
        if typical < 0 or (mean < 0).any() or (np.abs(pace) > _MAX_PACE).any():
            raise StateError("least-squares state: a cost below 0, or a pace out of bounds")
        cov = (cov + cov.transpose(0, 2, 1)) / 2
        spectrum = np.linalg.eigvalsh(cov)
        if (spectrum[:, 0] < -1e-9 * spectrum[:, -1]).any():
            raise StateError("least-squares state: cov is no covariance")
        if typical > 0 and (np.diagonal(cov, axis1=1, axis2=2)[:, :-1] <= 0).any():
            raise StateError("least-squares state: a cost without any doubt")
        self._mean, self._pace, self._cov, self._typical = mean, pace, cov, typical
