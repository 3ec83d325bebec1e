"""Steps and outcomes in, snapshot out: the one writer of a model's learned state.

Step records teach the latency model, finished requests acceptance, answer length, TTFT and queue
wait. Every other second `refresh` freezes what is known into a `ModelView`: decisions read it,
and the engine's planner is sent it.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from engine.types import BASELINE, StepRecord
from router_models.acceptance import Acceptance, sampling_band
from router_models.asked_length import asked_tokens
from router_models.base import State, StateError
from router_models.output_length import OutputLength
from router_models.step_latency import StepLatency
from router_models.types import (
    AcceptanceCounts,
    AcceptanceCurve,
    AcceptanceKey,
    LengthFeatures,
    LengthOutcome,
    Quantiles,
    WaitFeatures,
)
from router_models.wait import Wait
from specgate.config.schema import LearningConfig, PolicyConfig
from specgate.policy.decide import Experience
from specgate.policy.predict import prefill_s
from specgate.policy.reasons import Reason
from specgate.policy.speedup import coefficients, derived, with_units
from specgate.policy.view import ModelView, PlannerSettings
from specgate.scores import Score, ScoreWindow
from specgate.step_learning import StepLearner
from specgate.types import Decision, GenerationRequest, LengthEstimate, LoadView, RequestOutcome, TaskEstimate

logger = logging.getLogger(__name__)

BANDS = ("greedy", "cool", "warm", "hot")
_FULL_REFRESH_EVERY = 20  # snapshots between two that recompute every curve
_MEAN_SHARE = 0.05  # weight of a new request in the typical request
_START_CREDIT_S = 1.0  # what a new server may spend on exploring before it has earned any
_MAX_CREDIT_S = 20.0
_MIN_WAITS = 20  # finished requests before the learned TTFT is believed


class ErrorListener(Protocol):
    """Who is told what was predicted and what came of it (the metrics)."""

    def __call__(self, model: str, predicted_s: float, measured_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class AcceptanceReading:
    """Median over recent requests of accepted / (accepted + rejected), per request."""

    policy: str
    task: str
    p50: float | None  # None: too few requests
    num_requests: int


def _ignore(model: str, predicted_s: float, measured_s: float) -> None:
    """Nobody listens."""


class Learner:
    """Of one model. Everybody else sees frozen views and numbers."""

    def __init__(
        self, policy: PolicyConfig, learning: LearningConfig, on_error: ErrorListener = _ignore
    ) -> None:
        self._policy = policy
        self.config = learning
        self._on_error = on_error
        self.steps = StepLearner(partial(on_error, "step_latency"))
        self.acceptance_model = Acceptance()
        self.lengths = OutputLength()
        self.ttft = Wait("ttft")
        self.queue_wait = Wait("queue_wait", typical_s=0.01)
        self._num_waits = 0
        self._by_arm: dict[tuple[str, str], deque[float]] = {}
        self._p50: dict[str, dict[str, float]] = {}  # by task and policy, of tasks without news
        self._request_scores = {name: ScoreWindow(500) for name in ("ttft", "e2e", "output_tokens")}
        self._prompt_tokens: float | None = None
        self._computed_tokens: float | None = None
        self._output_tokens: float | None = None
        self._methods: dict[str, int] = {}
        self._curves: dict[AcceptanceKey, AcceptanceCurve] = {}
        self._stale: set[AcceptanceKey] = set()
        self._incumbents: dict[str, str] = {}  # by task: the policy last predicted to be best
        self._spent_s = 0.0  # on exploring
        self._num_refreshes = 0
        self._has_news = True
        self.view = ModelView()

    def reconfigure(self, policy: PolicyConfig) -> None:
        """Other settings from now on; what was learned stays."""
        self._policy = policy
        size = policy.acceptance_window
        self._by_arm = {arm: deque(values, maxlen=size) for arm, values in self._by_arm.items()}
        self._p50.clear()
        self._has_news = True

    # --- learning --------------------------------------------------------------------------

    def stepped(self, record: StepRecord) -> None:
        """An engine step, in order."""
        try:
            self.steps.observe(record)
        except ValueError as error:  # a record no model can use; the next one may be sound
            logger.warning("a step record was not learned from: %s", error)
        self._has_news = True

    def learn(self, outcome: RequestOutcome) -> None:
        """A request that was decided, however it ended."""
        self._has_news = True
        self._learn_acceptance(outcome)
        if outcome.outcome != "ok":
            return
        self._settle_control(outcome)
        changes = [c for c in outcome.policy_changes if c.reason == Reason.PREDICTED_FASTEST]
        if changes:  # the step planner knew better
            self._incumbents[outcome.decision.task.label] = changes[-1].policy
        self._learn_times(outcome)
        self._learn_length(outcome)

    def decided(self, decision: Decision) -> None:
        """A request begins that was decided so."""
        self._spent_s += decision.explore_cost_s
        if decision.reason == Reason.PREDICTED_FASTEST:
            self._incumbents[decision.task.label] = decision.policy

    def _settle_control(self, outcome: RequestOutcome) -> None:
        """A control that decoded more slowly than predicted (plain among requests that draft, it pays for
        their drafts in every step) has cost the more. For as many tokens as were expected: that an answer
        is longer is no cost of trying."""
        decision, tpot_s = outcome.decision, outcome.timings.tpot_s
        predicted = decision.predicted
        is_control = decision.policy == BASELINE and decision.reason == Reason.EXPLORATION
        if not is_control or tpot_s is None or predicted.tpot_ms is None or predicted.e2e_ms is None:
            return
        more_s = (tpot_s - predicted.tpot_ms / 1e3) * max((predicted.output_tokens or 0.0) - 1.0, 0.0)
        self._spent_s += min(max(more_s, -decision.explore_cost_s), predicted.e2e_ms / 1e3)

    def set_methods(self, methods: Mapping[str, int]) -> None:
        """The drafters that are loaded, with the most draft tokens of each."""
        if methods != self._methods:
            self._methods = dict(methods)
            self._stale |= {AcceptanceKey(method, None, band) for method in methods for band in BANDS}
            self._has_news = True

    def _learn_acceptance(self, outcome: RequestOutcome) -> None:
        task = outcome.decision.task
        sampling = outcome.request.sampling
        band = sampling_band(sampling.temperature, sampling.top_p)
        seen = [(counts, True) for stats in outcome.stats for counts in stats.by_method]
        seen += [(counts, False) for stats in outcome.stats for counts in stats.in_hindsight]
        for counts, was_tried in seen:
            key = AcceptanceKey(counts.method, None if task.is_mixed else task.label, band)
            learned = AcceptanceCounts(
                counts.num_steps,
                counts.num_drafts,
                counts.drafted_per_position,
                counts.accepted_per_position,
                counts.allowed_per_position,
            )
            try:
                self.acceptance_model.learn_one(key, learned)
            except ValueError as error:
                logger.warning("counts of %s were not learned from: %s", counts.method, error)
                continue
            self._stale |= {key, AcceptanceKey(counts.method, None, band)}
            if not was_tried:
                continue
            # Tokens that verification came to: the accepted ones, and one refused in each draft at most.
            drafted = counts.drafted_per_position
            accepted = counts.accepted_per_position
            reached = sum(min(d, a) for d, a in zip(drafted, (counts.num_drafts, *accepted), strict=False))
            if reached:
                arm = self._by_arm.setdefault(
                    (counts.method, task.label), deque(maxlen=self._policy.acceptance_window)
                )
                arm.append(sum(accepted) / reached)
                self._p50.pop(task.label, None)

    def _learn_times(self, outcome: RequestOutcome) -> None:
        timings, decision = outcome.timings, outcome.decision
        if timings.ttft_s is not None:
            x = self._wait_features(outcome.num_prompt_tokens, decision.load)
            self.ttft.learn_one(x, timings.ttft_s)
            self.queue_wait.learn_one(x, timings.queue_wait_s)
            self._num_waits += 1
        for name, predicted_ms, actual_s in (
            ("ttft", decision.predicted.ttft_ms, timings.ttft_s),
            ("e2e", decision.predicted.e2e_ms, timings.e2e_s),
        ):
            if predicted_ms is not None and actual_s is not None:
                self._request_scores[name].add(predicted_ms / 1e3, actual_s)
                self._on_error(name, predicted_ms / 1e3, actual_s)

    def _learn_length(self, outcome: RequestOutcome) -> None:
        request, task = outcome.request, outcome.decision.task
        num_answers = max(len(outcome.stats), 1)
        num_prompt = outcome.num_prompt_tokens // (1 + len(request.more_prompts))
        self._prompt_tokens = _towards(self._prompt_tokens, num_prompt)
        if outcome.stats:
            computed = sum(stats.num_prompt_tokens - stats.num_cached_tokens for stats in outcome.stats)
            self._computed_tokens = _towards(self._computed_tokens, computed / num_answers)
        self._output_tokens = _towards(self._output_tokens, outcome.num_output_tokens / num_answers)
        if request.sampling.ignore_eos:
            return  # as long as was asked for: that teaches nothing
        self._request_scores["output_tokens"].add(outcome.decision.length.p50, outcome.num_output_tokens)
        x = self._length_features(request, task, num_prompt)
        for stats in outcome.stats:
            is_cut = stats.num_output_tokens >= request.sampling.max_tokens
            self.lengths.learn_one(x, LengthOutcome(stats.num_output_tokens, is_cut))

    # --- predicting ------------------------------------------------------------------------

    def length(
        self, request: GenerationRequest, task: TaskEstimate, num_prompt: int, room: int
    ) -> LengthEstimate:
        """Quantiles of the answer in tokens, never above `room` nor below what was asked for."""
        top = float(max(room, 1))
        if request.sampling.ignore_eos:
            return LengthEstimate(top, top)
        found = self.lengths.predict_one(self._length_features(request, task, num_prompt))
        low = float(max(request.sampling.min_tokens, 1))
        return LengthEstimate(*(min(top, max(low, value)) for value in (found.p50, found.p90)))

    def wait(self, num_prompt: int, load: LoadView) -> Quantiles | None:
        """TTFT in seconds, as learned; None where too few requests were seen."""
        if self._num_waits < _MIN_WAITS:
            return None
        return self.ttft.predict_one(self._wait_features(num_prompt, load))

    def experience(self, task: TaskEstimate, num_prompt: int, load: LoadView) -> Experience:
        """What a decision about such a request may build on."""
        return Experience(
            view=self.view,
            ttft=self.wait(num_prompt, load),
            acceptance_p50=self.acceptance_p50(task.label),
            incumbent=self._incumbents.get(task.label),
            explore_credit_s=self.explore_credit_s,
            min_steps=self.config.min_steps,
            min_drafting_steps=self.config.min_drafting_steps,
        )

    @property
    def explore_credit_s(self) -> float:
        """Seconds that may be spent on exploring now."""
        earned = _START_CREDIT_S + self._policy.explore_share * self.steps.busy_s
        self._spent_s = max(self._spent_s, earned - _MAX_CREDIT_S)
        return earned - self._spent_s

    @property
    def control_credit_s(self) -> float:
        """The same for controls, which wait until it has been earned: a new server's credit is for
        methods it has never tried, and so is what they spend first."""
        return self.explore_credit_s - _START_CREDIT_S

    def _length_features(
        self, request: GenerationRequest, task: TaskEstimate, num_prompt: int
    ) -> LengthFeatures:
        return LengthFeatures(
            task=None if task.is_mixed else task.label,
            num_prompt_tokens=num_prompt,
            max_tokens=request.sampling.max_tokens if request.has_explicit_max_tokens else None,
            caller=request.tenant,
            asked_tokens=asked_tokens(request.user_text),
        )

    def _wait_features(self, num_prompt: int, load: LoadView) -> WaitFeatures:
        step = self.view.step
        return WaitFeatures(
            num_prompt_tokens=num_prompt,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_queued=load.num_queued,
            requests_per_s=load.requests_per_s,
            prefill_s=None if step is None else prefill_s(self.view, num_prompt) or None,
        )

    # --- snapshots -------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Freeze what is known into `view`. False: nothing is new."""
        if not self._has_news:
            return False
        self._has_news = False
        self._num_refreshes += 1
        if self._num_refreshes % _FULL_REFRESH_EVERY == 0:
            self._stale |= set(self._curves)
        for key in self._stale:
            if key.policy in self._methods:
                self._curves[key] = self.acceptance_model.predict_one(key)
        self._stale.clear()
        step = self.steps.model.coefficients()
        policy = self._policy
        self.view = ModelView(
            version=self._num_refreshes,
            step=step if step.num_steps else None,
            curves=tuple(self._curves.values()),
            methods=dict(self._methods),
            num_steps={method: self.acceptance_model.num_steps(method) for method in self._methods},
            traffic=self.steps.meter.traffic(self._prompt_tokens, self._computed_tokens, self._output_tokens),
            num_drifts=self.steps.model.num_drifts,
            planner=PlannerSettings(
                is_following=policy.router == "rule",
                switch_margin=policy.switch_margin,
                probe_share=policy.probe_share,
                min_drafting_steps=self.config.min_drafting_steps,
            ),
        )
        return True

    def acceptance_p50(self, task: str) -> dict[str, float]:
        """By policy, for one task; policies without enough data are absent."""
        found = self._p50.get(task)
        if found is None:
            readings = (r for r in self.acceptance() if r.task == task)
            found = self._p50[task] = {r.policy: r.p50 for r in readings if r.p50 is not None}
        return found

    def acceptance(self) -> list[AcceptanceReading]:
        """Everything known of single requests, for the rules and /admin/state."""
        return [
            AcceptanceReading(
                policy,
                task,
                statistics.median(values) if len(values) >= self._policy.min_acceptance_samples else None,
                len(values),
            )
            for (policy, task), values in sorted(self._by_arm.items())
        ]

    def request_scores(self) -> dict[str, Score]:
        """How good TTFT, E2E and length were predicted, over the last requests."""
        return {name: window.score() for name, window in self._request_scores.items()}

    def report(self, answers_per_s: float) -> dict[str, Any]:
        """The live latency model, for /admin/state: how good, what coefficients, what follows."""
        scores = {kind: asdict(found) for kind, found in self.steps.scores().items()}
        decode = scores.pop("decode")
        step = self.view.step
        return {
            "r2": decode["r2"],
            "mape": decode["mape"],
            "repeat_mape": decode["repeat_mape"],
            "num_scored": decode["num"],
            "by_policy": scores,
            "num_steps": 0 if step is None else step.num_steps,
            "num_drifts": self.steps.model.num_drifts,
            "relative_spread": None if step is None else step.relative_spread,
            "coefficients": {} if step is None else with_units(coefficients(step)),
            "derived": derived(self.view, answers_per_s),
            "traffic": asdict(self.view.traffic),
            "requests": {name: asdict(found) for name, found in self.request_scores().items()},
            "explore_credit_s": self.explore_credit_s,
        }

    # --- state -----------------------------------------------------------------------------

    def states(self) -> dict[str, State]:
        """Of every estimator but the latency model, which belongs to one machine: `steps.model`."""
        return {
            "acceptance": self.acceptance_model.state(),
            "output_length": self.lengths.state(),
            "ttft": self.ttft.state() | {"num_outcomes": self._num_waits},
            "queue_wait": self.queue_wait.state(),
        }

    def restore(self, states: Mapping[str, State], step_latency: State | None) -> list[str]:
        """Go on from saved states; what cannot be used is left out and told in the answer."""
        faults = []

        def load(name: str, state: State | None) -> None:
            if state is None:
                return
            try:
                self._restore_one(name, state)
            except StateError as error:
                faults.append(f"{name}: {error}")

        for name in ("acceptance", "output_length", "ttft", "queue_wait"):
            load(name, states.get(name))
        load("step_latency", step_latency)
        self._has_news = True
        return faults

    def _restore_one(self, name: str, state: State) -> None:
        match name:
            case "acceptance":
                self.acceptance_model = Acceptance.from_state(state)
                self._stale |= set(self.acceptance_model.keys())
            case "output_length":
                self.lengths = OutputLength.from_state(state)
            case "ttft":
                self.ttft = Wait.from_state(state)
                self._num_waits = int(state.get("num_outcomes", 0))
            case "queue_wait":
                self.queue_wait = Wait.from_state(state)
            case _:
                self.steps.model = StepLatency.from_state(state)


def _towards(mean: float | None, value: float) -> float:
    return float(value) if mean is None else mean + _MEAN_SHARE * (value - mean)
