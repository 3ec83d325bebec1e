"""Models, sequences and steps for tests of the step planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.spec.planner import SequenceView, SpecPlan, StepView
from engine.types import PolicyAssignment
from router_models.acceptance import Acceptance
from router_models.types import AcceptanceCounts, AcceptanceKey, DraftCoefficients, StepCoefficients
from specgate.policy.view import ModelView

STEP = StepCoefficients(
    c0_s=0.02, c_seq_s=1e-4, c_tok_s=1e-3, c_kv_s=1e-7, c_sample_s=1e-4, c_tok_above_s=1e-3, knee_tokens=None,
    p0_s=0.02, p_tok_s=1e-3, p_dec_s=1e-3, p_kv_s=0.0,
    drafters={
        "ngram": DraftCoefficients(d_seq_s=3e-5),
        "draft": DraftCoefficients(3e-3, 1e-4, 1e-4, 0.0, 1e-4, 1.0, 1.0),
    },
    num_steps=500,
)  # fmt: skip


def model(draft: float = 0.8, ngram: float = 0.5, **changes: Any) -> ModelView:
    """A view in which this share of tokens is accepted."""
    acceptance = Acceptance()
    for method, a in (("ngram", ngram), ("draft", draft)):
        accepted = tuple(round(1000 * a**j) for j in range(1, 6))
        acceptance.learn_one(
            AcceptanceKey(method, "chat"), AcceptanceCounts(1000, 1000, (1000,) * 5, accepted)
        )
    keys = [AcceptanceKey(m, t, "greedy") for m in ("ngram", "draft") for t in (None, "chat")]
    view = ModelView(
        1, STEP, tuple(map(acceptance.predict_one, keys)), {"ngram": 4, "draft": 5},
        {"ngram": 1000.0, "draft": 1000.0},
    )  # fmt: skip
    return replace(view, **changes)


def sequence(name: str, policy: PolicyAssignment, **changes: Any) -> SequenceView:
    base = SequenceView(
        seq_id=name, policy=policy, label="chat", temperature=0.0, top_p=1.0, num_tokens=90,
        num_output_tokens=1, num_remaining_tokens=500, num_drafts=0, num_draft_tokens=0,
        num_accepted_tokens=0, last_method="baseline", last_num_draft_tokens=0, last_num_accepted_tokens=0,
    )  # fmt: skip
    return replace(base, **changes)


def view(step: int = 1, now_s: float = 0.0, **assigned: PolicyAssignment) -> StepView:
    sequences = tuple(sequence(name, policy) for name, policy in assigned.items())
    return StepView(step, now_s, sequences, 0, 0, 100)


AUTO = PolicyAssignment()


def ran(s: SequenceView, plans: Mapping[str, SpecPlan], share: float = 0.6) -> SequenceView:
    """What a step of this plan leaves behind, where a share of the draft is accepted."""
    plan = plans.get(s.seq_id)
    depth = plan.max_draft_tokens if plan is not None else 0
    accepted = round(depth * share)
    return replace(
        s, num_tokens=s.num_tokens + accepted + 1, num_output_tokens=s.num_output_tokens + accepted + 1,
        num_drafts=s.num_drafts + (depth > 0), num_draft_tokens=s.num_draft_tokens + depth,
        num_accepted_tokens=s.num_accepted_tokens + accepted,
    )  # fmt: skip
