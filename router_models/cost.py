"""From step coefficients to decisions: the formulas of Kong et al. 2026 (arXiv:2605.15051).

Pure functions. K draft tokens a step; E expected tokens a step; g output tokens; P prompt
tokens; B requests in flight, the request itself included; lam requests per second. Seconds.

    L = C1 + B*C2,  B = lam*L,  hence  L = C1 / (1 - lam*C2),  lam_max = 1/C2
    C1 = c1p + (g/E)*(c1v + K*c1d)      C2 = c2p + (g/E)*(c2v + K*c2d)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router_models.types import DraftCoefficients, StepCoefficients

_NO_DRAFTER = DraftCoefficients()


@dataclass(frozen=True, slots=True)
class Workload:
    """A typical request: prompt and output length in tokens, and of the prompt what has to be computed
    (None: all), for the rest is found in the prefix cache."""

    prompt_tokens: float
    output_tokens: float
    computed_tokens: float | None = None

    @property
    def kv_tokens(self) -> float:
        """Mean KV length while decoding: P + g/2."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class RequestCost:
    """`L = c1_s + B * c2_s`: seconds whatever the load, and seconds per request in flight. (Where a draft
    does not always need the draft model, c1_s is that of as many in flight as `request_cost` was told.)"""

    c1_s: float
    c2_s: float

    @property
    def max_requests_per_s(self) -> float:
        """lam_max: where latency diverges."""
        return math.inf if self.c2_s <= 0 else 1.0 / self.c2_s

    def in_batch_s(self, batch: float) -> float:
        """L with `batch` in flight; a server that takes no more than these does `batch / L` a second."""
        return self.c1_s + batch * self.c2_s

    def latency_s(self, requests_per_s: float) -> float:
        """L at an arrival rate; infinite at and beyond saturation."""
        slack = 1.0 - requests_per_s * self.c2_s
        return self.c1_s / slack if slack > 0 else math.inf


def _token_slope_s(c: StepCoefficients, num_tokens: float) -> float:
    """Seconds per token, averaged from 0 to `num_tokens` tokens in the forward."""
    return _tokens_s(c, num_tokens) / num_tokens if num_tokens > 0 else c.c_tok_s


def _tokens_s(c: StepCoefficients, num_tokens: float) -> float:
    if c.knee_tokens is None or num_tokens <= c.knee_tokens:
        return c.c_tok_s * num_tokens
    return c.c_tok_s * c.knee_tokens + c.c_tok_above_s * (num_tokens - c.knee_tokens)


def step_s(
    c: StepCoefficients, policy: str, batch: float, depth: float, kv_tokens: float, sampled: float = 0.0
) -> float:
    """Seconds of one decode step: `batch` sequences, each with `depth` draft tokens.

    `kv_tokens` is the mean KV length of a sequence, `sampled` the share of sampled sequences.
    """
    tokens = batch * (1 + depth)
    seconds = c.c0_s + c.c_seq_s * batch + _tokens_s(c, tokens) + c.c_kv_s * batch * kv_tokens
    seconds += c.c_sample_s * sampled * tokens + c.c_win_s * batch * depth * kv_tokens
    d = c.drafters.get(policy, _NO_DRAFTER)
    asked = d.asked(batch) if depth > 0 else 0.0
    seconds += asked * d.d_lead_s + (1 - asked) * c.c_lead_s
    if depth <= 0:
        return seconds
    seconds += d.d0_s * d.calls(depth, batch) + d.d_seq_s * batch
    return seconds + batch * depth * (d.d_tok_s + d.d_kv_s * d.kv_per_target_kv * kv_tokens)


def request_cost(
    c: StepCoefficients,
    policy: str,
    depth: float,
    expected_tokens: float,
    load: Workload,
    batch: float = 1.0,
    granted: float | None = None,
    sharing: float | None = None,
) -> RequestCost:
    """C1 and C2 of a request under one policy and depth, the draft tokens of a mean step; `granted` are
    those it is allowed (None: as many), for which a draft model is called.

    `batch` says at which load the slope in tokens is taken; it matters only where there is a knee. `sharing`
    sequences share the draft model's calls (None: `batch`).
    """
    d = c.drafters.get(policy, _NO_DRAFTER)
    num_steps = load.output_tokens / max(expected_tokens, 1.0)
    slope = _token_slope_s(c, batch * (1 + depth))
    sharing = batch if sharing is None else sharing
    asked = d.asked(sharing) if depth > 0 else 0.0
    calls = d.calls(depth if granted is None else granted, sharing)
    lead_s = asked * d.d_lead_s + (1 - asked) * c.c_lead_s
    c1 = c.p0_s + num_steps * (c.c0_s + lead_s + d.d0_s * calls)
    kv_s = c.c_kv_s * load.kv_tokens
    per_step = c.c_seq_s + slope * (1 + depth) + kv_s + c.c_win_s * depth * load.kv_tokens
    if depth > 0:
        per_step += d.d_seq_s + depth * (d.d_tok_s + d.d_kv_s * d.kv_per_target_kv * load.kv_tokens)
    computed = load.prompt_tokens if load.computed_tokens is None else load.computed_tokens
    return RequestCost(c1, c.p_tok_s * computed + num_steps * per_step)


def speedup(spec: RequestCost, plain: RequestCost, requests_per_s: float) -> float | None:
    """S = (1/C1R) * (1 - r*C2R)/(1 - r), r = lam*C2_plain; None at or beyond plain saturation."""
    r = requests_per_s * plain.c2_s
    if r >= 1 or spec.c1_s <= 0:
        return None
    return plain.latency_s(requests_per_s) / spec.latency_s(requests_per_s)


def crossover(spec: RequestCost, plain: RequestCost) -> float | None:
    """r* = (1 - C1R)/(C2R - C1R): the load, as a share of plain capacity, where speculation stops paying.

    None where the curves do not cross: one of the two is better at every load.
    """
    if plain.c1_s <= 0 or plain.c2_s <= 0:
        return None
    c1r, c2r = spec.c1_s / plain.c1_s, spec.c2_s / plain.c2_s
    return (1 - c1r) / (c2r - c1r) if c1r < 1 < c2r else None


def floor_tokens(
    c: StepCoefficients, policy: str, batch: float, depth: float, kv_tokens: float, sampled: float = 0.0
) -> float | None:
    """floor(B, K): the E that speculation must reach, T_spec(B, K) / T_plain(B). Above K+1: shut the arm.

    None before anything is known of the target's steps.
    """
    plain = step_s(c, policy, batch, 0, kv_tokens, sampled)
    return step_s(c, policy, batch, depth, kv_tokens, sampled) / plain if plain > 0 else None


def floor_acceptance(floor: float, depth: int) -> float | None:
    """The per-token acceptance a at which (1 - a^(K+1))/(1 - a) reaches `floor`; None: none does."""
    if floor > depth + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        a = (low + high) / 2
        if sum(a**j for j in range(depth + 1)) < floor:
            low = a
        else:
            high = a
    return high


def best_depth(costs: dict[int, RequestCost], requests_per_s: float) -> int:
    """argmin over K of L at this rate; of C2 where every K is saturated."""
    stable = {k: cost for k, cost in costs.items() if requests_per_s * cost.c2_s < 1}
    if stable:
        return min(stable, key=lambda k: (stable[k].latency_s(requests_per_s), k))
    return min(costs, key=lambda k: (costs[k].c2_s, k))
