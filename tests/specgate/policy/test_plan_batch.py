"""The step planner over a batch that changes: who comes, who leaves, what is tried, whose drafts count."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from engine.spec.planner import SequenceView, SpecPlan, StepView
from engine.types import PolicyAssignment
from router_models.acceptance import Acceptance
from router_models.types import AcceptanceCounts, AcceptanceKey
from specgate.policy.plan_step import StepPlanner
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut
from specgate.policy.view import ModelView
from tests.specgate.policy.plan_samples import AUTO, STEP, model, ran, sequence


@pytest.mark.parametrize("num", [3, 24])
def test_who_comes_to_a_running_batch_is_planned_at_once(num: int) -> None:
    """Each step one sequence ends and another takes its place: few join what is planned, many are weighed
    anew; nobody waits, nobody who left stays, and a newcomer fares as those who were there."""
    planner = StepPlanner()
    planner.use(model(draft=0.97, ngram=0.02))
    running = [sequence(f"s{i}", AUTO) for i in range(num)]
    num_plain = 0
    for step in range(200):
        plans = planner.plan(StepView(step, step * 0.04, tuple(running), 0, 0, 100))
        assert not plans or set(plans) == {s.seq_id for s in running}  # none: plain decoding is tried
        num_plain += not plans
        chosen = {plan.method for plan in plans.values() if plan.reason == Reason.PREDICTED_FASTEST}
        assert chosen <= {"draft"}
        running = [ran(s, plans, 0.97) for s in running]
        running[step % num] = sequence(f"s{num + step}", AUTO)
    assert num_plain < 20


class Watched(StepPlanner):
    """Counts who joined a plan in force."""

    num_joined = 0

    def _join(self, *args: Any) -> Any:
        plan, plans = super()._join(*args)
        self.num_joined += bool(plans)
        return plan, plans


def steady(planner: StepPlanner, num: int = 24) -> list[SequenceView]:
    """So many that have drafted for a while."""
    planner.use(model(draft=0.97, ngram=0.02))
    running = [sequence(f"s{i}", AUTO) for i in range(num)]
    for step in range(49):
        plans = planner.plan(StepView(step, step * 0.04, tuple(running), 0, 0, 100))
        running = [ran(s, plans, 0.97) for s in running]
    return running


def test_a_newcomer_joins_by_its_own_numbers() -> None:
    planner = Watched()
    running = steady(planner)
    before = planner.plan(StepView(49, 2.0, tuple(running), 0, 0, 100))
    own = sequence("own", AUTO, label="extract")
    plans = planner.plan(StepView(50, 2.04, (*running, own), 0, 0, 100))
    assert planner.num_joined == 1
    assert plans["own"].method == "draft"  # by all tasks' curve
    assert {name: plan for name, plan in plans.items() if name != "own"} == before
    assert plans["own"].max_draft_tokens <= max(plan.max_draft_tokens for plan in before.values())


@pytest.mark.parametrize("num", [6, 24])
@pytest.mark.parametrize("knee", [None, 30.0])
def test_who_leaves_or_stands_elsewhere_is_no_reason_for_the_others_to_stop(
    num: int, knee: float | None
) -> None:
    planner = Watched()
    running = steady(planner, num)
    planner.use(model(draft=0.97, ngram=0.02, step=replace(STEP, knee_tokens=knee)))
    for step, now in enumerate((running, running[1:], running[:0:-1], running[2:], running[3:]), start=49):
        plans = planner.plan(StepView(step, step * 0.04, tuple(now), 0, 0, 100))
        assert set(plans) == {s.seq_id for s in now}
        assert {plan.method for plan in plans.values()} == {"draft"}


def test_a_newcomer_is_told_that_its_method_is_shut() -> None:
    planner = Watched()
    running = steady(planner)
    planner.set_shut([Shut("draft", Reason.ACCEPTANCE_FLOOR, "extract")])
    for step in range(49, 51):
        planner.plan(StepView(step, step * 0.04, tuple(running), 0, 0, 100))
    own = sequence("own", PolicyAssignment("draft", 5), label="extract")
    plan = planner.plan(StepView(51, 2.04, (*running, own), 0, 0, 100))["own"]
    assert planner.num_joined == 1
    assert (plan.method, plan.reason) == ("baseline", Reason.ACCEPTANCE_FLOOR)


def test_a_row_that_is_used_again_is_the_new_sequences() -> None:
    """Pinned ones have rows too, though nobody chooses for them; shut is shut for their task only."""
    planner = StepPlanner()
    planner.use(model(draft=0.97, ngram=0.02))
    planner.set_shut([Shut("draft", Reason.ACCEPTANCE_FLOOR, "extract")])
    for step in range(60):
        pinned = [
            sequence(f"p{step}-{i}", PolicyAssignment(is_pinned=True), label="extract") for i in range(4)
        ]
        planner.plan(StepView(step, step * 0.04, tuple(pinned), 0, 0, 100))
    assert len(planner._new) <= 4 + 2 * 4 + 16  # nothing is kept of those who are gone
    free = tuple(sequence(f"f{i}", AUTO) for i in range(4))
    plans = planner.plan(StepView(60, 2.4, free, 0, 0, 100))
    assert {plan.method for plan in plans.values()} == {"draft"}


def test_what_the_kill_switch_made_others_draft_is_nobodys() -> None:
    planner = StepPlanner()
    (running,) = steady(planner, 1)
    counts = [list(own) for own in planner._seats["s0"].counts]
    planner.set_force("ngram")
    for step in range(49, 80):
        forced = {"s0": SpecPlan("ngram", 4)}
        planner.plan(StepView(step, step * 0.04, (running,), 0, 0, 100))
        running = ran(running, forced, 0.0)
    planner.set_force(None)
    for step in range(80, 84):
        plans = planner.plan(StepView(step, step * 0.04, (running,), 0, 0, 100))
        running = ran(running, plans, 0.97)
    after = planner._seats["s0"].counts
    assert sum(own[1] for own in after) <= sum(own[1] for own in counts) + 4  # its own since then


@pytest.mark.parametrize("leaves", [False, True])
def test_a_trial_counts_its_own_steps_only(leaves: bool) -> None:
    """Not those after it, also where it ends because one of its sequences does, in the step in which the
    rows of those who are gone are taken back."""
    planner = StepPlanner()
    planner.use(model(draft=0.05, ngram=0.02))
    running = [sequence(f"s{i}", AUTO) for i in range(24)]
    tried: Counter[str] = Counter()
    for step in range(2000):
        plans = planner.plan(StepView(step, step * 0.04, tuple(running), 0, 0, 100))
        named = [name for name, plan in plans.items() if plan.reason == Reason.EXPLORATION]
        tried.update(named)
        running = [ran(s, plans, 0.0) for s in running]
        if step < 39:  # 63 rows in use, of which 24 by somebody
            running[step % 24] = sequence(f"s{24 + step}", AUTO)
        elif leaves and len(named) > 1 and len(running) == 24:
            running = [s for s in running if s.seq_id != named[0]]
    planner.plan(StepView(2000, 80.0, tuple(running), 0, 0, 100))
    assert tried
    assert len(running) == 24 - leaves
    for s in running:
        assert sum(steps for steps, *_ in planner._seats[s.seq_id].counts) == tried[s.seq_id]


def mixed_model() -> ModelView:
    """N-gram finds all of a code edit and nothing of a chat; a token costs half a millisecond."""
    acceptance = Acceptance()
    for task, a in (("code_edit", 1.0), ("chat", 0.02)):
        accepted = tuple(round(1000 * a**j) for j in range(1, 6))
        counts = AcceptanceCounts(1000, 1000, (1000,) * 5, accepted)
        acceptance.learn_one(AcceptanceKey("ngram", task), counts)
    keys = [AcceptanceKey("ngram", task, "greedy") for task in (None, "chat", "code_edit")]
    step = replace(STEP, c_tok_s=5e-4, c_tok_above_s=5e-4, p_tok_s=5e-4, p_dec_s=5e-4)
    known = tuple(map(acceptance.predict_one, keys))
    return ModelView(1, step, known, {"ngram": 4}, {"ngram": 1000.0})


def test_a_step_drafts_only_where_its_drafts_bring_more_than_the_margin() -> None:
    """Each of sixty whose drafts all stand is worth 2.9 % of a step. Below three margins, 9 %, nobody begins
    to draft, for the drafts slow the others down; once somebody does, two are enough."""
    planner = StepPlanner()
    planner.use(mixed_model())

    def drafting(first_step: int, num_good: int) -> set[str]:
        names: set[str] = set()
        running = [sequence(f"{first_step}-{i}", AUTO) for i in range(60 - num_good)]
        running += [sequence(f"good-{i}", AUTO, label="code_edit") for i in range(num_good)]
        for step in range(first_step, first_step + 100):
            plans = planner.plan(StepView(step, step * 0.04, tuple(running), 0, 0, 100))
            late = step >= first_step + 40
            chosen = {n for n, p in plans.items() if p.reason == Reason.PREDICTED_FASTEST}
            names |= {n for n in chosen if late and plans[n].max_draft_tokens > 0}
            running = [ran(s, plans, 1.0 if s.label == "code_edit" else 0.02) for s in running]
        return names

    assert drafting(0, num_good=3) == set()
    assert drafting(100, num_good=4) == {"good-0", "good-1", "good-2", "good-3"}
    assert drafting(200, num_good=3) == {"good-0", "good-1", "good-2"}
    assert drafting(300, num_good=2) == set()
    assert drafting(400, num_good=3) == set()


def plain_batch(planner: StepPlanner, num: int) -> list[SequenceView]:
    """So many chats that decode plainly, since drafts bring nothing."""
    planner.use(mixed_model())
    running = [sequence(f"s{i}", AUTO) for i in range(num)]
    for step in range(41):
        plans = planner.plan(StepView(step, step * 0.04, tuple(running), 0, 0, 100))
        running = [ran(s, plans, 0.02) for s in running]
    assert not any(p.reason == Reason.PREDICTED_FASTEST and p.max_draft_tokens for p in plans.values())
    return running


def test_a_newcomer_to_a_plain_batch_drafts_at_once_where_that_brings_more_than_the_margin() -> None:
    planner = StepPlanner()
    running = [*plain_batch(planner, 16), sequence("good", AUTO, label="code_edit")]
    plans = planner.plan(StepView(41, 41 * 0.04, tuple(running), 0, 0, 100))
    assert plans["good"].max_draft_tokens > 0


def test_a_plain_batch_does_not_decide_for_the_next_while_prompts_are_computed() -> None:
    planner = StepPlanner()
    plain_batch(planner, 60)
    running = tuple(sequence(f"good{i}", AUTO, label="code_edit") for i in range(4))
    plans = planner.plan(StepView(41, 41 * 0.04, running, 512, 0, 100))
    assert all(plans[s.seq_id].max_draft_tokens > 0 for s in running)
