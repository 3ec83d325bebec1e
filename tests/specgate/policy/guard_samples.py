"""Outcomes and steps as guards see them, for the tests beside this file."""

from __future__ import annotations

from engine.spec.planner import SequenceView, StepView
from engine.types import (
    BASELINE,
    DrafterError,
    DraftWork,
    PolicyAssignment,
    SamplingParams,
    SequenceStats,
    StepRecord,
)
from router_models.types import AcceptanceCurve, AcceptanceKey, DraftCoefficients, StepCoefficients
from specgate.policy.view import ModelView
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
    num_in_flight: int = 0,
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
        LengthEstimate(50, 80), LoadView(num_admitted=num_in_flight), arm=arm,
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


def step_view(step_number: int = 1, **assigned: PolicyAssignment) -> StepView:
    """Sequences of the task chat in mid-answer, for the step planner."""
    sequences = tuple(
        SequenceView(
            seq_id=name, policy=policy, label="chat", temperature=0.0, top_p=1.0, num_tokens=50,
            num_output_tokens=9, num_remaining_tokens=500, num_drafts=0, num_draft_tokens=0,
            num_accepted_tokens=0, last_method="baseline", last_num_draft_tokens=0,
            last_num_accepted_tokens=0,
        )
        for name, policy in assigned.items()
    )  # fmt: skip
    return StepView(step_number, 0.02 * step_number, sequences, 0, 0, 1000)


def model_view(*methods: str, draft_token_s: float = 1e-4) -> ModelView:
    """A latency model under which every one of these methods is worth its drafts, the first the most. They
    stop a little before they must."""
    step = StepCoefficients(
        c0_s=0.02, c_seq_s=0.0, c_tok_s=1e-4, c_kv_s=0.0, c_sample_s=0.0, c_tok_above_s=0.0, knee_tokens=None,
        p0_s=0.02, p_tok_s=1e-4, p_dec_s=1e-4, p_kv_s=0.0, num_steps=1000,
        drafters={m: DraftCoefficients(d_tok_s=draft_token_s * (i + 1)) for i, m in enumerate(methods)},
    )  # fmt: skip
    expected = tuple(sum(0.9**j for j in range(k + 1)) for k in range(5))
    curves = tuple(
        AcceptanceCurve(
            AcceptanceKey(method, None, "greedy"), tuple(0.9**k for k in range(1, 5)), expected, expected,
            expected, 1.0, (0.0, 1.0, 1.95, 2.85, 3.7), 0.9, 0.9, 1000.0,
        )
        for method in methods
    )  # fmt: skip
    return ModelView(
        version=1, step=step, curves=curves, methods=dict.fromkeys(methods, 4),
        num_steps=dict.fromkeys(methods, 1000.0),
    )  # fmt: skip
