"""The theory's formulas, checked against each other and by hand."""

from __future__ import annotations

import math

import pytest

from router_models import cost
from router_models.cost import RequestCost, Workload
from router_models.types import DraftCoefficients, StepCoefficients

DRAFT = DraftCoefficients(
    d0_s=0.002, d_seq_s=1e-4, d_tok_s=2e-4, d_kv_s=1e-7, calls_per_token=1, kv_per_target_kv=1
)


def coefficients(c_tok: float = 0.001, knee: float | None = None, above: float = 0.001) -> StepCoefficients:
    return StepCoefficients(
        c0_s=0.02,
        c_seq_s=0.0005,
        c_tok_s=c_tok,
        c_kv_s=1e-6,
        c_sample_s=0.0,
        c_tok_above_s=above,
        knee_tokens=knee,
        p0_s=0.01,
        p_tok_s=0.0005,
        p_dec_s=0.001,
        p_kv_s=0.0,
        c_win_s=3e-7,
        drafters={"draft": DRAFT, "ngram": DraftCoefficients(d_seq_s=1e-5)},
    )


def test_step_by_hand() -> None:
    c = coefficients()
    assert cost.step_s(c, "baseline", 4, 0, 100) == pytest.approx(0.02 + 4 * 0.0005 + 4 * 0.001 + 4e-4)
    spec = 0.02 + 4 * 0.0005 + 12 * 0.001 + 4e-4 + 2 * 0.002 + 4 * (1e-4 + 2 * 2e-4 + 2 * 100 * 1e-7)
    spec += 4 * 2 * 100 * 3e-7
    assert cost.step_s(c, "draft", 4, 2, 100) == pytest.approx(spec)


def test_request_cost_is_the_step_cost_summed_up() -> None:
    """g/E steps of a batch of B plus prefill equal C1 + B*C2."""
    c, load = coefficients(), Workload(200, 60)
    for policy, depth, expected in (("baseline", 0, 1.0), ("draft", 3, 2.5)):
        total = cost.request_cost(c, policy, depth, expected, load)
        for batch in (1, 6):
            steps = load.output_tokens / expected * cost.step_s(c, policy, batch, depth, load.kv_tokens)
            prefill = c.p0_s + batch * c.p_tok_s * load.prompt_tokens
            assert total.c1_s + batch * total.c2_s == pytest.approx(steps + prefill)


def test_what_the_prefix_cache_holds_costs_no_capacity() -> None:
    c = coefficients()
    all_new, cached = (cost.request_cost(c, "baseline", 0, 1.0, Workload(200, 60, n)) for n in (None, 50))
    assert all_new.c2_s - cached.c2_s == pytest.approx(150 * c.p_tok_s)
    assert all_new.c1_s == cached.c1_s


def test_littles_law_and_saturation() -> None:
    request = RequestCost(2.0, 0.5)
    assert request.max_requests_per_s == pytest.approx(2.0)
    latency = request.latency_s(1.0)
    assert latency == pytest.approx(4.0)
    assert latency == pytest.approx(request.c1_s + 1.0 * latency * request.c2_s)
    assert math.isinf(request.latency_s(2.0))


def test_speedup_is_one_at_the_crossover() -> None:
    plain, spec = RequestCost(2.0, 0.10), RequestCost(1.0, 0.16)
    r = cost.crossover(spec, plain)
    assert r is not None
    assert cost.speedup(spec, plain, r / plain.c2_s) == pytest.approx(1.0)
    assert (cost.speedup(spec, plain, 0.5 * r / plain.c2_s) or 0) > 1
    assert cost.crossover(RequestCost(1.0, 0.05), plain) is None  # better at every load
    assert cost.speedup(spec, plain, 10.0) is None


def test_floor_rises_with_the_batch() -> None:
    c = coefficients()
    floors = [cost.floor_tokens(c, "draft", b, 4, 500) or 0 for b in (1, 8, 64)]
    assert floors == sorted(floors)
    assert floors[0] < 2 < floors[2]
    a = cost.floor_acceptance(floors[0], 4)
    assert a is not None
    assert sum(a**j for j in range(5)) == pytest.approx(floors[0])
    assert cost.floor_acceptance(5.5, 4) is None


def test_knee_makes_tokens_above_it_dear() -> None:
    c = coefficients(c_tok=0.0001, knee=8, above=0.002)
    assert cost.step_s(c, "baseline", 8, 0, 0) == pytest.approx(0.02 + 0.004 + 0.0008)
    assert cost.step_s(c, "baseline", 10, 0, 0) == pytest.approx(0.02 + 0.005 + 0.0008 + 0.004)


def test_best_depth_is_smaller_under_load() -> None:
    c, load = coefficients(), Workload(100, 100)
    expected = {k: sum(0.75**j for j in range(k + 1)) for k in range(7)}
    costs = {k: cost.request_cost(c, "draft", k, e, load) for k, e in expected.items()}
    capacity = max(x.max_requests_per_s for x in costs.values())
    assert cost.best_depth(costs, 0.01 * capacity) > cost.best_depth(costs, 0.97 * capacity)
    assert cost.best_depth(costs, 5 * capacity) == min(costs, key=lambda k: costs[k].c2_s)
