"""Outcomes and steps as guards see them, for the tests beside this file."""

from __future__ import annotations

from engine.types import BASELINE, DrafterError, DraftWork, SamplingParams, SequenceStats, StepRecord
from specgate.types import (
    Decision,
    GenerationRequest,
    LengthEstimate,
    LoadView,
    RequestOutcome,
    TaskEstimate,
    Timings,
)


def outcome(
    policy: str = "ngram",
    task: str = "chat",
    *,
    tpot_s: float = 0.01,
    num_prompt_tokens: int = 100,
    accepted: int = 0,
    reached: int = 0,
    drafts: int = 0,
    result: str = "ok",
    arm: str | None = None,
    gap_s: float | None = None,
) -> RequestOutcome:
    """A finished request of 50 tokens."""
    stats = SequenceStats(
        num_prompt_tokens=num_prompt_tokens, num_output_tokens=50, num_target_steps=50 - accepted,
        num_drafts=drafts, num_draft_tokens=4 * drafts, num_accepted_tokens=accepted,
        accepted_per_position=(accepted,), drafted_per_position=(reached,),
    )  # fmt: skip
    gap = tpot_s if gap_s is None else gap_s
    decision = Decision(
        policy, "rule", 0 if policy == BASELINE else 4, False, TaskEstimate(task, 1.0),
        LengthEstimate(50, 80), LoadView(), arm=arm,
    )  # fmt: skip
    return RequestOutcome(
        GenerationRequest("r", "chat", "m", SamplingParams()), decision, result, num_prompt_tokens, 50,
        Timings(0.001, 0.1, 0.1 + 49 * tpot_s, tpot_s), (stats,), (), ((gap, 1),) * 6,
    )  # fmt: skip


def step(*work: DraftWork, errors: tuple[DrafterError, ...] = (), batch: int = 1) -> StepRecord:
    """A decode step with these drafters' work."""
    return StepRecord(
        step=1, started_s=0.0, seconds=0.02, kind="verify", num_sequences=batch, num_decode_sequences=batch,
        num_tokens=batch, num_prefill_tokens=0, num_kv_tokens=100, num_logits_rows=batch, num_sampled_rows=0,
        num_emitted_tokens=batch, schedule_s=0, draft_s=0, forward_s=0.02, verify_s=0, drafts=work,
        drafter_errors=errors,
    )  # fmt: skip
