"""Decisions by prediction: terms that add up, objectives, exploration, guards and what is said of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_models.acceptance import Acceptance
from router_models.types import (
    AcceptanceCounts,
    AcceptanceKey,
    DraftCoefficients,
    Quantiles,
    StepCoefficients,
)
from specgate.config import PolicyConfig
from specgate.policy.decide import Experience, Facts, decide
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut
from specgate.policy.view import ModelView, Traffic
from specgate.types import Candidate, Decision, LengthEstimate, LoadView, Overrides, TaskEstimate

RULES = PolicyConfig()
METHODS = {"ngram": 4, "draft": 5}
STEP = StepCoefficients(
    c0_s=0.02, c_seq_s=1e-4, c_tok_s=1e-3, c_kv_s=1e-7, c_sample_s=1e-4, c_tok_above_s=4e-3, knee_tokens=24,
    p0_s=0.02, p_tok_s=5e-4, p_dec_s=1e-3, p_kv_s=1e-8,
    drafters={
        "ngram": DraftCoefficients(d_seq_s=3e-5),
        "draft": DraftCoefficients(
            d0_s=3e-3, d_seq_s=1e-4, d_tok_s=1e-4, d_kv_s=1e-8, d_fill_s=1e-4, calls_per_token=1.0,
            kv_per_target_kv=1.0,
        ),
    },
    num_steps=500,
)  # fmt: skip


def view(draft: float = 0.8, ngram: float = 0.3, **changes: Any) -> ModelView:
    acceptance = Acceptance()
    for method, a in (("ngram", ngram), ("draft", draft)):
        accepted = tuple(round(1000 * a**j) for j in range(1, 6))
        acceptance.learn_one(
            AcceptanceKey(method, "chat"), AcceptanceCounts(1000, 1000, (1000,) * 5, accepted)
        )
    keys = [AcceptanceKey(m, t, b) for m in METHODS for t in (None, "chat") for b in ("greedy", "warm")]
    known = ModelView(
        1, STEP, tuple(map(acceptance.predict_one, keys)), METHODS, dict.fromkeys(METHODS, 1000.0),
        Traffic(between_steps_s=2e-4, prefill_extra_s=1e-3, sampled_share=0.2),
    )  # fmt: skip
    return replace(known, **changes)


def facts(known: ModelView | None = None, *, p50: float = 100.0, **changes: Any) -> Facts:
    experience = Experience(view=view() if known is None else known)
    base = Facts(
        task=TaskEstimate("chat", 0.9),
        length=LengthEstimate(p50, 2 * p50),
        load=LoadView(),
        methods=METHODS,
        num_prompt_tokens=120,
        known=experience,
    )
    return replace(base, **changes)


def by_policy(decision: Decision) -> dict[str, Candidate]:
    return {candidate.policy: candidate for candidate in decision.candidates}


def test_the_fastest_is_chosen_and_the_others_say_by_how_much_they_lost() -> None:
    decision = decide(facts(), RULES)
    assert (decision.policy, decision.reason, decision.is_exact) == ("draft", "predicted_fastest", False)
    assert 1 <= decision.num_speculative_tokens <= 5
    found = by_policy(decision)
    assert all(c.is_allowed for c in found.values())
    assert "predicted" in (found["baseline"].why_not or "")
    assert (found["draft"].predicted.e2e_ms or 0) < (found["baseline"].predicted.e2e_ms or 0)
    assert decision.predicted == found["draft"].predicted


@settings(max_examples=60, deadline=None)
@given(
    running=st.integers(0, 60),
    prompt=st.integers(0, 4000),
    p50=st.floats(1, 2000),
    temperature=st.sampled_from([0.0, 0.7]),
    ttft=st.none() | st.floats(0.001, 5.0),
    objective=st.sampled_from(["latency", "throughput", "slo"]),
)
def test_terms_add_up_to_the_prediction(
    running: int, prompt: int, p50: float, temperature: float, ttft: float | None, objective: str
) -> None:
    case = facts(
        p50=p50, load=LoadView(num_running=running), num_prompt_tokens=prompt, temperature=temperature,
        overrides=Overrides(objective=objective, slo_ttft_ms=100, slo_tpot_ms=20),
    )  # fmt: skip
    if ttft is not None:
        case = replace(case, known=replace(case.known, ttft=Quantiles(ttft, 2 * ttft)))
    decision = decide(case, RULES)
    assert [c.policy for c in decision.candidates] == ["baseline", "ngram", "draft"]
    for candidate in decision.candidates:
        total = sum(term.effect_ms for term in candidate.terms)
        assert total == pytest.approx(candidate.predicted.e2e_ms, rel=1e-9)
        assert all(
            math.isclose(t.value * t.coefficient, t.effect_ms, rel_tol=1e-9, abs_tol=1e-12)
            for t in candidate.terms
        )
        if candidate.predicted.tpot_ms is not None:
            whole = (candidate.predicted.ttft_ms or 0) + candidate.predicted.tpot_ms * (p50 - 1)
            assert whole == pytest.approx(candidate.predicted.e2e_ms, rel=1e-9)
    assert decide(case, RULES) == decision


def test_deep_drafts_are_for_idle_machines() -> None:
    def choice(running: int) -> Decision:
        return decide(facts(load=LoadView(num_running=running)), RULES)

    idle, busy, full = choice(0), choice(12), choice(60)
    assert idle.policy == "draft"
    assert busy.num_speculative_tokens < idle.num_speculative_tokens
    assert full.policy == "baseline"


def test_cold_start_goes_by_the_rules_and_shows_no_numbers() -> None:
    decision = decide(facts(ModelView(), task=TaskEstimate("code_edit", 0.9)), RULES)
    assert (decision.policy, decision.reason) == ("ngram", "cold_start")
    young = decide(facts(view(step=replace(STEP, num_steps=3))), RULES)
    assert young.reason == "cold_start"
    assert decide(facts(), PolicyConfig(router="rule")).reason == "rule"


def test_short_answers_are_not_worth_a_drafter() -> None:
    decision = decide(facts(length=LengthEstimate(1, 2)), RULES)
    assert (decision.policy, decision.reason) == ("baseline", "short_output")


def test_the_incumbent_stays_for_a_small_loss_but_never_against_plain_decoding() -> None:
    even = view(draft=0.8, ngram=0.8)
    first = decide(facts(even), RULES)
    for incumbent in ("ngram", "draft"):
        case = facts(even)
        case = replace(case, known=replace(case.known, incumbent=incumbent))
        kept = decide(case, PolicyConfig(switch_margin=0.5))
        assert kept.policy == incumbent
    assert first.policy in METHODS
    slow = facts(view(draft=0.05, ngram=0.02), load=LoadView(num_running=40))
    slow = replace(slow, known=replace(slow.known, incumbent="draft"))
    assert decide(slow, PolicyConfig(switch_margin=0.5)).policy == "baseline"


def test_objectives() -> None:
    slo = Overrides(objective="slo", slo_tpot_ms=14.0)
    decision = decide(facts(overrides=slo), RULES)
    assert (by_policy(decision)[decision.policy].predicted.tpot_ms or 99) <= 14.0
    throughput = decide(facts(overrides=Overrides(objective="throughput")), RULES)
    assert "tokens/s" in (by_policy(throughput)["baseline"].why_not or "")


def exploring(**changes: Any) -> Facts:
    unknown = view(num_steps={"ngram": 1000.0, "draft": 0.0})
    curves = tuple(c if c.key.policy == "ngram" else replace(c, num_steps=0.0) for c in unknown.curves)
    case = facts(replace(unknown, curves=curves), **changes)
    return replace(case, known=replace(case.known, explore_credit_s=5.0))


def test_the_unknown_is_tried_within_the_credit_and_only_with_consent() -> None:
    trial = decide(exploring(), RULES)
    assert (trial.policy, trial.reason) == ("draft", "exploration")
    assert trial.hold_steps > 0
    assert not trial.is_exact
    for case in (
        exploring(overrides=Overrides(explore=False)),
        exploring(overrides=Overrides(num_speculative_tokens=3)),
        exploring(p50=5.0),
    ):
        assert decide(case, RULES).reason != "exploration"
    poor = exploring()
    poor = replace(poor, known=replace(poor.known, explore_credit_s=0.0))
    without = decide(poor, RULES)
    assert without.reason == "predicted_fastest"
    assert without.policy != "draft"  # a guess is no prediction
    assert "too little was seen" in (by_policy(without)["draft"].why_not or "")


def test_a_shut_door_is_the_reason_where_it_cost_the_best() -> None:
    shut = {"draft": Shut("draft", Reason.ACCEPTANCE_FLOOR, why="E 1.1 is below 1.4")}
    decision = decide(facts(shut=shut), RULES)
    assert decision.policy != "draft"
    assert decision.reason == "acceptance_floor"
    candidate = by_policy(decision)["draft"]
    assert not candidate.is_allowed
    assert "below 1.4" in (candidate.why_not or "")
    asked = decide(facts(shut=shut, overrides=Overrides(policy="draft")), RULES)
    assert asked.policy == "draft"
    hard = {"draft": Shut("draft", Reason.DRAFTER_ERROR, is_hard=True, why="3 errors")}
    refused = decide(facts(shut=hard, overrides=Overrides(policy="draft")), RULES)
    assert (refused.policy, refused.reason) == ("baseline", "drafter_error")


def test_overrides_are_exact_and_still_predicted() -> None:
    decision = decide(facts(overrides=Overrides(policy="draft", num_speculative_tokens=2)), RULES)
    assert (decision.policy, decision.num_speculative_tokens, decision.is_exact) == ("draft", 2, True)
    assert decision.predicted.e2e_ms is not None
    default = decide(facts(overrides=Overrides(policy="ngram")), RULES)
    assert default.num_speculative_tokens == METHODS["ngram"]


def test_only_what_a_drafter_reads_of_a_prompt_is_charged() -> None:
    """A window of a long document costs the draft no more than the window."""

    def charged(share: float) -> tuple[float, float]:
        drafters = {**STEP.drafters, "draft": replace(STEP.drafters["draft"], fill_per_token=share)}
        known = view(step=replace(STEP, drafters=drafters))
        decision = decide(facts(known, num_prompt_tokens=2000), RULES)
        draft = next(c for c in decision.candidates if c.policy == "draft")
        reading = [term for term in draft.terms if term.name == "draft reads prompts"]
        return (reading[0].value, reading[0].effect_ms) if reading else (0.0, 0.0)

    assert charged(1.0) == pytest.approx((2000, 200))
    assert charged(0.1) == pytest.approx((200, 20))
    assert charged(0.0) == (0.0, 0.0)
