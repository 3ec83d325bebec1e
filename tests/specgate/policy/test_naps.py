"""Steps for which the planner is not asked: naps, plans that stand, and what is made of them afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.spec.planner import StepView
from engine.types import MethodCounts, PolicyAssignment
from specgate.policy.naps import Naps
from specgate.policy.plan_step import StepPlanner
from specgate.policy.probing import Probing
from specgate.policy.reasons import Reason
from specgate.policy.seats import Seat
from specgate.policy.shut import Shut
from specgate.policy.step_choice import Plan
from tests.specgate.policy.plan_samples import AUTO, model, sequence, view

TELL: dict[str, Callable[[StepPlanner], None]] = {
    "batch": lambda _: None,  # that is seen by its size
    "model": lambda planner: planner.use(model(draft=0.5, ngram=0.03)),
    "doors": lambda planner: planner.set_shut([Shut("draft", Reason.LOAD_GUARD)]),
    "kill switch": lambda planner: planner.set_force("ngram"),
}


def plain_batch(planner: StepPlanner, first: int, last: int, num: int) -> list[int]:
    """Steps of a batch for which nothing pays, as the engine runs them; those in which it was asked."""
    asked = []
    for step in range(first, last):
        if not planner.sleeps(step, num):
            asked.append(step)
            plans = planner.plan(view(step, step * 0.05, **{f"s{i}": AUTO for i in range(num)}))
            drafting = [plan for plan in plans.values() if plan.max_draft_tokens]
            assert all(plan.reason == Reason.EXPLORATION for plan in drafting)
    return asked


def test_a_batch_that_decodes_plainly_is_left_to_itself_for_some_steps() -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.05, ngram=0.02))
    assert plain_batch(planner, 1, 40, 8) == [1, 9, 25]  # for longer, the longer it goes on
    assert plain_batch(planner, 40, 44, 3) == [40, 41, 42, 43]  # a small one, where it costs nothing
    assert plain_batch(planner, 44, 53, 8) == [44, 52]


def test_naps_have_a_limit() -> None:
    naps, lengths = Naps(), []
    for start in range(0, 4000, 1000):
        assert naps.begin(start, 8)
        lengths.append(sum(naps.holds(step, 8) for step in range(start, start + 1000)))
    assert lengths == [8, 16, 32, 32]


@pytest.mark.parametrize("news", TELL)
def test_news_wakes_it(news: str) -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.05, ngram=0.02))
    assert plain_batch(planner, 1, 4, 8) == [1]
    assert planner.sleeps(4, 10)
    TELL[news](planner)
    assert not planner.sleeps(4, 11 if news == "batch" else 8)


def kept_steps(planner: StepPlanner, first: int, last: int, num: int) -> int:
    """Steps of a batch whose drafts pay, as the engine runs them: in how many of them it was not asked."""
    num_kept = 0
    for step in range(first, last):
        if planner.stands(step):
            num_kept += 1
        else:
            plans = planner.plan(view(step, step * 0.03, **{f"s{i}": AUTO for i in range(num)}))
            assert any(plan.max_draft_tokens for plan in plans.values())
    return num_kept


@pytest.mark.parametrize("num", [1, 4])
def test_drafts_that_pay_are_granted_for_some_steps_at_once(num: int) -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.9, ngram=0.02))
    assert kept_steps(planner, 1, 65, num) > 40


@pytest.mark.parametrize("news", [name for name in TELL if name != "batch"])
def test_news_ends_what_was_granted(news: str) -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.9, ngram=0.02))
    step = 1
    while not planner.stands(step):
        planner.plan(view(step, step * 0.03, a=AUTO))
        step += 1
    TELL[news](planner)
    assert not planner.stands(step)


def test_a_seat_counts_the_steps_it_was_granted_in_unasked() -> None:
    seat = Seat(sequence("a", AUTO), 0, 1)
    seat.granted = 1
    seat.note(replace(sequence("a", AUTO), num_drafts=6, num_granted_tokens=18, num_accepted_tokens=9), 8)
    assert seat.counts == [[8, 6, 18, 9]]


def test_who_came_in_a_nap_leaves_plain_decoding_only_for_the_margin() -> None:
    """It was told so, whatever it had been assigned; what its text showed meanwhile is taken in."""
    planner = StepPlanner()
    planner.use(model(draft=0.05, ngram=0.02))
    assert plain_batch(planner, 1, 4, 8) == [1]
    seen = (MethodCounts("ngram", num_steps=40, num_drafts=30),)
    came = replace(sequence("new", PolicyAssignment("ngram", 4)), num_output_tokens=5, in_hindsight=seen)
    planner.plan(StepView(9, 0.5, (*view(9, 0.5, s0=AUTO).sequences, came), 0, 0, 100))
    seat = planner._seats["new"]
    assert (seat.arm, seat.is_planned) == (0, True)
    assert [40, 30, 0, 0] in seat.counts


def test_steps_in_which_a_sequence_was_away_are_not_those_it_was_granted_in() -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.9, ngram=0.02))
    for step in range(1, 9):
        planner.plan(view(step, step * 0.03, a=AUTO, b=AUTO))
    before = [list(counts) for counts in planner._seats["a"].counts]
    for step in range(9, 40):
        if not planner.stands(step):
            planner.plan(view(step, step * 0.03, b=AUTO))  # `a` was preempted
    planner.plan(view(40, 1.2, a=AUTO, b=AUTO))
    assert planner._seats["a"].counts == before


def test_a_held_sequence_behind_a_shut_door_was_granted_nothing() -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.9, ngram=0.02))
    planner.set_shut([Shut("draft", Reason.LOAD_GUARD)])
    held = PolicyAssignment("draft", 3, hold_steps=30)
    for step in range(1, 9):
        planner.plan(view(step, step * 0.03, a=held))
    assert planner._seats["a"].counts == [[0, 0, 0, 0]] * 2


def test_it_does_not_sleep_through_a_trial() -> None:
    planner = StepPlanner()
    planner.use(model(draft=0.05, ngram=0.02))
    asked = plain_batch(planner, 1, 4000, 8)
    tried = [step for step, after in pairwise(asked) if after == step + 1]
    assert len(tried) >= 6


def test_naps_are_time_of_the_engines_of_which_trials_get_their_share() -> None:
    earned_s = []
    for num_steps in (1, 8):
        probing = Probing()
        before_s = probing.probes.earning_s
        probing.account(0.4, (0.0, Plan((), 8.0, 0.0, 0.05)), num_steps)
        earned_s.append(probing.probes.earning_s - before_s)
    assert earned_s == pytest.approx([0.15, 0.4], abs=0.03)  # one step that took so long was idleness


def test_a_large_batch_earns_less_for_probes() -> None:
    """All of it waits for one."""
    earned_s = []
    for num in (1, 8, 16, 64):
        probing = Probing()
        before_s = probing.probes.earning_s
        probing.account(0.05, (0.0, Plan((), 8.0, 0.0, 0.05)), 1, num)
        earned_s.append(probing.probes.earning_s - before_s)
    assert [each / earned_s[0] for each in earned_s] == pytest.approx([1, 1, 1 / 2, 1 / 8], abs=0.05)
