"""How long the next engine step takes, from the work in it (theory: "Online form").

    decode step   T = c0 + c_lead*L + c_seq*B + c_tok*N + c_kv*KV + c_win*W + c_sample*R   + drafters
    prefill step  T = p0 + p_tok*(prefill tokens) + p_dec*(other tokens) + p_kv*KV   + drafters
    a drafter     T = d0*calls + d_lead*L' + d_seq*sequences + d_tok*draft tokens + d_kv*draft KV
                      + d_fill*tokens read up on

Every coefficient is >= 0 and means what it says. The engine times each drafter apart, so target
and drafters are fitted apart and no coefficient has to explain the other's time. A step with any
prompt tokens in it is a prefill step. L is 1 where the step leads with the target's forward: what the
last step leaves to others (sending its tokens, on the same cores) delays whatever runs first, and where
a draft model's calls come first it is they that are delayed: then L' is 1. KV counts what is read, once
for each sequence; W, the sum of draft tokens times KV tokens, what a window's further tokens have to be
compared with: on processors that is arithmetic, and no cheaper for what is read already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Self

from router_models.base import State, StateError, check_header, finite, header
from router_models.robust_regression import RegressionSpec, RobustRegression
from router_models.types import (
    DraftCoefficients,
    DraftFeatures,
    Effect,
    Explanation,
    StepCoefficients,
    StepFeatures,
    StepPrediction,
    StepTiming,
)

_KIND, _VERSION = "step_latency", 10
_LONE_STEPS = 20.0  # in which one sequence drafted, from which on what it needs is read there alone

DECODE = RegressionSpec(
    names=("c0", "c_seq", "c_tok", "c_kv", "c_sample", "c_lead", "c_win"),
    scales=(1.0, 8.0, 16.0, 4096.0, 8.0, 4.0, 8192.0),
    knees=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
    knee_at=2,
)
PREFILL = RegressionSpec(
    names=("p0", "p_tok", "p_dec", "p_kv"), scales=(1.0, 256.0, 16.0, 4096.0), memory=200.0
)
DRAFT = RegressionSpec(
    names=("d0", "d_seq", "d_tok", "d_kv", "d_fill", "d_lead"),
    scales=(4.0, 8.0, 16.0, 4096.0, 256.0, 1.0),
)


def _target_row(x: StepFeatures) -> tuple[float, ...]:
    if x.num_prefill_tokens > 0:
        return (1.0, x.num_prefill_tokens, max(x.num_tokens - x.num_prefill_tokens, 0.0), x.num_kv_tokens)
    leads = not any(d.num_calls for d in x.drafts)
    work = (x.num_sequences, x.num_tokens, x.num_kv_tokens, x.num_sampled_rows, float(leads))
    return (1.0, *work, x.num_window_kv_tokens)


def _draft_row(d: DraftFeatures) -> tuple[float, ...]:
    work = (d.num_calls, d.num_sequences, d.num_draft_tokens, d.num_kv_tokens, d.num_fill_tokens)
    return (*work, float(d.num_calls > 0))


@dataclass
class _Ratios:
    """Running sums that tell how many calls a granted draft token costs, how much KV it reads, and how
    much of a sequence a drafter reads that has not drafted for it.

    Calls serve the whole batch, as many as its deepest draft needs: only steps in which one
    sequence drafts tell what one needs exactly, and they are preferred.
    """

    calls: float = 0.0
    depth: float = 0.0
    asked: float = 0.0  # steps with any calls
    drafting: float = 0.0  # sequences,
    steps: float = 0.0  # of so many steps
    lone_calls: float = 0.0
    lone_depth: float = 0.0
    lone_asked: float = 0.0
    lone_steps: float = 0.0
    kv: float = 0.0
    target_kv: float = 0.0  # of the drafting sequences, once for every draft token
    fill: float = 0.0
    begun: float = 0.0  # tokens of the sequences whose first drafts these were read for

    def observe(self, d: DraftFeatures, target_kv_per_sequence: float) -> None:
        keep = 0.99
        if d.num_begun_tokens > 0:
            self.fill = keep * self.fill + min(d.num_begun_fill, d.num_begun_tokens)
            self.begun = keep * self.begun + d.num_begun_tokens
        # Over what was granted: one that is not sure of its first token has called for nothing.
        granted = d.num_granted_tokens or d.num_draft_tokens
        if d.num_sequences <= 0 or granted <= 0:
            return
        # A drafter that only reads up makes no calls for drafts. One that is asked now and then has always
        # something to read up on when it is.
        if d.num_fill_tokens > 0 and (d.num_draft_tokens == 0 or d.num_begun_tokens > 0):
            return
        depth = granted / d.num_sequences
        self.calls = keep * self.calls + d.num_calls
        self.depth = keep * self.depth + depth
        self.asked = keep * self.asked + (d.num_calls > 0)
        self.drafting = keep * self.drafting + d.num_sequences
        self.steps = keep * self.steps + 1.0
        if d.num_sequences == 1:
            self.lone_calls = keep * self.lone_calls + d.num_calls
            self.lone_depth = keep * self.lone_depth + depth
            self.lone_asked = keep * self.lone_asked + (d.num_calls > 0)
            self.lone_steps = keep * self.lone_steps + 1.0
        if d.num_fill_tokens > 0:
            return
        self.kv = keep * self.kv + d.num_kv_tokens
        self.target_kv = keep * self.target_kv + target_kv_per_sequence * d.num_draft_tokens

    @property
    def calls_per_token(self) -> float:
        if self._is_told_alone:
            return self.lone_calls / self.lone_depth
        return self._of_one(self.calls / self.depth) if self.depth else 0.0

    @property
    def asked_share(self) -> float:
        if self._is_told_alone:
            return self.lone_asked / self.lone_steps
        return self._of_one(self.asked / self.steps) if self.steps else 1.0

    @property
    def _is_told_alone(self) -> bool:
        return self.lone_steps >= _LONE_STEPS or self.lone_steps == self.steps > 0

    def _of_one(self, of_all: float) -> float:
        """One sequence's chance, from that of any in a mean step (see `DraftCoefficients.calls`)."""
        quiet: float = (1.0 - min(of_all, 1.0)) ** (self.steps / self.drafting)
        return 1.0 - quiet

    @property
    def fill_per_token(self) -> float:
        """Below 1 where a drafter reads no more than a window, or finds a prefix in a cache of its own."""
        return self.fill / self.begun if self.begun else 1.0

    @property
    def kv_per_target_kv(self) -> float:
        return self.kv / self.target_kv if self.target_kv else 0.0


class StepLatency:
    """Learns from step records, predicts steps. One per model and engine."""

    def __init__(self) -> None:
        self._decode = RobustRegression(DECODE)
        self._prefill = RobustRegression(PREFILL)
        self._drafters: dict[str, RobustRegression] = {}
        self._ratios: dict[str, _Ratios] = {}

    @property
    def num_drifts(self) -> int:
        """How often the machine was found to have changed its speed."""
        models = [self._decode, self._prefill, *self._drafters.values()]
        return sum(m.num_drifts for m in models)

    def _target(self, x: StepFeatures) -> RobustRegression:
        return self._prefill if x.num_prefill_tokens > 0 else self._decode

    def learn_one(self, x: StepFeatures, y: StepTiming) -> None:
        """Take in one step that ran. Raises ValueError, unchanged, for impossible numbers."""
        _check(x, y)
        for d, seconds in zip(x.drafts, y.draft_s, strict=True):
            if d.method not in self._drafters:
                self._drafters[d.method] = RobustRegression(DRAFT)
                self._ratios[d.method] = _Ratios()
            if any(_draft_row(d)):
                self._drafters[d.method].observe(_draft_row(d), seconds)
            self._ratios[d.method].observe(d, x.num_kv_tokens / max(x.num_sequences, 1.0))
        self._target(x).observe(_target_row(x), max(y.seconds - sum(y.draft_s), 0.0))

    def predict_one(self, x: StepFeatures) -> StepPrediction:
        """Seconds this step will take. Zero, with `is_prior`, before the first step of its kind."""
        model = self._target(x)
        target_s, target_sd = model.predict(_target_row(x))
        draft_s, variance = 0.0, target_sd**2
        for d in x.drafts:
            if d.method in self._drafters:
                mean, sd = self._drafters[d.method].predict(_draft_row(d))
                draft_s += mean
                variance += sd**2
        is_prior = model.num_outcomes == 0 or any(d.method not in self._drafters for d in x.drafts)
        return StepPrediction(target_s + draft_s, variance**0.5, target_s, draft_s, is_prior)

    def explain_one(self, x: StepFeatures) -> Explanation:
        """One term per coefficient, in seconds."""
        model = self._target(x)
        row = model.expand(_target_row(x), model.knee)
        effects = _effects("", model, row.tolist())
        for d in x.drafts:
            if d.method in self._drafters:
                effects += _effects(f"{d.method}.", self._drafters[d.method], _draft_row(d))
        return Explanation(tuple(effects), sum(e.effect for e in effects), "s")

    def coefficients(self) -> StepCoefficients:
        """The model as plain numbers: cheap to hold, safe to share, all a planner needs."""
        c = dict(zip(DECODE.all_names, self._decode.coefficients().tolist(), strict=True))
        p = dict(zip(PREFILL.all_names, self._prefill.coefficients().tolist(), strict=True))
        drafters = {name: self._draft_coefficients(name) for name in self._drafters}
        # A delay that draft calls take upon themselves does not vanish by that: what they spare the target's
        # forward is no more than they have of it. (Plain steps of a small batch are often those just after
        # somebody came or went, when others use the cores; that is not for drafts to save.)
        leads = [d.d_lead_s for d in drafters.values() if d.has_calls]
        return StepCoefficients(
            c0_s=c["c0"],
            c_seq_s=c["c_seq"],
            c_tok_s=c["c_tok"],
            c_kv_s=c["c_kv"],
            c_sample_s=c["c_sample"],
            c_lead_s=min(c["c_lead"], max(leads)) if leads else c["c_lead"],
            c_win_s=c["c_win"],
            c_tok_above_s=c["c_tok"] if self._decode.knee is None else c["c_tok_above"],
            knee_tokens=self._decode.knee,
            p0_s=p["p0"],
            p_tok_s=p["p_tok"],
            p_dec_s=p["p_dec"],
            p_kv_s=p["p_kv"],
            drafters=drafters,
            relative_spread=self._decode.spread,
            num_steps=self._decode.num_outcomes,
        )

    def _draft_coefficients(self, name: str) -> DraftCoefficients:
        d0, d_seq, d_tok, d_kv, d_fill, d_lead = self._drafters[name].coefficients().tolist()
        r = self._ratios[name]
        return DraftCoefficients(
            d0_s=d0,
            d_seq_s=d_seq,
            d_tok_s=d_tok,
            d_kv_s=d_kv,
            d_fill_s=d_fill,
            d_lead_s=d_lead,
            calls_per_token=r.calls_per_token,
            kv_per_target_kv=r.kv_per_target_kv,
            fill_per_token=r.fill_per_token,
            asked_share=r.asked_share,
        )

    def state(self) -> State:
        """See `Estimator.state`."""
        return {
            **header(_KIND, _VERSION),
            "decode": self._decode.state(),
            "prefill": self._prefill.state(),
            "drafters": {
                name: {"regression": m.state(), "ratios": asdict(self._ratios[name])}
                for name, m in self._drafters.items()
            },
        }

    @classmethod
    def from_state(cls, state: State) -> Self:
        """See `Estimator.from_state`."""
        check_header(state, _KIND, _VERSION)
        model = cls()
        try:
            model._decode.load(state["decode"])
            model._prefill.load(state["prefill"])
            for name, part in state["drafters"].items():
                regression = RobustRegression(DRAFT)
                regression.load(part["regression"])
                model._drafters[name] = regression
                told = {k.name: finite(k.name, float(part["ratios"][k.name])) for k in fields(_Ratios)}
                model._ratios[name] = _Ratios(**told)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"{_KIND}: {error}") from error
        return model


def _check(x: StepFeatures, y: StepTiming) -> None:
    """Refuse a record before any part of the model has learned from it."""
    if len(x.drafts) != len(y.draft_s):
        raise ValueError(f"{len(x.drafts)} drafters but {len(y.draft_s)} draft times")
    values = {"seconds": y.seconds, **{f"draft_s[{i}]": s for i, s in enumerate(y.draft_s)}}
    values.update({f"regressor {i}": v for i, v in enumerate(_target_row(x))})
    for d in x.drafts:
        row = (*_draft_row(d), d.num_begun_tokens, d.num_begun_fill)
        values.update({f"{d.method} regressor {i}": v for i, v in enumerate(row)})
    for name, value in values.items():
        if finite(name, value) < 0:
            raise ValueError(f"{name} must not be negative, got {value}")


def _effects(prefix: str, model: RobustRegression, row: Sequence[float]) -> list[Effect]:
    triples = zip(model.spec.all_names, row, model.coefficients_now().tolist(), strict=True)
    return [Effect(prefix + name, value, c, value * c) for name, value, c in triples if value or not prefix]


__all__ = ["DECODE", "DRAFT", "PREFILL", "StepLatency"]
