"""What a rollout's overlay makes of a decision's facts and rules, and whom a rollout concerns. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.types import BASELINE
from specgate.config.rollout import OverlayConfig, RolloutConfig, ScopeConfig
from specgate.config.schema import PolicyConfig
from specgate.policy.assignment import CANDIDATE, CONTROL, SHADOW
from specgate.policy.decide import Facts, decide
from specgate.policy.reasons import Reason
from specgate.types import Decision, GenerationRequest, ShadowDecision

_ABOVE_ROLLOUTS = (
    Reason.KILL_SWITCH, Reason.UNSUPPORTED_PARAMS, Reason.OVERRIDE,
    Reason.MEMORY_PRESSURE, Reason.DRAFTER_ERROR,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArmAssignment:
    """The arm of a rollout that a request is in."""

    rollout: str
    arm: str  # candidate, control, shadow
    overlay: OverlayConfig


def decide_in_arm(facts: Facts, rules: PolicyConfig, assigned: ArmAssignment | None) -> Decision:
    """As `decide`, in the given arm. What stands above a rollout leaves the request in none.

    No arm explores: the comparison would pay for it.
    """
    if assigned is None:
        return decide(facts, rules)
    facts = replace(facts, overrides=replace(facts.overrides, explore=False))
    decision = decide(facts, rules)
    if decision.reason in _ABOVE_ROLLOUTS:
        return decision
    if assigned.arm == CONTROL:
        return replace(decision, reason=Reason.CANARY_CONTROL.value, arm=CONTROL, rollout=assigned.rollout)
    overlay = assigned.overlay
    other = decide(*overlaid(facts, rules, overlay))
    if assigned.arm == SHADOW:
        shadow = ShadowDecision(other.policy, other.reason, other.num_speculative_tokens)
        return replace(decision, arm=SHADOW, rollout=assigned.rollout, shadow=shadow)
    if other.reason in _ABOVE_ROLLOUTS:
        return other
    is_pinned = bool(overlay.policies or overlay.drafter or overlay.max_speculative_tokens)
    return replace(other, arm=CANDIDATE, rollout=assigned.rollout, is_pinned=is_pinned)


def overlaid(facts: Facts, rules: PolicyConfig, overlay: OverlayConfig) -> tuple[Facts, PolicyConfig]:
    """Facts and rules as the candidate sees them."""
    named = (overlay.drafter,) if overlay.drafter is not None else overlay.policies
    methods = {
        method: min(depth, overlay.max_speculative_tokens.get(method, depth))
        for method, depth in facts.methods.items()
        if not named or method in named
    }
    pinned = overlay.policies[0] if len(overlay.policies) == 1 else None
    changes: dict[str, Any] = dict(overlay.thresholds)
    if "draft_min_output_tokens" in changes:
        changes["draft_min_output_tokens"] = int(changes["draft_min_output_tokens"])
    return replace(facts, methods=methods, pinned=pinned), replace(rules, **changes)


def concerns(scope: ScopeConfig, request: GenerationRequest, task: str) -> bool:
    """Whether a request of this task is in scope."""
    return (
        (not scope.tasks or task in scope.tasks)
        and (not scope.models or request.model in scope.models)
        and (not scope.tenants or request.tenant in scope.tenants)
        and all(request.headers.get(name.lower()) == value for name, value in scope.headers.items())
    )


def key_of(config: RolloutConfig, request: GenerationRequest) -> str:
    """What keeps its arm. A request without the chosen key stands for itself."""
    found = {
        "user": request.user,
        "api_key": request.tenant,
        "session": request.headers.get(config.session_header.lower(), ""),
        "request_id": "",
    }[config.key]
    return f"{config.key}:{found}" if found else f"request_id:{request.request_id}"


def conflict(one: RolloutConfig, other: RolloutConfig) -> str | None:
    """Why the two cannot run at once, as a sentence; None: no request can be in both."""
    a, b = one.scope, other.scope
    shared = []
    for what in ("tasks", "models", "tenants"):
        ours, theirs = set(getattr(a, what)), set(getattr(b, what))
        if ours and theirs and not ours & theirs:
            return None
        both = ours & theirs if ours and theirs else ours | theirs
        shared.append(f"{what} {', '.join(sorted(both))}" if both else f"all {what}")
    ours_h, theirs_h = ({k.lower(): v for k, v in s.headers.items()} for s in (a, b))
    if any(ours_h[name] != theirs_h[name] for name in ours_h.keys() & theirs_h.keys()):
        return None
    return (
        f"The rollouts {one.rollout} and {other.rollout} concern the same requests ({'; '.join(shared)}):"
        f" roll one back, or narrow its scope."
    )


def unknown_names(config: RolloutConfig, methods: Mapping[str, int]) -> list[str]:
    """Policies the overlay names that are not loaded."""
    named = {*config.overlay.policies, *config.overlay.max_speculative_tokens}
    named |= {config.overlay.drafter} if config.overlay.drafter is not None else set()
    return sorted(named - {BASELINE, *methods})


def header_names(config: RolloutConfig) -> set[str]:
    """Request headers that decide about arms, in lower case."""
    names = {name.lower() for name in config.scope.headers}
    return names | ({config.session_header.lower()} if config.key == "session" else set())


def definition(config: RolloutConfig) -> str:
    """The rollout as text: another text is another rollout, whatever its name."""
    return repr(dataclasses.asdict(config))
