"""The candidates of a decision, scored by an objective. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.types import BASELINE
from router_models.acceptance import sampling_band
from router_models.types import AcceptanceCurve, Quantiles
from specgate.policy.predict import Forecast, RequestShape, catch_up_s, forecast
from specgate.policy.view import CurveBook, ModelView

HOLD_STEPS = 24  # target steps of an exploration
_MIN_EXPLORED_TOKENS = 12.0  # shorter answers teach too little


@dataclass(frozen=True, slots=True)
class Option:
    """A policy at its best depth. `forecast` is None where no model can say what it costs."""

    policy: str
    depth: int
    forecast: Forecast | None
    score: tuple[float, float] = (0.0, math.inf)  # less is better
    curve: AcceptanceCurve | None = None
    is_proven: bool = True  # enough was seen of it to be judged

    def tells(self, objective: str) -> str:
        """The number it is judged by, in words."""
        if self.forecast is None:
            return "no prediction yet"
        if objective == "throughput":
            return f"{self.forecast.batch_tokens_per_s:.1f} tokens/s per sequence"
        return f"{self.forecast.predicted.e2e_ms or 0.0:.0f} ms"


@dataclass(frozen=True, slots=True)
class Trial:
    """An exploration that can be afforded."""

    policy: str
    hold_steps: int
    cost_s: float


@dataclass(frozen=True, slots=True)
class Scoring:
    """One request and what its policies are compared by."""

    view: ModelView
    task: str | None
    temperature: float
    top_p: float
    prompt_tokens: int
    output_tokens: float
    batch: int
    ttft: Quantiles | None
    methods: Mapping[str, int]
    fixed_depth: int | None
    min_drafting_steps: int
    objective: str
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None

    @property
    def shape(self) -> RequestShape:
        """For forecasts."""
        return RequestShape(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            is_sampled=self.temperature > 0,
            batch=self.batch,
            ttft=self.ttft,
        )

    def score(self, found: Forecast) -> tuple[float, float]:
        """Less is better. First by how far SLOs are missed, where they are the objective."""
        if self.objective == "throughput":
            return (0.0, found.step_s / found.tokens_per_step)
        e2e_ms = found.predicted.e2e_ms or 0.0
        if self.objective != "slo":
            return (0.0, e2e_ms)
        missed = 0.0
        for limit, value in (
            (self.slo_ttft_ms, found.predicted.ttft_ms),
            (self.slo_tpot_ms, found.predicted.tpot_ms),
        ):
            if limit is not None and value is not None and value > limit:
                missed += value / limit - 1
        return (missed, e2e_ms)

    def best(self, options: Mapping[str, Option], incumbent: str | None, margin: float) -> Option:
        """The best of them; the incumbent unless it is beaten by the margin. Plain decoding is left
        only for a gain above the margin, and returned to for any."""
        best = min(options.values(), key=lambda o: (o.score, o.policy != BASELINE))
        held = options.get(incumbent if incumbent is not None else BASELINE)
        if held is None or held is best or best.policy == BASELINE or best.score[0] < held.score[0]:
            return best
        return held if held.score[1] <= best.score[1] * (1 + margin) else best


def options_of(scoring: Scoring) -> dict[str, Option]:
    """Baseline and every loaded method at its best depth. Without a step model, no forecasts."""
    view = scoring.view
    if view.step is None:
        return {}
    shape = scoring.shape
    plain = forecast(view, BASELINE, 0, None, shape)
    options = {BASELINE: Option(BASELINE, 0, plain, scoring.score(plain))}
    book = CurveBook(view.curves)
    band = sampling_band(scoring.temperature, scoring.top_p)
    for method, ceiling in scoring.methods.items():
        curve = book.find(method, scoring.task, band)
        if curve is None or method not in view.step.drafters:
            options[method] = Option(method, ceiling, None, curve=curve, is_proven=False)
            continue
        top = len(curve.expected_tokens) - 1
        depths: Iterable[int] = range(1, min(max(ceiling, 1), top) + 1)
        if scoring.fixed_depth is not None:
            depths = (min(scoring.fixed_depth, top),)
        found = [(depth, forecast(view, method, depth, curve, shape)) for depth in depths]
        depth, best = min(found, key=lambda pair: scoring.score(pair[1]))
        options[method] = Option(
            method,
            depth,
            best,
            scoring.score(best),
            curve,
            view.num_steps.get(method, 0.0) >= scoring.min_drafting_steps,
        )
    return options


def exploration(best: Option, options: Iterable[Option], scoring: Scoring, credit_s: float) -> Trial | None:
    """The least known policy that might be the best, if trying it is affordable."""
    if scoring.output_tokens < _MIN_EXPLORED_TOKENS or best.forecast is None or scoring.view.step is None:
        return None
    rival = best.forecast
    trials: list[tuple[float, Trial]] = []
    for option in options:
        seen = option.curve.num_steps if option.curve is not None else 0.0
        if option.policy in (BASELINE, best.policy) or seen >= scoring.min_drafting_steps:
            continue
        if option.forecast is None:  # never drafted here: its cost is unknown, so one trial at a time
            cost_s = max(HOLD_STEPS * rival.step_s, credit_s)
        else:
            assert option.curve is not None
            high = option.curve.high_tokens[option.depth]
            hopeful = forecast(scoring.view, option.policy, option.depth, option.curve, scoring.shape, high)
            if scoring.score(hopeful) >= best.score:
                continue
            loss_s = option.forecast.step_s - rival.step_s * (
                option.forecast.tokens_per_step / rival.tokens_per_step
            )
            cost_s = HOLD_STEPS * max(loss_s, 0.0)
            cost_s += catch_up_s(scoring.view.step, option.policy, scoring.prompt_tokens)
        if cost_s <= credit_s:
            trials.append((seen, Trial(option.policy, HOLD_STEPS, cost_s)))
    return min(trials, key=lambda pair: (pair[0], pair[1].cost_s))[1] if trials else None


def why_not_best(option: Option, best: Option, objective: str, otherwise: str) -> str:
    """Why a candidate lost, in numbers."""
    if option.forecast is None:
        return f"{option.policy} has not drafted here yet: what it costs is unknown"
    if not option.is_proven:
        return f"too little was seen of {option.policy} to judge it; guessed: {option.tells(objective)}"
    if option.score <= best.score:
        return f"{otherwise} is in force, and {option.tells(objective)} is no gain above the margin"
    return f"predicted {option.tells(objective)}; {best.policy} {best.tells(objective)}"
