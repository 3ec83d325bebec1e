"""The step planner: fixed arms, the kill switch, closed doors, probes, and any input at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.spec.planner import SequenceView, StepView
from engine.types import MethodCounts, PolicyAssignment
from specgate.policy.plan_step import StepPlanner
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut
from specgate.policy.view import ModelView, PlannerSettings
from tests.specgate.policy.plan_samples import AUTO, STEP, model, sequence, view


def test_without_a_model_it_follows_assignments_and_the_kill_switch() -> None:
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


def test_with_a_model_free_requests_get_what_pays_and_fixed_ones_what_they_asked_for() -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.9, ngram=0.2))
    plans = planner.plan(
        view(
            auto=AUTO, other=PolicyAssignment("ngram", 4), exact=PolicyAssignment("ngram", 7, is_exact=True),
            plain=PolicyAssignment(is_exact=True), pinned=PolicyAssignment("ngram", 3, is_pinned=True),
        )
    )  # fmt: skip
    assert plans["auto"].method == plans["other"].method == "draft"
    assert plans["auto"].max_draft_tokens >= 3
    assert (plans["exact"].method, plans["exact"].max_draft_tokens) == ("ngram", 7)
    assert (plans["pinned"].method, plans["pinned"].max_draft_tokens) == ("ngram", 3)
    assert "plain" not in plans


def test_what_does_not_pay_is_not_drafted_and_says_so() -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.05, ngram=0.02))
    plan = planner.plan(view(a=PolicyAssignment("draft", 5)))["a"]
    assert (plan.method, plan.max_draft_tokens, plan.reason) == ("baseline", 0, "predicted_fastest")


def test_following_is_a_setting() -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.05, planner=PlannerSettings(is_following=True)))
    assert planner.plan(view(a=PolicyAssignment("draft", 5)))["a"].method == "draft"


def test_an_exploration_stands_for_its_steps() -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.05, ngram=0.02))
    methods = []
    for step in range(6):
        plan = planner.plan(view(step, step * 0.03, a=PolicyAssignment("draft", 3, hold_steps=4)))["a"]
        methods.append((plan.method, plan.reason))
    assert methods[:4] == [("draft", "exploration")] * 4
    assert methods[4] == ("baseline", "predicted_fastest")


def test_closed_doors_hold_for_free_requests_and_the_hard_ones_for_all() -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.9, ngram=0.02))
    assert planner.plan(view(a=AUTO))["a"].method == "draft"
    planner.set_shut([Shut("draft", Reason.ACCEPTANCE_FLOOR)])
    plans = planner.plan(view(a=AUTO, b=PolicyAssignment("draft", 5, is_exact=True, is_pinned=True)))
    assert plans["a"].max_draft_tokens == 0
    assert plans["b"].method == "draft"
    planner.set_shut([Shut("draft", Reason.DRAFTER_ERROR, is_hard=True)])
    plans = planner.plan(view(a=AUTO, b=PolicyAssignment("draft", 5, is_exact=True, is_pinned=True)))
    assert plans["b"].reason == "drafter_error"
    planner.set_shut([])
    assert planner.plan(view(a=AUTO))["a"].method == "draft"


def test_an_unproven_drafter_is_only_probed() -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.95, ngram=0.02, num_steps={"ngram": 1000.0, "draft": 3.0}))
    reasons = set()
    now_s = 0.0
    for step in range(1500):
        plan = planner.plan(view(step, now_s, a=AUTO)).get("a")
        now_s += 0.0215
        if plan is not None and plan.method == "draft":
            reasons.add(plan.reason)
    assert reasons == {"exploration"}


@pytest.mark.parametrize("draft", [0.05, 0.9])
def test_nothing_is_tried_on_who_does_not_want_it(draft: float) -> None:
    """Neither a drafter that does not pay nor plain decoding where one does."""
    tried = {}
    for may_probe in (True, False):
        planner = StepPlanner()
        planner.use(model(draft=draft, ngram=0.02))
        running = [sequence("a", AUTO), sequence("b", PolicyAssignment(may_probe=may_probe))]
        methods = set()
        for step in range(1500):
            plans = planner.plan(StepView(step, step * 0.0215, tuple(running), 0, 0, 100))
            for i, s in enumerate(running):
                plan = plans.get(s.seq_id)
                depth = plan.max_draft_tokens if plan is not None else 0
                running[i] = replace(
                    s, num_drafts=s.num_drafts + (depth > 0), num_draft_tokens=s.num_draft_tokens + depth,
                    num_accepted_tokens=s.num_accepted_tokens + (depth if draft > 0.5 else 0),
                )  # fmt: skip
            methods.add(plan.method if plan is not None and depth else "baseline")
        tried[may_probe] = methods
    assert tried[True] >= {"baseline", "draft"}
    assert tried[False] == ({"draft"} if draft > 0.5 else {"baseline"})


DOORS = st.lists(
    st.builds(
        Shut, policy=st.sampled_from(["draft", "ngram"]), reason=st.just(Reason.LOAD_GUARD),
        task=st.sampled_from([None, None, "chat"]), is_hard=st.booleans(), lets_probes=st.booleans(),
    ),
    max_size=3,
)  # fmt: skip
ALL_SHUT = [Shut("draft", Reason.LOAD_GUARD), Shut("ngram", Reason.LOAD_GUARD)]


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_asleep_is_a_promise(data: st.DataObject) -> None:
    """While it says so, nobody who was not pinned is granted a draft, whatever went on before: trials, plain
    probes, holds, a kill switch that was lifted. Told once, everybody decodes plainly."""
    planner = StepPlanner()
    planner.use(model(draft=data.draw(st.sampled_from([0.05, 0.9])), ngram=0.3))
    assigned = st.builds(
        PolicyAssignment, method=st.sampled_from(["baseline", "ngram", "draft"]),
        num_speculative_tokens=st.integers(0, 4), is_probe=st.booleans(), hold_steps=st.integers(0, 40),
    )  # fmt: skip
    running = {f"s{i}": p for i, p in enumerate(data.draw(st.lists(assigned, min_size=1, max_size=4)))}
    num_asleep = 0
    for step in range(1, 200):
        if data.draw(st.integers(0, 20)) == 0:
            planner.set_shut(data.draw(st.one_of(st.just(ALL_SHUT), DOORS)))
        if data.draw(st.integers(0, 60)) == 0:
            planner.set_force(data.draw(st.sampled_from([None, "baseline", "draft"])))
        if step == 150:
            planner.set_shut(ALL_SHUT)
        if planner.is_asleep:
            assert planner.sleeps(step, len(running))
        plans = planner.plan(view(step, step * 0.05, **running))
        if planner.is_asleep:
            num_asleep += 1
            drafting = {name for name, p in plans.items() if p.max_draft_tokens and p.method != "baseline"}
            assert not drafting
    assert num_asleep


def test_without_arms_it_does_not_sleep() -> None:
    planner = StepPlanner()
    planner.set_shut(ALL_SHUT)
    assert not planner.is_asleep  # no model
    planner.use(model(step=replace(STEP, drafters={}, num_steps=500)))
    assert not planner.is_asleep  # it follows what was assigned
    planner.use(model(methods={"ngram": 4, "draft": 5, "suffix": 8}))
    assert not planner.is_asleep  # one that is no arm yet is not shut


def test_sleep_is_time_that_passes() -> None:
    """A hold that was given for some steps does not outlive them because nobody asked meanwhile."""
    planner = StepPlanner()
    planner.use(model(draft=0.05, ngram=0.02))
    held = PolicyAssignment("draft", 3, hold_steps=30)
    assert planner.plan(view(1, 0.02, a=held))["a"].method == "draft"
    planner.set_shut(ALL_SHUT)
    assert planner.plan(view(2, 0.04, a=held))["a"].max_draft_tokens == 0
    planner.set_shut([])
    plan = planner.plan(view(60, 1.2, a=held))["a"]
    plan = planner.plan(view(61, 1.22, a=held))["a"]
    assert (plan.method, plan.reason) == ("baseline", "predicted_fastest")


def test_it_sleeps_while_all_is_shut_for_all() -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.9, ngram=0.8))
    both = [Shut("draft", Reason.LOAD_GUARD), Shut("ngram", Reason.LOAD_GUARD)]
    states = []
    half_shut = [both[0], replace(both[1], task="chat")]
    half_open = [replace(door, lets_probes=True) for door in both]
    for doors in ([], both[:1], both, half_shut, half_open):
        planner.set_shut(doors)
        states.append(planner.is_asleep)
    assert states == [False, False, True, False, False]


def test_its_own_text_turns_a_request_away_from_its_tasks_method() -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.8, ngram=0.02))
    easy, hard = sequence("easy", AUTO), sequence("hard", AUTO)
    for step in range(120):
        plans = planner.plan(StepView(step, step * 0.03, (easy, hard), 0, 0, 100))
        for s in (easy, hard):
            plan = plans.get(s.seq_id)
            depth = plan.max_draft_tokens if plan is not None else 0
            accepted = depth if s is easy else 0
            done = replace(
                s, num_tokens=s.num_tokens + accepted + 1, num_drafts=s.num_drafts + (depth > 0),
                num_draft_tokens=s.num_draft_tokens + depth,
                num_accepted_tokens=s.num_accepted_tokens + accepted,
            )  # fmt: skip
            easy, hard = (done, hard) if s is easy else (easy, done)
    plans = planner.plan(StepView(121, 4.0, (easy, hard), 0, 0, 100))
    assert plans["easy"].max_draft_tokens == 5
    assert plans["hard"].max_draft_tokens < plans["easy"].max_draft_tokens


def test_snapshots_travel_as_plain_values() -> None:
    planner = StepPlanner()
    planner.update(model().to_wire())
    assert planner.plan(view(a=AUTO))["a"].method == "draft"
    with pytest.raises(ValueError):
        planner.update({"version": "nonsense"})


def test_other_methods_begin_with_a_clean_table() -> None:
    """Seats that waited for their row to be computed anew belong to the table before."""
    planner = StepPlanner()
    planner.use(model())
    planner.plan(view(a=AUTO))
    planner.set_shut([Shut("ngram", Reason.ACCEPTANCE_FLOOR, "chat")])  # every row waits
    planner.use(model(methods={"ngram": 2}))
    for step in range(20):
        planner.plan(StepView(step, step * 0.03, (sequence("b", AUTO),), 0, 0, 100))


def test_what_a_drafter_would_have_done_turns_a_request_to_it_without_a_probe() -> None:
    """The task's n-grams find little, this request's nearly all."""
    planner = StepPlanner()
    planner.use(model(draft=0.02, ngram=0.02))
    a = sequence("a", AUTO)
    for step in range(120):
        told = (MethodCounts("ngram", step, step, 4 * step, (step,) * 4, (step,) * 4),)
        a = replace(a, num_tokens=a.num_tokens + 1, num_output_tokens=step + 1, in_hindsight=told)
        plan = planner.plan(StepView(step, step * 0.03, (a,), 0, 0, 100)).get("a")
        assert plan is None or plan.method != "ngram" or plan.reason == Reason.PREDICTED_FASTEST
    assert plan is not None
    assert (plan.method, plan.max_draft_tokens) == ("ngram", 4)
    reasons = set()
    for step in range(120, 1500):  # others come that nobody looked at yet, and no time is short for probes
        young = sequence(f"b{step // 10}", AUTO, num_output_tokens=step % 10)
        plan = planner.plan(StepView(step, step * 0.03, (young,), 0, 0, 100)).get(young.seq_id)
        if plan is not None and plan.method == "ngram":
            reasons.add(plan.reason)
    assert Reason.EXPLORATION not in reasons


numbers = st.integers(-5, 10_000)
assignments = st.builds(
    PolicyAssignment,
    method=st.sampled_from(["baseline", "ngram", "draft", "eagle"]),
    num_speculative_tokens=st.integers(-1, 20),
    is_exact=st.booleans(),
    is_pinned=st.booleans(),
    hold_steps=st.integers(0, 3),
)
sequences = st.builds(
    SequenceView,
    seq_id=st.sampled_from("abcdef"),
    policy=assignments,
    label=st.sampled_from(["chat", "", "no such task"]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.5]),
    num_tokens=numbers,
    num_output_tokens=numbers,
    num_remaining_tokens=numbers,
    num_drafts=numbers,
    num_draft_tokens=numbers,
    num_accepted_tokens=numbers,
    last_method=st.just("ngram"),
    last_num_draft_tokens=numbers,
    last_num_accepted_tokens=numbers,
)
views = st.builds(
    StepView,
    step=numbers,
    now_s=st.floats(-10, 1e6),
    sequences=st.lists(sequences, max_size=6).map(tuple),
    num_prefill_tokens=st.integers(0, 600),
    num_waiting=numbers,
    num_free_blocks=numbers,
)
events = views | st.sampled_from(["shut", "open", "force", "release", "other", "model", "cold"])


@settings(max_examples=40, deadline=None)
@given(st.lists(events, max_size=25))
def test_nothing_makes_it_raise(script: list[Any]) -> None:
    planner = StepPlanner()
    planner.use(model())
    for event in script:
        match event:
            case "shut":
                planner.set_shut([Shut("ngram", Reason.ACCEPTANCE_FLOOR, "chat")])
            case "open":
                planner.set_shut([])
            case "force":
                planner.set_force("baseline")
            case "release":
                planner.set_force(None)
            case "other":
                planner.use(model(methods={"ngram": 2}))
            case "model":
                planner.use(model(num_drifts=3))
            case "cold":
                planner.use(ModelView())
            case StepView():
                plans = planner.plan(event)
                assert set(plans) <= {s.seq_id for s in event.sequences}
                assert all(plan.max_draft_tokens >= 0 for plan in plans.values())
