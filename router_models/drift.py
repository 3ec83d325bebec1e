"""Drift detection: has the mean of a stream of residuals moved?

Page-Hinkley test (Page 1954, Hinkley 1971), both sides. Input is standardised residuals; they
are clipped, so that one pause of the machine cannot raise an alarm on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router_models.base import StateError, finite


class PageHinkley:
    """Alarm when the clipped residuals' cumulative sum leaves its extreme by `threshold`.

    With the defaults a shift of 4 or more standard deviations is found within 6 residuals, a shift of
    1 within about 40, and one outlier of any size raises no alarm.
    """

    def __init__(self, slack: float = 0.5, threshold: float = 20.0, clip: float = 4.0) -> None:
        self._slack = slack
        self._threshold = threshold
        self._clip = clip
        self._up = 0.0
        self._down = 0.0

    def observe(self, residual: float) -> bool:
        """Take in one standardised residual; True is an alarm, after which the test starts anew."""
        z = max(-self._clip, min(self._clip, residual))
        self._up = max(0.0, self._up + z - self._slack)
        self._down = max(0.0, self._down - z - self._slack)
        if max(self._up, self._down) > self._threshold:
            self._up = self._down = 0.0
            return True
        return False

    def state(self) -> dict[str, float]:
        """The two sums."""
        return {"up": self._up, "down": self._down}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises StateError."""
        try:
            self._up = finite("up", float(state["up"]))
            self._down = finite("down", float(state["down"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StateError(f"drift state: {error}") from error
        if min(self._up, self._down) < 0:
            raise StateError("drift state: a sum is below 0")
