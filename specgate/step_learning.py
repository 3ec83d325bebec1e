"""Engine steps in: the latency model, how well it predicted each step beforehand, and the traffic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from engine.types import BASELINE, DraftWork, StepRecord
from router_models.step_latency import StepLatency
from router_models.types import DraftFeatures, StepFeatures, StepTiming
from specgate.policy.view import Traffic
from specgate.scores import Score, ScoreWindow, score

PREFILL = "prefill"
_MIN_SPACING_S = 0.03  # steps of one kind that follow faster are only counted: learning costs 0.3 ms
_TRAFFIC_MEMORY_S = 15.0
_PRIOR_STEPS = 10.0  # steps without other requests' prompts, before any was seen
_MAX_GAP_S, _MAX_GAP_SHARE = 0.005, 0.3  # longer pauses between steps are idleness
_KV_GRAIN = 0.05  # steps whose KV lengths differ by less are equal work


def features_of(record: StepRecord) -> StepFeatures:
    """The work of a step, as the latency model sees it."""
    return StepFeatures(
        num_sequences=record.num_decode_sequences,
        num_tokens=record.num_tokens,
        num_kv_tokens=record.num_kv_tokens,
        num_prefill_tokens=record.num_prefill_tokens,
        num_sampled_rows=record.num_sampled_rows,
        num_window_kv_tokens=record.num_window_kv_tokens,
        drafts=tuple(map(_draft_features, record.drafts)),
    )


def _draft_features(work: DraftWork) -> DraftFeatures:
    return DraftFeatures(
        work.method,
        work.num_calls,
        work.num_sequences,
        work.num_draft_tokens,
        work.num_kv_tokens,
        work.num_fill_tokens,
        work.num_begun_tokens,
        work.num_begun_fill,
        work.num_granted_tokens,
    )


def kind_of(record: StepRecord) -> str:
    """What a step is scored under: prefill, baseline, or the drafters that worked in it."""
    if record.num_prefill_tokens:
        return PREFILL
    return "+".join(sorted(work.method for work in record.drafts)) or BASELINE


@dataclass(slots=True)
class _Mean:
    """A mean that fades with time."""

    total: float = 0.0
    weight: float = 0.0

    def fade(self, keep: float) -> None:
        self.total *= keep
        self.weight *= keep

    def add(self, value: float, weight: float = 1.0) -> None:
        self.total += value * weight
        self.weight += weight

    def value(self, default: float = 0.0, prior: float = 0.0) -> float:
        weight = self.weight + prior
        return (self.total + default * prior) / weight if weight > 1e-9 else default


class TrafficMeter:
    """Averages over the last seconds' steps."""

    def __init__(self) -> None:
        self._gap = _Mean()
        self._extra = _Mean()
        self._sampled = _Mean()
        self._kv = _Mean()
        self._chunk = 0
        self._ended_s: float | None = None

    def observe(self, record: StepRecord, plain_s: float | None) -> None:
        """`plain_s`: what the step would have taken without its prompt tokens, where that is known."""
        if self._ended_s is not None:
            gap_s = record.started_s - self._ended_s
            keep = math.exp(-max(gap_s + record.seconds, 0.0) / _TRAFFIC_MEMORY_S)
            for mean in (self._gap, self._extra, self._sampled, self._kv):
                mean.fade(keep)
            if 0 <= gap_s < max(_MAX_GAP_S, _MAX_GAP_SHARE * record.seconds):
                self._gap.add(gap_s)
        self._ended_s = record.started_s + record.seconds
        self._chunk = max(self._chunk, record.num_prefill_tokens)
        if not record.num_decode_sequences:
            return
        if record.num_prefill_tokens:
            if plain_s is not None:
                self._extra.add(max(record.seconds - plain_s, 0.0))
            return
        self._extra.add(0.0)
        if record.num_logits_rows:
            self._sampled.add(record.num_sampled_rows / record.num_logits_rows)
        self._kv.add(record.num_kv_tokens / record.num_decode_sequences)

    @property
    def kv_per_sequence(self) -> float:
        """KV tokens per decoding sequence; 0 where nothing ran."""
        return self._kv.value()

    def traffic(
        self, prompt_tokens: float | None, computed_tokens: float | None, output_tokens: float | None
    ) -> Traffic:
        """As of now; the means per request are the caller's."""
        return Traffic(
            between_steps_s=self._gap.value(),
            prefill_extra_s=self._extra.value(prior=_PRIOR_STEPS),
            sampled_share=self._sampled.value(),
            kv_tokens=self._kv.value() if self._kv.weight > 1e-9 else None,
            prompt_tokens=prompt_tokens,
            computed_tokens=computed_tokens,
            output_tokens=output_tokens,
            max_chunk_tokens=float(self._chunk or 512),
        )


class StepLearner:
    """The one writer of a model's `StepLatency`."""

    def __init__(
        self, on_error: Callable[[float, float], None] = lambda _predicted_s, _measured_s: None
    ) -> None:
        """`on_error` gets each prediction and what was measured, in seconds."""
        self.model = StepLatency()
        self.meter = TrafficMeter()
        self.busy_s = 0.0  # time spent in steps
        self._on_error = on_error
        self._scores: dict[str, ScoreWindow] = {}
        self._last_s: dict[str, float] = {}

    def observe(self, record: StepRecord) -> None:
        """One step, in order. It is predicted and scored before it is learned."""
        work = features_of(record)
        if record.is_warm_up:
            self.model.learn_one(work, _timing(record))
            return
        self.busy_s += record.seconds
        self.meter.observe(record, self._plain_s(record))
        kind = kind_of(record)
        if record.started_s - self._last_s.get(kind, -math.inf) < _MIN_SPACING_S:
            return
        self._last_s[kind] = record.started_s
        predicted = self.model.predict_one(work)
        if not predicted.is_prior:
            window = self._scores.setdefault(kind, ScoreWindow())
            window.add(predicted.seconds, record.seconds, _equal_work(work))
            self._on_error(predicted.seconds, record.seconds)
        self.model.learn_one(work, _timing(record))

    def _plain_s(self, record: StepRecord) -> float | None:
        """A mixed step's decode part on its own."""
        if not record.num_prefill_tokens or not record.num_decode_sequences:
            return None
        batch = record.num_decode_sequences
        num_tokens = max(record.num_tokens - record.num_prefill_tokens, batch)
        plain = StepFeatures(
            num_sequences=batch,
            num_tokens=num_tokens,
            num_kv_tokens=batch * self.meter.kv_per_sequence,
            drafts=tuple(map(_draft_features, record.drafts)),
            num_window_kv_tokens=(num_tokens - batch) * self.meter.kv_per_sequence,
        )
        predicted = self.model.predict_one(plain)
        return None if predicted.is_prior else predicted.seconds

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of step that were scored."""
        return tuple(sorted(self._scores))

    def window(self, kind: str) -> list[tuple[float, float]]:
        """(predicted, actual) seconds of the last steps of a kind, oldest first."""
        found = self._scores.get(kind)
        return found.pairs() if found is not None else []

    def scores(self) -> dict[str, Score]:
        """By kind of step, over the last window; `decode` is all but prefill steps together."""
        windows = self._scores
        pairs = [pair for kind, window in windows.items() if kind != PREFILL for pair in window.pairs()]
        each = {kind: window.score() for kind, window in sorted(windows.items())}
        repeats = [r for kind, one in each.items() if kind != PREFILL if (r := one.repeat_mape) is not None]
        mean = sum(repeats) / len(repeats) if repeats else None
        return {"decode": score(pairs, mean)} | each


def _timing(record: StepRecord) -> StepTiming:
    return StepTiming(record.seconds, tuple(work.seconds for work in record.drafts))


def _equal_work(work: StepFeatures) -> tuple[float, ...]:
    kv = math.floor(math.log(max(work.num_kv_tokens, 1.0)) / _KV_GRAIN)
    drafts = (
        value
        for d in work.drafts
        for value in (d.num_calls, d.num_sequences, d.num_draft_tokens, d.num_fill_tokens)
    )
    return (work.num_sequences, work.num_tokens, work.num_prefill_tokens, work.num_sampled_rows, kv, *drafts)
