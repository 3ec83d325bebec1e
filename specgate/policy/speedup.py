"""What the fitted coefficients say about each policy: C1, C2, their ratios, r*, lam_max and floors.

The formulas are in `router_models.cost` (Kong et al. 2026, arXiv:2605.15051); here they are
evaluated for the traffic of the day, for /admin/state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.types import BASELINE
from router_models.cost import (
    RequestCost,
    Workload,
    crossover,
    floor_acceptance,
    floor_tokens,
    request_cost,
    speedup,
)
from router_models.types import AcceptanceCurve, StepCoefficients
from specgate.policy.view import CurveBook, ModelView

BATCHES = (1, 2, 4, 8, 16, 32)
SATURATED = 16.0  # sequences at which a token's price is taken for C2: capacity is decided under load
UNITS = {
    "c0": "s per decode step",
    "c_lead": "s per decode step without draft calls before it",
    "c_seq": "s per decoding sequence",
    "c_tok": "s per token in the forward",
    "c_tok_above": "s per token beyond the knee",
    "knee": "tokens",
    "c_kv": "s per KV token",
    "c_win": "s per draft token and KV token of its sequence",
    "c_sample": "s per sampled row",
    "p0": "s per prefill step",
    "p_tok": "s per prompt token",
    "p_dec": "s per other token in a prefill step",
    "p_kv": "s per KV token in a prefill step",
    "d0": "s per draft call",
    "d_lead": "s per decode step that its calls lead",
    "d_seq": "s per drafting sequence",
    "d_tok": "s per draft token",
    "d_kv": "s per KV token of the drafter",
    "d_fill": "s per context token the drafter reads up on",
    "calls_per_token": "draft calls of one sequence per granted draft token",
    "asked_share": "share of one sequence's drafts with any calls",
    "kv_per_target_kv": "drafter KV tokens per draft token and target KV token",
    "fill_per_token": "share of a sequence that the drafter reads up on before its first draft",
}
_TYPICAL = Workload(prompt_tokens=200.0, output_tokens=100.0)


def coefficients(step: StepCoefficients) -> dict[str, float]:
    """By name, drafters as `<method>.<name>`; the knee only where there is one."""
    named = {
        "c0": step.c0_s, "c_lead": step.c_lead_s,
        "c_seq": step.c_seq_s, "c_tok": step.c_tok_s, "c_tok_above": step.c_tok_above_s,
        "c_kv": step.c_kv_s, "c_win": step.c_win_s, "c_sample": step.c_sample_s,
        "p0": step.p0_s, "p_tok": step.p_tok_s, "p_dec": step.p_dec_s, "p_kv": step.p_kv_s,
    }  # fmt: skip
    if step.knee_tokens is not None:
        named["knee"] = step.knee_tokens
    for method, d in step.drafters.items():
        own = {
            "d0": d.d0_s, "d_lead": d.d_lead_s, "d_seq": d.d_seq_s, "d_tok": d.d_tok_s, "d_kv": d.d_kv_s,
            "d_fill": d.d_fill_s, "calls_per_token": d.calls_per_token,
            "kv_per_target_kv": d.kv_per_target_kv, "fill_per_token": d.fill_per_token,
            "asked_share": d.asked_share,
        }  # fmt: skip
        named |= {f"{method}.{name}": value for name, value in own.items()}
    return named


def unit(name: str) -> str:
    """Of a coefficient named as `coefficients` names it."""
    return UNITS[name.rsplit(".", 1)[-1]]


def workload(view: ModelView) -> Workload:
    """The typical request of late."""
    traffic = view.traffic
    return Workload(
        traffic.prompt_tokens or _TYPICAL.prompt_tokens,
        traffic.output_tokens or _TYPICAL.output_tokens,
        traffic.computed_tokens,
    )


def derived(view: ModelView, requests_per_s: float) -> dict[str, Any]:
    """Per policy, for the typical request: see the module. Empty before any step was seen."""
    step = view.step
    if step is None or step.num_steps == 0:
        return {}
    load = workload(view)
    plain = request_cost(step, BASELINE, 0, 1.0, load, SATURATED)
    book = CurveBook(view.curves)
    policies: dict[str, Any] = {BASELINE: _costs(plain)}
    for method, depth in view.methods.items():
        curve = book.find(method, None, "greedy")
        if method in step.drafters and curve is not None:
            policies[method] = _drafting(step, method, depth, (curve, load, plain, requests_per_s))
    return {
        "workload": {
            "prompt_tokens": load.prompt_tokens,
            "computed_prompt_tokens": load.computed_tokens,
            "output_tokens": load.output_tokens,
        },
        "policies": policies,
    }


def _drafting(
    step: StepCoefficients,
    method: str,
    depth: int,
    given: tuple[AcceptanceCurve, Workload, RequestCost, float],
) -> dict[str, Any]:
    curve, load, plain, requests_per_s = given
    depth = min(depth, len(curve.expected_tokens) - 1)
    expected = curve.expected_tokens[depth]
    drafted = curve.drafted_tokens[depth]
    spec = request_cost(step, method, drafted, expected, load, SATURATED, depth)
    floors = {str(batch): floor_tokens(step, method, batch, drafted, load.kv_tokens) for batch in BATCHES}
    return _costs(spec) | {
        "num_speculative_tokens": depth,
        "expected_tokens_per_step": expected,
        "C1R": spec.c1_s / plain.c1_s if plain.c1_s > 0 else None,
        "C2R": spec.c2_s / plain.c2_s if plain.c2_s > 0 else None,
        "r_star": crossover(spec, plain),
        "speedup_now": speedup(spec, plain, requests_per_s),
        "floor_tokens_by_batch": floors,
        "floor_acceptance_by_batch": {
            batch: None if floor is None else floor_acceptance(floor, depth)
            for batch, floor in floors.items()
        },
    }


def _costs(cost: RequestCost) -> dict[str, Any]:
    rate = cost.max_requests_per_s
    return {
        "C1_s": cost.c1_s,
        "C2_s": cost.c2_s,
        "lam_max_per_s": None if math.isinf(rate) else rate,
    }


def with_units(values: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Coefficients with their units."""
    return {name: {"value": value, "unit": unit(name)} for name, value in values.items()}
