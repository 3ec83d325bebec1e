"""The planner, decisions and learner against a scripted engine: does `auto` do the right thing?

Time is simulated, so nothing here depends on the machine. Each scenario prints nothing and asserts
what a user was promised.
"""

from __future__ import annotations

import pytest

from specgate.types import Overrides
from tests.specgate.policy.simulation import Costs, ScriptedEngine, replaced

DEAR = {"token_s": 0.03, "call_s": 0.05}  # every draft is accepted, and still not worth its time


def throughput(engine: ScriptedEngine, warm_s: float, seconds: float) -> float:
    engine.run(warm_s)
    before, since_s = engine.num_tokens, engine.now_s
    engine.run(seconds)
    return (engine.num_tokens - before) / (engine.now_s - since_s)


def test_full_acceptance_with_slower_steps_is_turned_off_and_comes_back() -> None:
    engine = ScriptedEngine(Costs(), {"draft": 0.8})
    engine.run(25)
    assert engine.share_drafting(15) > 0.9
    engine.accept = {"draft": 1.0}
    engine.costs = replaced(Costs(), **DEAR)
    turned_s = engine.now_s
    engine.run(30)
    assert engine.share_drafting(turned_s + 15) < 0.05
    busy_s, spent_s = engine.busy_s, engine.drafted_s
    engine.run(120)
    assert engine.share_drafting(turned_s + 30) < 0.02
    assert (engine.drafted_s - spent_s) / (engine.busy_s - busy_s) < 0.02  # probes, in measured seconds
    assert engine.drafted_s > spent_s  # and there were some
    engine.costs = Costs()
    engine.run(90)
    assert engine.share_drafting(engine.now_s - 10) > 0.9


@pytest.mark.parametrize(("concurrency", "call_s"), [(1, 0.004), (1, 0.012), (16, 0.004), (16, 0.03)])
def test_auto_is_as_good_as_the_better_fixed_arm(concurrency: int, call_s: float) -> None:
    costs = replaced(Costs(), call_s=call_s)

    def rate(policy: str | None) -> float:
        return throughput(
            ScriptedEngine(
                costs, {"draft": 0.7}, concurrency=concurrency, overrides=Overrides(policy=policy)
            ),
            25, 30,
        )  # fmt: skip

    assert rate(None) >= 0.97 * max(rate("baseline"), rate("draft"))


@pytest.mark.parametrize(("concurrency", "call_s"), [(1, 0.0115), (4, 0.010), (16, 0.003)])
def test_no_flapping_where_it_hardly_matters(concurrency: int, call_s: float) -> None:
    engine = ScriptedEngine(
        replaced(Costs(), call_s=call_s), {"draft": 0.7}, concurrency=concurrency, noise=0.05
    )
    engine.run(30)
    engine.run(90)
    changes = [number for at, number in engine.changes_per_request if at > 30]
    assert len(changes) > 20
    assert sum(changes) / len(changes) < 1.5
    assert max(changes) <= 4


def test_a_machine_of_half_the_speed_is_followed_within_a_minute() -> None:
    engine = ScriptedEngine(Costs(), {"draft": 0.7}, concurrency=4)
    engine.run(60)
    engine.costs = Costs().slower(2)
    engine.run(60)
    for kind in ("draft", "prefill"):
        pairs = engine.learner.steps.window(kind)[-60:]
        assert sum(abs(p - a) / a for p, a in pairs) / len(pairs) < 0.1
    assert engine.share_drafting(engine.now_s - 20) > 0.9


def test_choices_follow_when_threads_are_halved_and_verifying_is_compute_bound() -> None:
    engine = ScriptedEngine(Costs(), {"draft": 0.7}, concurrency=8)
    engine.run(60)
    assert engine.share_drafting(40) > 0.9
    engine.costs = replaced(Costs().slower(1.2), token_s=0.015)
    halved_s = engine.now_s
    engine.run(60)
    assert engine.share_drafting(halved_s + 40) < 0.1
    engine.costs = Costs()
    engine.run(60)
    assert engine.share_drafting(engine.now_s - 15) > 0.8


def test_predictions_logged_before_each_step_explain_the_steps() -> None:
    engine = ScriptedEngine(Costs(), {"draft": 0.7}, concurrency=6, noise=0.03)
    engine.run(120)
    decode = engine.learner.steps.scores()["decode"]
    assert decode.r2 is not None
    assert decode.mape is not None
    assert decode.r2 > 0.9
    assert decode.mape < 0.05


@pytest.mark.parametrize("policy", ["baseline", "draft"])
def test_fixed_arms_stay_fixed(policy: str) -> None:
    engine = ScriptedEngine(replaced(Costs(), **DEAR), {"draft": 0.9}, overrides=Overrides(policy=policy))
    engine.run(40)
    share = engine.share_drafting(0)
    assert share > 0.9 if policy == "draft" else share == 0.0
    assert engine.num_changes(0) == 0
    assert {reason for _, _, reason in engine.decisions} == {"override"}
