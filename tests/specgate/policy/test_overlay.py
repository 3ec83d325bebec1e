"""What an arm changes of a decision, whom a rollout concerns, and which rollouts exclude each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.types import SamplingParams
from specgate.config import PolicyConfig
from specgate.config.rollout import OverlayConfig, RolloutConfig, ScopeConfig
from specgate.policy.assignment import CANDIDATE, CONTROL, SHADOW
from specgate.policy.decide import Experience, Facts
from specgate.policy.overlay import (
    ArmAssignment,
    concerns,
    conflict,
    decide_in_arm,
    definition,
    header_names,
    key_of,
    unknown_names,
)
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut
from specgate.types import GenerationRequest, LengthEstimate, LoadView, Overrides, TaskEstimate

RULES = PolicyConfig(router="rule")
FACTS = Facts(
    task=TaskEstimate("code_edit", 0.9),
    length=LengthEstimate(100, 200),
    load=LoadView(),
    methods={"ngram": 4, "draft": 5},
    known=Experience(acceptance_p50={"draft": 0.9}),
)
REQUEST = GenerationRequest(
    "id-1", "chat", "m1", SamplingParams(), tenant="team", user="alice", headers={"x-beta": "1"}
)


def assigned(arm: str, **overlay: object) -> ArmAssignment:
    return ArmAssignment("trial", arm, OverlayConfig(**overlay))  # type: ignore[arg-type]


def rollout(name: str = "a", **scope: object) -> RolloutConfig:
    return RolloutConfig(rollout=name, overlay=OverlayConfig(drafter="ngram"), scope=ScopeConfig(**scope))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overlay", "policy", "depth", "is_pinned"),
    [
        ({"policies": ("draft",)}, "draft", 5, True),
        ({"policies": ("baseline",)}, "baseline", 0, True),
        ({"policies": ("draft", "ngram"), "max_speculative_tokens": {"ngram": 2}}, "ngram", 2, True),
        ({"max_speculative_tokens": {"ngram": 9}}, "ngram", 4, True),  # a ceiling, not a wish
        ({"drafter": "draft", "thresholds": {"draft_min_output_tokens": 50}}, "draft", 5, True),
        ({"drafter": "draft"}, "baseline", 0, True),  # 100 tokens are too few for it
        ({"thresholds": {"draft_min_output_tokens": 50}}, "ngram", 4, False),
    ],
)
def test_the_candidate_is_decided_under_the_overlay(
    overlay: dict[str, object], policy: str, depth: int, is_pinned: bool
) -> None:
    decision = decide_in_arm(FACTS, RULES, assigned(CANDIDATE, **overlay))
    assert (decision.policy, decision.num_speculative_tokens) == (policy, depth)
    assert (decision.arm, decision.rollout, decision.is_pinned) == (CANDIDATE, "trial", is_pinned)


def test_the_control_is_decided_as_configured_and_shadow_decides_twice() -> None:
    control = decide_in_arm(FACTS, RULES, assigned(CONTROL, policies=("draft",)))
    assert (control.policy, control.reason, control.arm) == ("ngram", "canary_control", CONTROL)
    assert not control.is_pinned
    shadow = decide_in_arm(FACTS, RULES, assigned(SHADOW, policies=("draft",)))
    assert (shadow.policy, shadow.reason, shadow.arm) == ("ngram", "rule", SHADOW)
    assert shadow.shadow is not None
    assert (shadow.shadow.policy, shadow.shadow.num_speculative_tokens) == ("draft", 5)
    assert decide_in_arm(FACTS, RULES, None).arm is None


@pytest.mark.parametrize("arm", [CANDIDATE, CONTROL, SHADOW])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"forced": "baseline"}, "kill_switch"),
        ({"baseline_only": ("echo",)}, "unsupported_params"),
        ({"overrides": Overrides(policy="ngram")}, "override"),
        (
            {"shut": {p: Shut(p, Reason.MEMORY_PRESSURE, is_hard=True) for p in ("ngram", "draft")}},
            "memory_pressure",
        ),
    ],
)
def test_what_stands_above_a_rollout_takes_the_request_out_of_it(
    arm: str, changes: dict[str, object], reason: str
) -> None:
    decision = decide_in_arm(replace(FACTS, **changes), RULES, assigned(arm, policies=("draft",)))  # type: ignore[arg-type]
    assert (decision.reason, decision.arm, decision.rollout) == (reason, None, None)


def test_a_pinned_candidate_stands_above_the_other_guards() -> None:
    shut = {p: Shut(p, Reason.LATENCY_GUARD) for p in ("ngram", "draft")}
    decision = decide_in_arm(replace(FACTS, shut=shut), RULES, assigned(CANDIDATE, policies=("draft",)))
    assert (decision.policy, decision.is_pinned) == ("draft", True)


def test_scope_is_everything_at_once() -> None:
    assert concerns(ScopeConfig(), REQUEST, "chat")
    good = ScopeConfig(tasks=("chat",), models=("m1",), tenants=("team",), headers={"X-Beta": "1"})
    assert concerns(good, REQUEST, "chat")
    for change in ({"tasks": ("reasoning",)}, {"models": ("m2",)}, {"tenants": ("other",)},
                   {"headers": {"X-Beta": "2"}}, {"headers": {"X-Other": "1"}}):  # fmt: skip
        assert not concerns(replace(good, **change), REQUEST, "chat")  # type: ignore[arg-type]


def test_keys() -> None:
    config = rollout()
    assert key_of(config, REQUEST) == "user:alice"
    assert key_of(replace(config, key="api_key"), REQUEST) == "api_key:team"
    session = replace(config, key="session", session_header="X-Beta")
    assert key_of(session, REQUEST) == "session:1"
    assert header_names(session) == {"x-beta"}
    assert key_of(replace(config, key="request_id"), REQUEST) == "request_id:id-1"
    assert key_of(config, replace(REQUEST, user="")) == "request_id:id-1"


def test_conflicts_are_told_in_a_sentence() -> None:
    assert conflict(rollout("a", tasks=("chat",)), rollout("b", tasks=("reasoning",))) is None
    assert conflict(rollout("a", models=("x",)), rollout("b", models=("y",), tasks=("chat",))) is None
    assert conflict(rollout("a", headers={"X-Beta": "1"}), rollout("b", headers={"x-beta": "2"})) is None
    why = conflict(rollout("a", tasks=("chat", "reasoning")), rollout("b", tasks=("chat",)))
    assert why == (
        "The rollouts a and b concern the same requests (tasks chat; all models; all tenants): "
        "roll one back, or narrow its scope."
    )
    assert conflict(rollout("a"), rollout("b", headers={"X-Beta": "1"})) is not None


def test_what_is_not_loaded_is_named_and_definitions_differ_by_content() -> None:
    config = replace(rollout(), overlay=OverlayConfig(policies=("eagle", "baseline", "ngram")))
    assert unknown_names(config, {"ngram": 4}) == ["eagle"]
    assert definition(rollout("a")) == definition(rollout("a"))
    assert definition(rollout("a")) != definition(rollout("a", tasks=("chat",)))
