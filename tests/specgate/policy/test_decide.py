"""The rule policy: every reason, the order of precedence, and what holds for any facts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgate.config import PolicyConfig
from specgate.policy.decide import Experience, Facts, decide, unknown_policy
from specgate.policy.reasons import Reason
from specgate.types import TASKS, LengthEstimate, LoadView, Overrides, TaskEstimate

RULES = PolicyConfig(router="rule", max_requests_per_s=10, max_queue_wait_p95_ms=200)
METHODS = {"ngram": 4, "draft": 5}
CALM = Facts(
    task=TaskEstimate("chat", 0.9, {"chat": 0.9}),
    length=LengthEstimate(100, 200),
    load=LoadView(),
    methods=METHODS,
)


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
        (facts("code_edit", load=LoadView(requests_per_s=10.1)), "baseline", "load_guard", 0),
        (facts("code_edit", load=LoadView(requests_per_s=10)), "ngram", "rule", 4),
        (facts("code_edit", load=LoadView(queue_wait_p95_ms=201)), "baseline", "queue_wait_guard", 0),
        (facts("code_edit", load=LoadView(queue_wait_p95_ms=None)), "ngram", "rule", 4),
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
        load=LoadView(queue_wait_p95_ms=1e4, requests_per_s=1e4),
    )  # fmt: skip
    assert decide(case, RULES).reason == Reason.KILL_SWITCH
    case = replace(case, forced=None)
    assert decide(case, RULES).reason == Reason.UNSUPPORTED_PARAMS
    case = replace(case, baseline_only=())
    assert decide(case, RULES).reason == Reason.OVERRIDE  # a fixed arm stays that arm under load
    case = replace(case, overrides=Overrides())
    assert decide(case, RULES).reason == Reason.QUEUE_WAIT_GUARD
    case = replace(case, load=LoadView(requests_per_s=1e4))
    assert decide(case, RULES).reason == Reason.LOAD_GUARD


def test_candidates_say_why_not() -> None:
    by_policy = {c.policy: c for c in decide(facts("code_edit"), RULES).candidates}
    assert list(by_policy) == ["baseline", "ngram", "draft"]
    assert by_policy["ngram"].why_not is None
    assert "draft needs more than 256" in (by_policy["draft"].why_not or "")
    assert all(c.is_allowed for c in by_policy.values())  # the rules prefer, they do not forbid
    loaded = {c.policy: c for c in decide(facts(load=LoadView(requests_per_s=99)), RULES).candidates}
    assert not loaded["ngram"].is_allowed
    assert "99.0 requests/s are above 10" in (loaded["ngram"].why_not or "")
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
