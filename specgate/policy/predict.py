"""What a request will cost under a policy, term by term. Pure: a view and a few facts in, numbers out.

    E2E = TTFT + (g - 1) / E(K) * T_step(K, B) + what the drafter needs to read the prompt

g output tokens, E tokens a step, B sequences decoding together. T_step is that of a batch whose
sequences all run under the policy in question: so a policy is preferred only if it would pay for
everybody, and a request does not save its own time at the cost of its neighbours'. What the load
does beside (prompts of others in between, pauses between steps) is as measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.types import BASELINE
from router_models.types import AcceptanceCurve, DraftCoefficients, Quantiles, StepCoefficients
from specgate.policy.view import ModelView
from specgate.types import Prediction, Term

_NO_DRAFTER = DraftCoefficients()


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What of a request matters to its cost."""

    prompt_tokens: int
    output_tokens: float
    is_sampled: bool = False
    batch: int = 1  # sequences that decode together, this one included
    ttft: Quantiles | None = None  # as learned, in seconds; None: from the latency model alone


@dataclass(frozen=True, slots=True)
class Forecast:
    """A prediction with its terms, which add up to `predicted.e2e_ms`."""

    predicted: Prediction
    terms: tuple[Term, ...]
    step_s: float  # one decode step
    tokens_per_step: float  # of this request

    @property
    def batch_tokens_per_s(self) -> float:
        """Useful tokens a second of one sequence; of the whole batch it is `batch` times as much."""
        return self.tokens_per_step / self.step_s if self.step_s > 0 else math.inf


def prefill_s(view: ModelView, prompt_tokens: float) -> float:
    """Seconds of the steps that compute a prompt; 0 where no prefill step was seen."""
    return sum(value * coefficient for _, value, coefficient, _ in _prefill(view, prompt_tokens))


def catch_up_s(step: StepCoefficients, method: str, num_tokens: float) -> float:
    """Seconds a drafter with a cache of its own needs for a sequence of `num_tokens` tokens that it has not
    drafted for, of which it reads what it usually reads.

    Until that was measured: its share of the target's own time per prompt token, that share being
    what a draft call costs beside a target step.
    """
    drafter = step.drafters.get(method, _NO_DRAFTER)
    if not drafter.has_calls:
        return 0.0
    num_tokens *= drafter.fill_per_token
    if drafter.d_fill_s > 0:
        return num_tokens * drafter.d_fill_s
    plain = step.c0_s + step.c_seq_s + step.c_tok_s
    share = min(drafter.d0_s / plain, 1.0) if plain > 0 else 0.0
    return num_tokens * step.p_tok_s * share


_Row = tuple[str, float, float, str]  # name, value, coefficient in seconds, unit of the value


def _prefill(view: ModelView, prompt_tokens: float) -> list[_Row]:
    step = view.step
    if step is None:
        return []
    chunks = math.ceil(max(prompt_tokens, 1) / view.traffic.max_chunk_tokens)
    kv = prompt_tokens * (chunks + 1) / 2  # each chunk reads what the chunks before it left
    return [
        ("prompt: per step (p0)", float(chunks), step.p0_s, "steps"),
        ("prompt: per token (p_tok)", float(prompt_tokens), step.p_tok_s, "tokens"),
        ("prompt: per KV token (p_kv)", kv, step.p_kv_s, "tokens"),
    ]


def _decode(view: ModelView, method: str, curve: AcceptanceCurve | None, depth: int,
            shape: RequestShape) -> list[_Row]:  # fmt: skip
    """One decode step: (name, amount of work in a step, seconds per unit, unit)."""
    step = view.step
    assert step is not None
    batch = float(shape.batch)
    drafted = curve.drafted_tokens[depth] if curve is not None else 0.0
    own_kv = shape.prompt_tokens + shape.output_tokens / 2
    others_kv = view.traffic.kv_tokens if view.traffic.kv_tokens is not None else own_kv
    kv = own_kv + (batch - 1) * others_kv
    tokens = batch * (1 + drafted)
    sampled = float(shape.is_sampled) + (batch - 1) * view.traffic.sampled_share
    knee = math.inf if step.knee_tokens is None else step.knee_tokens
    below = _below(knee, shape.batch, depth, drafted)
    d = step.drafters.get(method, _NO_DRAFTER)
    asked = d.asked(batch) if curve is not None and depth > 0 else 0.0
    rows = [
        ("step (c0)", 1.0, step.c0_s, "steps"),
        ("target's forward leads (c_lead)", 1.0 - asked, step.c_lead_s, "steps"),
        ("sequences (c_seq)", batch, step.c_seq_s, "sequences"),
        ("tokens (c_tok)", below, step.c_tok_s, "tokens"),
        ("tokens above the knee (c_tok_above)", tokens - below, step.c_tok_above_s, "tokens"),
        ("KV (c_kv)", kv, step.c_kv_s, "tokens"),
        ("windows over KV (c_win)", drafted * kv, step.c_win_s, "tokens"),
        ("sampled rows (c_sample)", sampled * (1 + drafted), step.c_sample_s, "rows"),
        ("between steps", 1.0, view.traffic.between_steps_s, "steps"),
        ("prompts of others", 1.0, view.traffic.prefill_extra_s, "steps"),
    ]
    if curve is not None and depth > 0:
        rows += [
            (f"{method}: its calls lead (d_lead)", asked, d.d_lead_s, "steps"),
            (f"{method}: calls (d0)", d.calls(depth, batch), d.d0_s, "calls"),
            (f"{method}: sequences (d_seq)", batch, d.d_seq_s, "sequences"),
            (f"{method}: draft tokens (d_tok)", batch * drafted, d.d_tok_s, "tokens"),
            (f"{method}: KV (d_kv)", d.kv_per_target_kv * drafted * kv, d.d_kv_s, "tokens"),
        ]
    return rows


def _below(knee: float, batch: int, depth: int, drafted: float) -> float:
    """Mean number of a step's tokens up to the knee. Each of `batch` sequences finds a draft of
    `depth` tokens or none, `drafted` on average."""
    if depth <= 0 or knee <= batch or knee >= batch * (1 + depth):
        return min(batch * (1 + drafted), knee)
    found = min(drafted / depth, 1.0)
    chance, mean = (1 - found) ** batch, 0.0
    if chance == 0.0:
        return min(batch * (1 + drafted), knee)
    for drafts in range(batch + 1):  # binomial
        mean += chance * min(batch + drafts * depth, knee)
        chance *= (batch - drafts) / (drafts + 1) * found / max(1 - found, 1e-300)
    return mean


def forecast(
    view: ModelView,
    method: str,
    depth: int,
    curve: AcceptanceCurve | None,
    shape: RequestShape,
    expected_tokens: float | None = None,
) -> Forecast:
    """The request under `method` with `depth` draft tokens a step.

    `curve` is None for plain decoding. `expected_tokens` replaces the curve's mean (an optimist's
    view). Needs `view.step`.
    """
    step = view.step
    assert step is not None
    per_step = 1.0
    if curve is not None and depth > 0:
        per_step = curve.expected_tokens[depth] if expected_tokens is None else expected_tokens
    num_steps = max(shape.output_tokens - 1, 0.0) / per_step
    head = _prefill(view, shape.prompt_tokens)
    head_s = sum(value * coefficient for _, value, coefficient, _ in head)
    rows = [(name, value, coefficient, unit) for name, value, coefficient, unit in head]
    if shape.ttft is not None:
        rows.append(("beside that, as TTFTs were (queue, cache)", 1.0, shape.ttft.p50 - head_s, "requests"))
    ttft_s = head_s if shape.ttft is None else shape.ttft.p50
    body = _decode(view, method, curve, depth, shape)
    step_s = sum(value * coefficient for _, value, coefficient, _ in body)
    rows += [(name, num_steps * value, coefficient, unit) for name, value, coefficient, unit in body]
    if depth > 0 and method != BASELINE:
        # While it decodes, each of its neighbours is followed by another, and all wait for the reading.
        share = step.drafters.get(method, _NO_DRAFTER).fill_per_token
        read = share * shape.prompt_tokens * shape.batch
        each_s = catch_up_s(step, method, 1.0 / share) if share else 0.0
        rows.append((f"{method} reads prompts", read, each_s, "tokens"))
    terms = tuple(
        Term(name, value, coefficient * 1e3, value * coefficient * 1e3, unit)
        for name, value, coefficient, unit in rows
        if value and coefficient
    )
    e2e_ms = math.fsum(term.effect_ms for term in terms)
    gaps = shape.output_tokens - 1
    predicted = Prediction(
        ttft_ms=ttft_s * 1e3,
        tpot_ms=(e2e_ms - ttft_s * 1e3) / gaps if gaps > 0 else None,
        e2e_ms=e2e_ms,
        output_tokens=shape.output_tokens,
    )
    return Forecast(predicted, terms, step_s, per_step)
