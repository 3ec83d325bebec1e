"""TTFT and queue wait: median and 90 % point from the load a request meets, learned online.

Log-linear in the load, with the step model's own guess of the prefill time as one feature, so that
the regression only has to learn by how much the load stretches it.
"""

from __future__ import annotations

import math
from typing import Self

import numpy as np

from router_models.base import State, StateError, check_header, finite, header
from router_models.log_regression import Array, LogRegression
from router_models.types import Effect, Explanation, Quantiles, WaitFeatures

_KIND, _VERSION = "wait", 1
_FLOOR_S = 1e-4  # waits below 0.1 ms are none
_TYPICAL_PREFILL_S, _TYPICAL_PROMPT = 0.1, 200.0
_NAMES = (
    "level",
    "log prefill seconds",
    "log new prompt tokens",
    "log running",
    "log waiting",
    "log queued",
    "arrivals waiting",
)


class Wait:
    """One quantity, in seconds: make one for TTFT and one for the queue wait."""

    def __init__(self, quantity: str = "ttft", typical_s: float = 0.2) -> None:
        """`typical_s`: what to expect of a request on an idle machine before anything is known."""
        self.quantity = quantity
        self._typical_s = typical_s
        mean = [math.log(typical_s), 0.5, 0.1, 0.1, 0.5, 0.5, 0.0]
        self._regression = LogRegression(_NAMES, mean, [2.0, 0.5, 0.5, 0.5, 0.7, 0.7, 1.0], spread=1.0)

    @staticmethod
    def _row(x: WaitFeatures) -> tuple[Array, str]:
        new = max(x.num_prompt_tokens - x.num_cached_tokens, 1)
        known = x.prefill_s is not None and x.prefill_s > 0
        row = np.array(
            [
                1.0,
                math.log(max(x.prefill_s or 0.0, _FLOOR_S) / _TYPICAL_PREFILL_S) if known else 0.0,
                0.0 if known else math.log(new / _TYPICAL_PROMPT),
                math.log1p(x.num_running),
                math.log1p(x.num_waiting),
                math.log1p(x.num_queued),
                1.0 if x.num_waiting + x.num_queued > 0 else 0.0,
            ]
        )
        return row, "loaded" if x.num_waiting + x.num_queued > 0 else "free"

    def learn_one(self, x: WaitFeatures, y: float) -> None:
        """Take in one measured wait, in seconds."""
        if finite(self.quantity, y) < 0:
            raise ValueError(f"{self.quantity} must not be negative, got {y}")
        row, group = self._row(x)
        self._regression.observe(row, math.log(max(y, _FLOOR_S)), group)

    def predict_one(self, x: WaitFeatures) -> Quantiles:
        """Seconds."""
        row, group = self._row(x)
        p50, p90 = self._regression.predict(row, group)
        return Quantiles(math.exp(min(p50, 20.0)), math.exp(min(p90, 20.0)))

    def explain_one(self, x: WaitFeatures) -> Explanation:
        """The median's logarithm, term by term."""
        row, group = self._row(x)
        effects = tuple(Effect(name, v, c, v * c) for name, v, c in self._regression.terms(row, group))
        return Explanation(effects, sum(e.effect for e in effects), "log s")

    def state(self) -> State:
        """See `Estimator.state`."""
        return {
            **header(_KIND, _VERSION),
            "quantity": self.quantity,
            "typical_s": self._typical_s,
            "regression": self._regression.state(),
        }

    @classmethod
    def from_state(cls, state: State) -> Self:
        """See `Estimator.from_state`."""
        check_header(state, _KIND, _VERSION)
        try:
            if state["quantity"] not in ("ttft", "queue_wait"):
                raise StateError(f"{_KIND}: unknown quantity {state['quantity']!r}")
            model = cls(state["quantity"], finite("typical_s", float(state["typical_s"])))
            model._regression.load(state["regression"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{_KIND}: {error}") from error
        return model
