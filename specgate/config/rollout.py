"""Settings of a rollout: what it changes, for whom, by which steps, and what it must not harm.

One YAML file a rollout, in the folder `canary.folder`. Read by `loader.load_rollout`.
"""

# ruff: noqa: RUF009 - `setting` is `dataclasses.field` with a doc

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Literal

from specgate.config.fields import TaskName, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeConfig:
    """Whom the rollout concerns; what is left empty does not restrict. All must fit."""

    tasks: tuple[TaskName, ...] = setting((), "tasks")
    models: tuple[str, ...] = setting((), "ids of served models")
    tenants: tuple[str, ...] = setting((), "names of API keys")
    headers: Mapping[str, str] = setting(dict, "request headers with the value each must have")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlayConfig:
    """What is different for the candidate. Nothing else can be changed by a rollout."""

    policies: tuple[str, ...] = setting(
        (), "one: always that policy; several: one of them or baseline is chosen; empty: as configured"
    )
    max_speculative_tokens: Mapping[str, int] = setting(dict, "most draft tokens a step, by policy")
    drafter: str | None = setting(None, "the only method that drafts; null: as configured")
    thresholds: Mapping[str, float] = setting(dict, "numbers of the section `policy`, by name")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardrailsConfig:
    """What the candidate must not do to its users, against the control. null: not watched."""

    ttft_ratio: float | None = setting(1.10, "time to first token, typically, for the prompt's size", gt=1)
    tpot_ratio: float | None = setting(1.05, "time per output token, typically", gt=1)
    e2e_ratio: float | None = setting(1.05, "end to end, typically, for prompt's and answer's size", gt=1)
    ttft_p95_ratio: float | None = setting(1.4, "time to first token, p95 for the prompt's size", gt=1)
    tpot_p95_ratio: float | None = setting(1.2, "time per output token, p95", gt=1)
    e2e_p95_ratio: float | None = setting(1.2, "end to end, p95 for prompt's and answer's size", gt=1)
    error_ratio: float | None = setting(2.0, "failed requests, in times of the control's rate", gt=1)
    acceptance_ratio: float | None = setting(0.7, "accepted share of draft tokens, least", gt=0, le=0.99)
    queue_wait_p95_ms: float | None = setting(100.0, "queue wait p95 above the control's", gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """A rollout by steps, against a concurrent control arm of the same size."""

    rollout: str = setting(MISSING, "its name, in metrics and commands", pattern=r"[a-z0-9][a-z0-9_-]{0,62}")
    mode: Literal["live", "shadow"] = setting(
        "live", "shadow: decide and log for the first stage's share, apply nothing, until promoted"
    )
    overlay: OverlayConfig = setting(MISSING, OverlayConfig.__doc__ or "")
    scope: ScopeConfig = setting(ScopeConfig, ScopeConfig.__doc__ or "")
    key: Literal["user", "api_key", "session", "request_id"] = setting(
        "user", "what keeps its arm: the field `user`, the API key, a session header, or nothing"
    )
    session_header: str = setting("X-Session-Id", "with key: session", pattern=r"[A-Za-z0-9-]{1,64}")
    stages_percent: tuple[float, ...] = setting(
        (1.0, 5.0, 25.0, 50.0, 100.0), "the candidate's share, rising"
    )
    min_samples: int = setting(7000, "requests of each arm before a stage may be passed", ge=1)
    min_stage_s: float = setting(3600.0, "seconds before a stage may be passed", ge=0)
    batch_samples: int = setting(50, "requests of each arm that make one observation", ge=10, le=1000)
    error_chance: float = setting(0.05, "of a false rollback, over all stages and guardrails", gt=0, le=0.4)
    expires_after_h: float = setting(720.0, "hours after which an unfinished rollout is rolled back", gt=0)
    guardrails: GuardrailsConfig = setting(GuardrailsConfig, GuardrailsConfig.__doc__ or "")


THRESHOLDS = (
    "draft_min_output_tokens", "draft_min_acceptance", "switch_margin", "slo_ttft_ms", "slo_tpot_ms",
)  # fmt: skip
"""Numbers of the section `policy` that a single decision depends on: an overlay may change these."""


def check_rollout(config: RolloutConfig) -> Iterator[tuple[str, str]]:
    """Faults that only show when several settings are seen together: (path, message)."""
    overlay = config.overlay
    if not (overlay.policies or overlay.max_speculative_tokens or overlay.drafter or overlay.thresholds):
        yield "overlay", "changes nothing"
    if overlay.drafter is not None and overlay.policies:
        yield "overlay.drafter", "policies already says what may be chosen: give one of the two"
    if "auto" in overlay.policies or overlay.drafter in ("auto", "baseline"):
        yield "overlay", "name loaded methods; auto is what happens without `policies`"
    if len(set(overlay.policies)) < len(overlay.policies):
        yield "overlay.policies", "a policy is named twice"
    for policy, depth in overlay.max_speculative_tokens.items():
        if depth < 1 or policy == "baseline":
            at = f"overlay.max_speculative_tokens.{policy}"
            yield at, "is a ceiling of at least 1, for a method that drafts"
    for name in overlay.thresholds:
        if name not in THRESHOLDS:
            allowed = ", ".join(THRESHOLDS)
            yield f"overlay.thresholds.{name}", f"cannot be changed for an arm; allowed: {allowed}"
    stages = config.stages_percent
    if not stages or list(stages) != sorted(set(stages)) or stages[0] <= 0 or stages[-1] > 100:
        yield "stages_percent", "must rise from above 0 to at most 100"
    elif any(50 < percent < 100 for percent in stages):
        yield "stages_percent", "between 50 and 100 there is no control arm of the same size left"
    if config.batch_samples > config.min_samples:
        yield "min_samples", "is less than one batch (batch_samples)"
