"""Guards ask the latency model: capacity ratios, floors and load, and silence while it is young."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router_models.types import DraftCoefficients
from specgate.policy.guard_costs import LatestCosts, ViewCosts
from specgate.policy.view import ModelView
from tests.specgate.policy.guard_samples import model_view

VIEW = model_view("ngram", "draft")


def test_what_a_step_costs_each_sequence_decides_who_raises_capacity() -> None:
    """C2R < 1 iff E > 1 + K*c2d/c2v: drafts save the sequence's own cost of a step, and add tokens."""
    assert VIEW.step is not None
    assert (ViewCosts(VIEW).capacity_ratio("ngram", 1e9) or 0) > 1  # tokens are all that a sequence costs
    bound = replace(VIEW.step, c_seq_s=2e-3)  # reading its KV costs a sequence more than some tokens do
    costs = ViewCosts(replace(VIEW, step=bound))
    assert (costs.capacity_ratio("ngram", 1e9) or 9) < 1
    dear = replace(bound, drafters=VIEW.step.drafters | {"draft": DraftCoefficients(d_tok_s=0.01)})
    assert (ViewCosts(replace(VIEW, step=dear)).capacity_ratio("draft", 1e9) or 0) > 1


def test_a_server_that_runs_few_at_once_gains_capacity_by_fewer_steps() -> None:
    """What a step costs whoever is in it is shared by eight, not by everybody: with fewer steps a request
    gives its place to the next one sooner, though C2R is above 1."""
    costs = ViewCosts(VIEW)
    ratios = [costs.capacity_ratio("ngram", batch) or 0.0 for batch in (1, 8, 64, 1e9)]
    assert ratios == sorted(ratios)
    assert ratios[1] < 1 < ratios[-1]


def test_floor_and_load_are_those_of_the_formulas() -> None:
    costs = ViewCosts(VIEW)
    # 20 ms a step, 0.1 ms a token in the target, 0.1 ms a draft token.
    plain, drafted = 20 + 2 * 0.1, 20 + 2 * 5 * 0.1 + 2 * 4 * 0.1
    assert costs.floor_tokens("ngram", 2, 4) == pytest.approx(drafted / plain)
    rho = costs.rho(10.0)
    assert rho is not None
    assert rho == pytest.approx(10 * (200 * 1e-4 + 100 * 1e-4))  # a request's own tokens: prompt and answer


def test_a_young_model_says_nothing() -> None:
    assert VIEW.step is not None
    young = replace(VIEW, step=replace(VIEW.step, num_steps=50))
    for costs in (ViewCosts(ModelView()), ViewCosts(young)):
        assert costs.capacity_ratio("ngram", 8) is None
        assert costs.floor_tokens("ngram", 1, 4) is None
        assert costs.rho(5.0) is None
    untried = ViewCosts(replace(VIEW, num_steps={"ngram": 10.0}))
    assert untried.capacity_ratio("ngram", 8) is None
    assert untried.capacity_ratio("eagle", 8) is None
    assert untried.rho(5.0) is not None


def test_costs_follow_the_newest_snapshot() -> None:
    view = ModelView()
    costs = LatestCosts(lambda: view)
    assert costs().rho(1.0) is None
    assert costs() is costs()
    view = VIEW
    assert costs().rho(1.0) is not None
