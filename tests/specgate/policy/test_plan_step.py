"""The step planner: follows what was decided, and the kill switch at once."""

from __future__ import annotations

from engine.spec.planner import SequenceView, StepView
from engine.types import PolicyAssignment
from specgate.policy.plan_step import StepPlanner


def view(**assigned: PolicyAssignment) -> StepView:
    sequences = tuple(
        SequenceView(
            seq_id=name, policy=policy, label="chat", temperature=0.0, top_p=1.0, num_tokens=9,
            num_output_tokens=1, num_remaining_tokens=50, num_drafts=0, num_draft_tokens=0,
            num_accepted_tokens=0, last_method="baseline", last_num_draft_tokens=0,
            last_num_accepted_tokens=0,
        )
        for name, policy in assigned.items()
    )  # fmt: skip
    return StepView(1, 0.0, sequences, 0, 0, 100)


def test_it_follows_assignments_and_the_kill_switch() -> None:
    planner = StepPlanner()
    step = view(
        a=PolicyAssignment("ngram", 4), b=PolicyAssignment("draft", 7, is_exact=True), c=PolicyAssignment()
    )
    plans = planner.plan(step)
    assert {name: (p.method, p.max_draft_tokens, p.reason) for name, p in plans.items()} == {
        "a": ("ngram", 4, "rule"),
        "b": ("draft", 7, "override"),
    }
    planner.set_force("baseline")
    forced = planner.plan(step)
    assert {p.max_draft_tokens for p in forced.values()} == {0}
    assert {p.reason for p in forced.values()} == {"kill_switch"}
    planner.set_force(None)
    assert planner.plan(step) == plans
