"""The step planner: fixed arms, the kill switch, closed doors, probes, and any input at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.spec.planner import SequenceView, SpecPlan, StepView
from engine.types import MethodCounts, PolicyAssignment
from router_models.acceptance import Acceptance
from router_models.types import AcceptanceCounts, AcceptanceKey, DraftCoefficients, StepCoefficients
from specgate.policy.plan_step import StepPlanner
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut
from specgate.policy.view import ModelView, PlannerSettings

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
    free = tuple(sequence(f"f{i}", AUTO) for i in range(4))
    plans = planner.plan(StepView(60, 2.4, free, 0, 0, 100))
    assert {plan.method for plan in plans.values()} == {"draft"}
    assert len(planner._new) == 0


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
    planner.plan(StepView(80, 3.2, (running,), 0, 0, 100))
    assert [own[0] - old[0] for own, old in zip(planner._seats["s0"].counts, counts, strict=True)] <= [0, 1]
    assert sum(own[1] for own in planner._seats["s0"].counts) <= sum(old[1] for old in counts) + 1


def test_a_trial_in_a_steady_batch_counts_its_own_steps_only() -> None:
    """After it has ended nothing more is noted for the arm that was tried."""
    planner = StepPlanner()
    planner.use(model(draft=0.05, ngram=0.02))
    running = [sequence(f"s{i}", AUTO) for i in range(12)]
    tried = dict.fromkeys((s.seq_id for s in running), 0)
    for step in range(2000):
        plans = planner.plan(StepView(step, step * 0.04, tuple(running), 0, 0, 100))
        for name, plan in plans.items():
            tried[name] += plan.reason == Reason.EXPLORATION
        running = [ran(s, plans, 0.0) for s in running]
    planner.plan(StepView(2001, 81.0, tuple(running), 0, 0, 100))
    noted = {name: sum(steps for steps, *_ in seat.counts) for name, seat in planner._seats.items()}
    assert sum(tried.values()) > 0
    assert noted == tried


def test_a_trial_that_ends_because_one_of_its_sequences_is_gone_is_over_for_all() -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.05, ngram=0.02))
    running = [sequence(f"s{i}", AUTO) for i in range(40)]
    tried = dict.fromkeys((s.seq_id for s in running), 0)
    for step in range(4000):
        plans = planner.plan(StepView(step, step * 0.04, tuple(running), 0, 0, 100))
        named = [name for name, plan in plans.items() if plan.reason == Reason.EXPLORATION]
        for name in named:
            tried[name] += 1
        running = [ran(s, plans, 0.0) for s in running]
        if len(named) > 1 and len(running) == 40:  # so many leave that their rows are taken back
            running = [s for s in running if s.seq_id in named[1:]][:3]
    planner.plan(StepView(4000, 161.0, tuple(running), 0, 0, 100))
    for s in running:
        assert sum(steps for steps, *_ in planner._seats[s.seq_id].counts) == tried[s.seq_id]
    assert len(running) < 40


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
