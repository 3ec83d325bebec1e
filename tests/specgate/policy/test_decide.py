"""The rule policy: every reason, the order of precedence, and what holds for any facts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgate.config import PolicyConfig
from specgate.policy.decide import Experience, Facts, decide, unknown_policy
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut
from specgate.types import TASKS, LengthEstimate, LoadView, Overrides, TaskEstimate

RULES = PolicyConfig(router="rule", max_requests_per_s=10, max_queue_wait_p95_ms=200)
METHODS = {"ngram": 4, "draft": 5}
DRAFTS_WELL = Experience(acceptance_p50={"draft": 0.9})
CALM = Facts(
    task=TaskEstimate("chat", 0.9, {"chat": 0.9}),
    length=LengthEstimate(100, 200),
    load=LoadView(),
    methods=METHODS,
)


def shut(reason: str, *policies: str) -> dict[str, Shut]:
    known = Reason(reason)
    is_hard = known in (Reason.MEMORY_PRESSURE, Reason.DRAFTER_ERROR)
    return {p: Shut(p, known, why=f"{reason}: too much of it", is_hard=is_hard) for p in policies}


def facts(task: str = "chat", p50: float = 100.0, **changes: object) -> Facts:
    return replace(CALM, task=TaskEstimate(task, 0.9), length=LengthEstimate(p50, 2 * p50), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "policy", "reason", "depth"),
    [
        (facts(), "baseline", "rule", 0),
        (facts("document_qa"), "ngram", "rule", 4),
        (facts("summarization"), "ngram", "rule", 4),
        (facts("code_edit"), "ngram", "rule", 4),
        (facts("code_edit", methods={"draft": 5}), "baseline", "rule", 0),
        (facts(p50=257, known=Experience(acceptance_p50={"draft": 0.66})), "draft", "rule", 5),
        (facts(p50=256, known=Experience(acceptance_p50={"draft": 0.66})), "baseline", "rule", 0),
        (facts(p50=257, known=Experience(acceptance_p50={"draft": 0.65})), "baseline", "rule", 0),
        (facts(p50=257), "baseline", "rule", 0),  # no data is not good data
        (facts("code_edit", shut=shut("load_guard", "ngram")), "baseline", "load_guard", 0),
        (facts("code_edit", shut=shut("load_guard", "draft")), "ngram", "rule", 4),
        (facts(shut=shut("latency_guard", "ngram")), "baseline", "rule", 0),  # it would not have been taken
        (facts(shut=shut("queue_wait_guard", "ngram", "draft")), "baseline", "queue_wait_guard", 0),
        (
            facts("code_edit", 300, shut=shut("acceptance_floor", "ngram"), known=DRAFTS_WELL),
            "draft",
            "acceptance_floor",
            5,
        ),
        (facts(pinned="draft"), "draft", "rule", 5),
        (facts(pinned="baseline"), "baseline", "rule", 0),
        (facts("code_edit", pinned="eagle"), "ngram", "rule", 4),  # it is not loaded
        (facts(overrides=Overrides(policy="draft")), "draft", "override", 5),
        (facts(overrides=Overrides(policy="draft", num_speculative_tokens=2)), "draft", "override", 2),
        (facts("code_edit", overrides=Overrides(policy="baseline")), "baseline", "override", 0),
        (facts("code_edit", overrides=Overrides(num_speculative_tokens=0)), "baseline", "override", 0),
        (facts("code_edit", overrides=Overrides(num_speculative_tokens=7)), "ngram", "rule", 7),
        (facts("code_edit", baseline_only=("echo with logprobs",)), "baseline", "unsupported_params", 0),
        (facts("code_edit", forced="baseline"), "baseline", "kill_switch", 0),
    ],
)
def test_every_rule(case: Facts, policy: str, reason: str, depth: int) -> None:
    decision = decide(case, RULES)
    assert (decision.policy, decision.reason, decision.num_speculative_tokens) == (policy, reason, depth)


def test_precedence_is_that_of_the_contract() -> None:
    case = facts(
        "code_edit", forced="baseline", baseline_only=("x",), overrides=Overrides(policy="draft"),
        pinned="ngram", shut=shut("latency_guard", "ngram", "draft") | shut("memory_pressure", "ngram"),
    )  # fmt: skip
    assert decide(case, RULES).reason == Reason.KILL_SWITCH
    case = replace(case, forced=None)
    assert decide(case, RULES).reason == Reason.UNSUPPORTED_PARAMS
    case = replace(case, baseline_only=())
    assert decide(case, RULES).reason == Reason.OVERRIDE  # a fixed arm stays that arm under load
    assert decide(case, RULES).policy == "draft"
    hard = replace(case, overrides=Overrides(policy="ngram"))
    assert (decide(hard, RULES).policy, decide(hard, RULES).reason) == ("baseline", Reason.MEMORY_PRESSURE)
    case = replace(case, overrides=Overrides())
    assert decide(case, RULES).reason == Reason.MEMORY_PRESSURE  # above the arm, too
    case = replace(case, shut=shut("latency_guard", "ngram", "draft"))
    assert (decide(case, RULES).policy, decide(case, RULES).reason) == ("ngram", Reason.RULE)
    case = replace(case, pinned=None)
    assert decide(case, RULES).reason == Reason.LATENCY_GUARD


def test_candidates_say_why_not() -> None:
    by_policy = {c.policy: c for c in decide(facts("code_edit"), RULES).candidates}
    assert list(by_policy) == ["baseline", "ngram", "draft"]
    assert by_policy["ngram"].why_not is None
    assert "draft needs more than 256" in (by_policy["draft"].why_not or "")
    assert all(c.is_allowed for c in by_policy.values())  # the rules prefer, they do not forbid
    loaded = {c.policy: c for c in decide(facts(shut=shut("load_guard", "ngram", "draft")), RULES).candidates}
    assert not loaded["ngram"].is_allowed
    assert loaded["ngram"].why_not == "load_guard: too much of it"
    partly = {
        c.policy: c for c in decide(facts("code_edit", shut=shut("load_guard", "draft")), RULES).candidates
    }
    assert (partly["draft"].is_allowed, partly["draft"].why_not) == (False, "load_guard: too much of it")
    refused = decide(facts(unsupported=("tools",)), RULES)
    assert all(not c.is_allowed and c.why_not == "unsupported_params: tools" for c in refused.candidates)


def test_unknown_policies_are_named_with_those_loaded() -> None:
    assert unknown_policy(Overrides(policy="ngram"), METHODS) is None
    assert unknown_policy(Overrides(), METHODS) is None
    assert "auto, baseline, ngram, draft" in (unknown_policy(Overrides(policy="eagle"), METHODS) or "")


@given(
    task=st.sampled_from(TASKS),
    p50=st.floats(1, 1e5),
    load=st.builds(
        LoadView,
        requests_per_s=st.floats(0, 100),
        queue_wait_p95_ms=st.none() | st.floats(0, 1e4),
    ),
    methods=st.dictionaries(st.sampled_from(["ngram", "draft", "suffix"]), st.integers(1, 9)),
    acceptance=st.dictionaries(st.just("draft"), st.floats(0, 1)),
    overrides=st.builds(
        Overrides,
        policy=st.none() | st.sampled_from(["baseline", "ngram", "draft", "suffix", "eagle"]),
        num_speculative_tokens=st.none() | st.integers(0, 9),
    ),
    forced=st.none() | st.just("baseline"),
)
def test_any_facts_give_a_loaded_policy_with_a_known_reason(
    task: str, p50: float, load: LoadView, methods: dict[str, int], acceptance: dict[str, float],
    overrides: Overrides, forced: str | None,
) -> None:  # fmt: skip
    case = facts(
        task,
        p50,
        load=load,
        methods=methods,
        known=Experience(acceptance_p50=acceptance),
        overrides=overrides,
        forced=forced,
    )
    decision = decide(case, RULES)
    assert decision.policy in ("baseline", *methods)
    assert Reason(decision.reason)
    assert (decision.policy != "baseline") or decision.num_speculative_tokens == 0
    assert [c.policy for c in decision.candidates] == ["baseline", *methods]
    if forced:
        assert decision.policy == forced
    chosen = next(c for c in decision.candidates if c.policy == decision.policy)
    assert chosen.is_allowed or unknown_policy(overrides, methods)
    assert decide(case, RULES) == decision
