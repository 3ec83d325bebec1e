"""Non-negative least squares that learns online and forgets.

Recursive least squares in information form: the discounted normal equations `A theta = b` are
kept, and the best non-negative theta is solved from them exactly. Forgetting is directional
(Cao and Schwartz 2000): an outcome makes old ones fade only along its own regressors, so a long
stretch of equal steps does not wash out what is known about other steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router_models.base import StateError

Array = NDArray[np.float64]
_ANCHORED = 100  # outcomes that the anchor is made of
_ANCHOR_WEIGHT = 0.01  # of each of them


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


class DiscountedNormalEquations:
    """`A` and `b` of several rival regressions (the leading axis) over the same outcomes.

    Regressors are divided by `scales` so that all are of order one. `ridge` pulls undetermined
    coefficients to zero with the weight of that many outcomes; it does not fade. Nor does the anchor:
    the first outcomes, where work of all kinds is tried out, with the weight of a few. It decides
    where later ones are all alike (when every sequence drafts two tokens, tokens, sequences and KV grow
    together, and nothing else tells their prices apart).
    """

    def __init__(self, num_rivals: int, scales: Sequence[float], memory: float, ridge: float = 1e-3) -> None:
        self._scales: Array = np.asarray(scales, dtype=np.float64)
        self._fade = 1.0 / memory
        self._ridge = ridge
        n = len(self._scales)
        self._a: Array = np.zeros((num_rivals, n, n))
        self._b: Array = np.zeros((num_rivals, n))
        self._anchor_a: Array = np.zeros((num_rivals, n, n))
        self._anchor_b: Array = np.zeros((num_rivals, n))
        self._num_anchored = 0
        self._typical = 0.0  # running mean of y: the unit of the ridge

    def update(self, x: Array, y: float, weight: float) -> None:
        """Take in one outcome. x [rivals, n]; `weight` is the inverse variance of y."""
        self._typical = y if self._typical == 0.0 else self._typical + 0.05 * (y - self._typical)
        u = x / self._scales
        au = np.einsum("cij,cj->ci", self._a, u)
        along = np.einsum("ci,ci->c", u, au)
        share = np.divide(self._fade, along, out=np.zeros_like(along), where=along > 1e-30)
        aub = share * np.einsum("ci,ci->c", u, self._b)
        self._a -= share[:, None, None] * au[:, :, None] * au[:, None, :]
        self._a += weight * u[:, :, None] * u[:, None, :]
        self._b -= aub[:, None] * au
        self._b += (weight * y) * u
        if self._num_anchored < _ANCHORED:
            self._num_anchored += 1
            self._anchor_a += (_ANCHOR_WEIGHT * weight) * u[:, :, None] * u[:, None, :]
            self._anchor_b += (_ANCHOR_WEIGHT * weight * y) * u

    def _regularised(self, rival: int) -> Array:
        unit = self._ridge / max(self._typical, 1e-9) ** 2
        a: Array = self._a[rival] + self._anchor_a[rival] + unit * np.eye(len(self._scales))
        return a

    def solve(self, rival: int) -> Array:
        """The non-negative coefficients of one rival, in units of y per unit of x. [n]"""
        b = self._b[rival] + self._anchor_b[rival]
        theta: Array = solve_nonnegative(self._regularised(rival), b) / self._scales
        return theta

    def doubt(self, rival: int, x: Array) -> float:
        """Variance of `x' theta` in units of the outcomes' own variance."""
        u = x / self._scales
        return float(u @ np.linalg.solve(self._regularised(rival), u))

    def rescale(self, factor: float, keep: float) -> None:
        """The world became `factor` times slower: scale every coefficient, keep a share of the evidence."""
        self._a *= keep / factor**2
        self._b *= keep / factor
        self._anchor_a /= factor**2
        self._anchor_b /= factor
        self._typical *= factor

    def state(self) -> dict[str, Any]:
        """A and b, per rival, and the anchor's."""
        return {
            "a": self._a.tolist(),
            "b": self._b.tolist(),
            "typical": self._typical,
            "anchor_a": self._anchor_a.tolist(),
            "anchor_b": self._anchor_b.tolist(),
            "num_anchored": self._num_anchored,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises StateError."""
        try:
            a = np.asarray(state["a"], dtype=np.float64)
            b = np.asarray(state["b"], dtype=np.float64)
            typical = float(state["typical"])
            anchor_a = np.asarray(state["anchor_a"], dtype=np.float64)
            anchor_b = np.asarray(state["anchor_b"], dtype=np.float64)
            num_anchored = int(state["num_anchored"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"least-squares state: {error}") from error
        fits = a.shape == anchor_a.shape == self._a.shape and b.shape == anchor_b.shape == self._b.shape
        if not fits or not all(np.isfinite(x).all() for x in (a, b, anchor_a, anchor_b, typical)):
            raise StateError(f"least-squares state: shapes {a.shape} and {b.shape} or values do not fit")
        self._a, self._b, self._typical = a, b, typical
        self._anchor_a, self._anchor_b, self._num_anchored = anchor_a, anchor_b, num_anchored
