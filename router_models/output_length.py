"""How many tokens a request will generate: median and 90 % point, learned from outcomes.

Log-linear: a level and a slope in prompt length per task, the length asked for, the ceiling
asked for, and what the same caller got before (a shrunk mean of its residuals).
"""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from router_models.base import State, StateError, check_header, finite, header
from router_models.log_regression import Array, LogRegression
from router_models.types import (
    TASKS,
    Effect,
    Explanation,
    LengthFeatures,
    LengthOutcome,
    Quantiles,
)

_KIND, _VERSION = "output_length", 1
_TYPICAL_TOKENS = {
    "document_qa": 40.0,
    "summarization": 70.0,
    "code_edit": 120.0,
    "code_completion": 65.0,
    "chat": 240.0,
    "reasoning": 80.0,
    "translation": 40.0,
    "tool_call": 50.0,
    "creative_writing": 280.0,
}
_TYPICAL_UNKNOWN = 90.0
_COPY_SLOPE = {"code_edit": 0.6, "translation": 0.6}  # these answers are about as long as their input
_SLOPE = 0.1
_TYPICAL_PROMPT, _TYPICAL_CEILING = 200.0, 512.0
_UNKNOWN = "unknown"
_GROUPS = (*TASKS, _UNKNOWN)
_CALLER_SHRINK = 8.0
_CALLER_MEMORY = 200.0
_MAX_CALLERS = 1000
_MAX_LOG_TOKENS = math.log(200_000.0)

_NAMES = (
    *(f"task={g}" for g in _GROUPS),
    *(f"log prompt, {g}" for g in _GROUPS),
    "length asked for",
    "asked for any length",
    "log max_tokens",
)


def _priors() -> tuple[list[float], list[float]]:
    level = [math.log(_TYPICAL_TOKENS.get(g, _TYPICAL_UNKNOWN)) for g in _GROUPS]
    slope = [_COPY_SLOPE.get(g, _SLOPE) for g in _GROUPS]
    mean = [*level, *slope, 0.7, 0.0, 0.1]
    return mean, [1.0] * len(_GROUPS) + [0.3] * len(_GROUPS) + [0.3, 0.5, 0.2]


class OutputLength:
    """See the module. Predictions are capped by `max_tokens`."""

    def __init__(self) -> None:
        mean, sd = _priors()
        self._regression = LogRegression(_NAMES, mean, sd)
        self._callers: dict[str, tuple[float, float]] = {}  # residual sum and count, with decay

    @staticmethod
    def _row(x: LengthFeatures) -> tuple[Array, str]:
        group = x.task if x.task in TASKS else _UNKNOWN
        at = _GROUPS.index(group)
        row = np.zeros(len(_NAMES))
        row[at] = 1.0
        row[len(_GROUPS) + at] = math.log(max(x.num_prompt_tokens, 1) / _TYPICAL_PROMPT)
        if x.asked_tokens is not None:  # measured from where the answer would be expected without it
            expected = math.log(_TYPICAL_TOKENS.get(group, _TYPICAL_UNKNOWN))
            expected += _COPY_SLOPE.get(group, _SLOPE) * row[len(_GROUPS) + at]
            row[-3] = math.log(max(x.asked_tokens, 1.0)) - expected
            row[-2] = 1.0
        if x.max_tokens is not None:
            row[-1] = math.log(max(x.max_tokens, 1) / _TYPICAL_CEILING)
        return row, group

    def _caller_offset(self, caller: str) -> float:
        total, count = self._callers.get(caller, (0.0, 0.0))
        return total / (count + _CALLER_SHRINK)

    def learn_one(self, x: LengthFeatures, y: LengthOutcome) -> None:
        """Take in one answer's length. An answer cut short counts only where it was over-long already."""
        if y.num_output_tokens < 0:
            raise ValueError(f"num_output_tokens must not be negative, got {y.num_output_tokens}")
        row, group = self._row(x)
        log_y = math.log(max(y.num_output_tokens, 1))
        offset = self._caller_offset(x.caller)
        center = self._regression.predict(row, group)[0] + offset
        if y.is_cut and center >= log_y:
            return  # it wanted more, and more was predicted: nothing to correct
        self._regression.observe(row, log_y - offset, group)
        if x.caller:
            total, count = self._callers.pop(x.caller, (0.0, 0.0))
            keep = math.exp(-1.0 / _CALLER_MEMORY)
            residual = max(-2.0, min(2.0, log_y - center + offset))
            self._callers[x.caller] = (keep * total + residual, keep * count + 1.0)
            if len(self._callers) > _MAX_CALLERS:
                del self._callers[next(iter(self._callers))]  # the one heard of longest ago

    def predict_one(self, x: LengthFeatures) -> Quantiles:
        """Median and 90 % point, in tokens; at least 1 and at most `max_tokens`."""
        row, group = self._row(x)
        p50, p90 = self._regression.predict(row, group)
        offset = self._caller_offset(x.caller)
        ceiling = float(x.max_tokens) if x.max_tokens is not None else math.inf
        low, high = (math.exp(min(p + offset, _MAX_LOG_TOKENS)) for p in (p50, p90))
        return Quantiles(max(1.0, min(low, ceiling)), max(1.0, min(high, ceiling)))

    def explain_one(self, x: LengthFeatures) -> Explanation:
        """The median's logarithm, term by term; a last term where a limit holds it."""
        row, group = self._row(x)
        terms = self._regression.terms(row, group)
        if x.caller:
            terms.append((f"caller {x.caller}", 1.0, self._caller_offset(x.caller)))
        effects = [Effect(name, value, c, value * c) for name, value, c in terms]
        limit = math.log(self.predict_one(x).p50) - sum(e.effect for e in effects)
        if abs(limit) > 1e-9:
            effects.append(Effect("limit (max_tokens)", 1.0, limit, limit))
        return Explanation(tuple(effects), sum(e.effect for e in effects), "log tokens")

    def state(self) -> State:
        """See `Estimator.state`."""
        callers = {name: list(pair) for name, pair in self._callers.items()}
        return {**header(_KIND, _VERSION), "regression": self._regression.state(), "callers": callers}

    @classmethod
    def from_state(cls, state: State) -> Self:
        """See `Estimator.from_state`."""
        check_header(state, _KIND, _VERSION)
        model = cls()
        try:
            model._regression.load(state["regression"])
            callers: dict[str, Any] = state["callers"]
            for name, (total, count) in callers.items():
                model._callers[name] = (finite("total", float(total)), finite("count", float(count)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"{_KIND}: {error}") from error
        return model
