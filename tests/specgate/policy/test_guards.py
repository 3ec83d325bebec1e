"""The guards of one model: what shuts what, what overrides and rollouts get past."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.types import BASELINE, DrafterError, DraftWork, PolicyAssignment
from specgate.config.guards import (
    AcceptanceGuard,
    ConsistencyGuard,
    LatencyGuard,
    LoadGuard,
    MemoryGuard,
)
from specgate.policy.door import DoorState
from specgate.policy.guard_readings import NoCosts, band_of
from specgate.policy.guards import GuardPanel, Limits
from specgate.policy.plan_step import StepPlanner
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut
from tests.specgate.policy.guard_panel import CONFIG, LIMITS, Costs, at, shut_of, trips
from tests.specgate.policy.guard_samples import model_view, outcome, step, step_view


def test_queue_wait_shuts_what_costs_capacity_or_is_unknown_and_spares_what_raises_it() -> None:
    panel = GuardPanel(CONFIG, LIMITS)
    costs = Costs({"ngram": 0.8})  # nothing is known of draft
    changes = panel.look(at(0, costs, queue_wait_p95_ms=250))
    assert trips(changes) == [("queue_wait_guard", "draft", None)]
    assert "250 ms, above 200" in changes[0].why
    assert shut_of(panel) == {"draft": Reason.QUEUE_WAIT_GUARD}
    assert trips(panel.look(at(1, Costs({"ngram": 1.1}), queue_wait_p95_ms=250))) == [
        ("queue_wait_guard", "ngram", None)
    ]
    panel.look(at(12, queue_wait_p95_ms=195))
    assert len(shut_of(panel)) == 2  # within the hysteresis
    panel.look(at(12, queue_wait_p95_ms=100))
    assert shut_of(panel) == {}


def test_a_queue_that_will_take_too_long_shuts_before_anybody_has_waited() -> None:
    panel = GuardPanel(CONFIG, LIMITS)
    changes = panel.look(at(0, num_queued=2, num_waiting=1))  # 3 ahead, 2 done per second: 1.5 s
    assert {c.kind for c in changes} == {"forecast"}
    # They came since the last step began, and are let in with the next.
    assert GuardPanel(CONFIG, LIMITS).look(at(0, num_waiting=5)) == []
    held = GuardPanel(CONFIG, LIMITS).look(at(0, num_waiting=5, num_held=3))  # the backend has no room
    assert "the 3 queued" in held[0].why
    silent = GuardPanel(replace(CONFIG, queue_wait=replace(CONFIG.queue_wait, has_forecast=False)), LIMITS)
    assert silent.look(at(0, num_queued=2)) == []


def test_load_guards_look_at_rate_and_rho() -> None:
    class Near(NoCosts):
        def rho(self, answers_per_s: float) -> float:
            return answers_per_s / 4

    panel = GuardPanel(CONFIG, LIMITS)
    assert {c.kind for c in panel.look(at(0, requests_per_s=11))} == {"rate"}
    near = GuardPanel(CONFIG, LIMITS)
    assert near.look(at(0, Near(), answers_per_s=5, num_admitted=8)) == []  # callers that wait for answers
    changes = near.look(at(1, Near(), answers_per_s=3.9, num_admitted=16))
    assert {c.kind for c in changes} == {"rho"}
    assert near.look(at(7, Near(), answers_per_s=3.9, num_admitted=14)) == []  # within the hysteresis
    changes = near.look(at(7, Near(), answers_per_s=3.9, num_admitted=12))  # the rate has yet to fade
    assert {c.after for c in changes} == {DoorState.ALLOWED}
    unlimited = GuardPanel(replace(CONFIG, load=LoadGuard(max_rho=None)), Limits())
    assert unlimited.look(at(0, Near(), answers_per_s=1e6)) == []


def test_memory_and_drafter_doors_are_hard_and_others_are_not() -> None:
    panel = GuardPanel(replace(CONFIG, memory=MemoryGuard(max_memory_bytes=1000)), LIMITS)
    panel.look(at(0, memory=2000, free_kv_ratio=0.5))
    pinned = PolicyAssignment("ngram", 4, is_pinned=True)
    refusal = panel.shut.refusal("ngram", "chat", pinned)
    assert refusal is not None
    assert refusal.reason is Reason.MEMORY_PRESSURE
    panel = GuardPanel(CONFIG, LIMITS)
    panel.look(at(0, free_kv_ratio=0.01, requests_per_s=99))
    assert shut_of(panel)["ngram"] is Reason.MEMORY_PRESSURE  # the hard one is told first
    panel = GuardPanel(CONFIG, LIMITS)
    panel.look(at(0, requests_per_s=99))
    assert panel.shut.refusal("ngram", "chat", pinned) is None
    assert panel.shut.refusal("ngram", "chat", PolicyAssignment("ngram", 4)) is not None
    assert panel.shut.refusal(BASELINE, "chat", PolicyAssignment()) is None


@pytest.mark.parametrize(("kind", "num"), [("oom", 1), ("verify_mismatch", 1), ("exception", 6), ("nan", 6)])
def test_drafter_errors_shut_by_kind(kind: str, num: int) -> None:
    panel = GuardPanel(CONFIG, LIMITS)
    for count in range(num):
        assert shut_of(panel) == {}, count
        panel.add_step(step(errors=(DrafterError("draft", kind, "boom"),)), 0.0)
        changes = panel.look(at(0.0))
    assert trips(changes) == [("drafter_error", "draft", None)]
    assert changes[0].kind == kind
    assert f"{num} {kind}" in changes[0].why
    # Tried again after the cool-down, by probes; three clean tries open it.
    panel.look(at(10.1))
    assert panel.openings("chat", may_probe=True).probes.keys() == {"draft"}
    for _ in range(3):
        panel.add_step(step(DraftWork("draft", 1, 1, 4, 2)), 10.2)
    panel.look(at(11))
    assert shut_of(panel) == {}


def test_errors_while_probing_shut_for_longer() -> None:
    panel = GuardPanel(CONFIG, LIMITS)
    panel.add_step(step(errors=(DrafterError("draft", "oom", "boom"),)), 0.0)
    assert len(trips(panel.look(at(0)))) == 1
    panel.add_step(step(errors=(DrafterError("draft", "oom", "boom"),)), 5.0)
    assert panel.look(at(5)) == []  # one that was under way
    panel.look(at(10))
    panel.add_step(step(errors=(DrafterError("draft", "exception", "boom"),)), 11.5)  # one is enough now
    assert trips(panel.look(at(11.5))) == [("drafter_error", "draft", None)]
    door = next(d for d in panel.describe(11.5) if d["guard"] == "drafter_error")
    assert (door["num_trips"], door["opens_in_s"]) == (2, 20)


def test_acceptance_below_the_load_dependent_floor_shuts_at_once_by_steps() -> None:
    panel = GuardPanel(CONFIG, LIMITS)
    costs = Costs(floor=1.2)
    for _ in range(90):
        panel.add_step(step(DraftWork("draft", 4, 1, 4, 1), batch=1), 1.0)  # E = 2 at a floor of 1.3
    assert trips(panel.look(at(1, costs))) == []
    for _ in range(30):
        panel.add_step(step(DraftWork("draft", 4, 16, 64, 16), batch=16), 2.0)  # E = 2, floor 2.8
    changes = panel.look(at(2, costs))
    assert trips(changes) == [("acceptance_floor", "draft", None)]
    assert "floor at B=" in changes[0].why
    blind = GuardPanel(replace(CONFIG, acceptance=AcceptanceGuard(min_acceptance=0.3)), LIMITS)
    for _ in range(90):
        blind.add_step(step(DraftWork("draft", 4, 1, 4, 0)), 1.0)  # no model is needed for this
    assert trips(blind.look(at(1))) == [("acceptance_floor", "draft", None)]
    good = GuardPanel(replace(CONFIG, acceptance=AcceptanceGuard(min_acceptance=0.3)), LIMITS)
    for accepted in (0, 1, 4) * 30:
        good.add_step(step(DraftWork("draft", 4, 1, 4, accepted)), 1.0)
    assert trips(good.look(at(1))) == []


def test_acceptance_has_a_static_floor_per_task_without_any_model() -> None:
    panel = GuardPanel(replace(CONFIG, acceptance=AcceptanceGuard(min_acceptance=0.3)), LIMITS)
    panel.add_outcome(outcome(task="chat", accepted=2, reached=40, drafts=35), 0.0)
    panel.add_outcome(outcome(task="code_edit", accepted=30, reached=40, drafts=35), 0.0)
    assert trips(panel.look(at(0))) == [("acceptance_floor", "ngram", "chat")]
    assert shut_of(panel, "chat") == {"ngram": Reason.ACCEPTANCE_FLOOR}
    assert shut_of(panel, "code_edit") == {}


def fill(panel: GuardPanel, policy: str, tpot_s: float, num: int, now_s: float, **more: object) -> None:
    for index in range(num):
        spread = 1 + 0.1 * ((index * 7) % 11 - 5) / 5
        panel.add_outcome(outcome(policy, tpot_s=tpot_s * spread, **more), now_s)  # type: ignore[arg-type]


def test_latency_is_compared_with_baseline_runs_of_the_same_task_and_prompt_band() -> None:
    config = replace(CONFIG, latency=LatencyGuard(min_samples=20))
    panel = GuardPanel(config, LIMITS)
    fill(panel, "ngram", 0.014, 40, 0.0, num_prompt_tokens=4000)  # long prompts: slower by nature
    fill(panel, BASELINE, 0.010, 40, 0.0, num_prompt_tokens=100)
    assert panel.look(at(0)) == []
    fill(panel, BASELINE, 0.0138, 40, 0.0, num_prompt_tokens=3500)
    assert panel.look(at(1)) == []
    fill(panel, "ngram", 0.014, 40, 1.0, num_prompt_tokens=110)
    changes = panel.look(at(2))
    assert trips(changes) == [("latency_guard", "ngram", "chat")]
    assert "x baseline" in changes[0].why
    assert shut_of(panel, "translation") == {}


def test_a_busy_minute_is_not_compared_with_a_quiet_one() -> None:
    """Steps are shared: everything is slower under load. Only what met like load tells policies apart."""
    panel = GuardPanel(replace(CONFIG, latency=LatencyGuard(min_samples=20)), LIMITS)
    fill(panel, BASELINE, 0.010, 40, 0.0, num_in_flight=1)
    fill(panel, "ngram", 0.030, 60, 0.0, num_in_flight=12)
    assert panel.look(at(0)) == []
    fill(panel, BASELINE, 0.020, 40, 1.0, num_in_flight=13)
    assert trips(panel.look(at(2))) == [("latency_guard", "ngram", "chat")]


def test_few_drafts_that_may_be_bad_luck_do_not_shut() -> None:
    """35 drafts with 0.6 tokens each where 0.8 are needed: two standard errors. Ten times as many: enough."""
    for times, expected in ((1, []), (10, [("acceptance_floor", "ngram", "chat")])):
        panel = GuardPanel(CONFIG, LIMITS)
        for _ in range(times):
            panel.add_outcome(outcome("ngram", accepted=21, reached=49, drafts=35), 0.0)
        assert trips(panel.look(at(1, Costs(floor=1.8)))) == expected


@pytest.mark.parametrize(
    ("each_has_one", "expected"), [(False, []), (True, [("latency_guard", "ngram", "chat")])]
)
def test_a_stall_of_the_machine_is_no_fault_of_those_that_ran(
    each_has_one: bool, expected: list[tuple[str, str, str | None]]
) -> None:
    """It is among the gaps of all eight that ran at the time: of 240 gaps more than a hundredth."""
    panel = GuardPanel(replace(CONFIG, latency=LatencyGuard(min_samples=20)), LIMITS)
    for number in range(40):
        panel.add_outcome(outcome(BASELINE, tpot_s=0.010), now_s=0)
        is_hit = each_has_one or 16 <= number < 24
        stalled = replace(outcome(tpot_s=0.010), inter_token_s=((0.010, 1),) * 5 + ((0.4, 1),))
        panel.add_outcome(stalled if is_hit else outcome(tpot_s=0.010), now_s=0)
    changes = panel.look(at(1))
    assert trips(changes) == expected
    assert {change.kind for change in changes} <= {"itl_p99"}


def test_latency_within_the_noise_does_not_shut() -> None:
    panel = GuardPanel(CONFIG, LIMITS)
    fill(panel, "ngram", 0.0112, 25, 0.0)  # 12 % slower in a spread of 6 %: beyond 1.10, not beyond doubt
    fill(panel, BASELINE, 0.0100, 25, 0.0)
    assert panel.look(at(0)) == []
    reading = next(d for d in panel.describe(0) if d["guard"] == "latency_guard")
    assert reading["state"] == "allowed"
    assert reading["reading"] < 1.1


def test_baseline_runs_are_taken_where_there_are_none_to_compare_with() -> None:
    panel = GuardPanel(replace(CONFIG, latency=LatencyGuard(min_samples=20, control_share=0.1)), LIMITS)
    for _ in range(30):
        assert not panel.takes_control("ngram", "chat", band_of(100, 0), 0.0)  # nothing ran yet to judge
    fill(panel, "ngram", 0.01, 40, 0.0)
    assert panel.takes_control("ngram", "chat", band_of(100, 0), 0.0)
    assert not panel.takes_control("ngram", "chat", band_of(5000, 0), 0.0)  # longer prompts
    assert not panel.takes_control("ngram", "chat", band_of(100, 9), 0.0)  # more load
    taken = sum(panel.takes_control("ngram", "chat", band_of(100, 0), 0.0) for _ in range(1000))
    assert 80 <= taken <= 100
    fill(panel, BASELINE, 0.01, 20, 0.0)
    assert not any(panel.takes_control("ngram", "chat", band_of(100, 0), 0.0) for _ in range(100))
    off = GuardPanel(replace(CONFIG, latency=LatencyGuard(mode="off")), LIMITS)
    fill(off, "ngram", 0.01, 40, 0.0)
    assert not any(off.takes_control("ngram", "chat", band_of(100, 0), 0.0) for _ in range(200))


def test_one_answer_that_differs_shuts_its_policy() -> None:
    panel = GuardPanel(CONFIG, LIMITS)
    panel.add_check("ngram", True, 0.0)
    assert panel.look(at(0)) == []
    panel.add_check("ngram", False, 1.0)
    assert trips(panel.look(at(1))) == [("consistency_guard", "ngram", None)]
    panel.look(at(11.1))
    assert panel.wants_check("ngram")
    for _ in range(3):
        panel.add_check("ngram", True, 11.2)
    panel.look(at(11.5))
    assert shut_of(panel) == {}
    assert not panel.wants_check("ngram")


def test_observed_guards_report_and_shut_nothing_and_switched_off_ones_do_neither() -> None:
    observe = GuardPanel(replace(CONFIG, load=LoadGuard(mode="observe")), LIMITS)
    changes = observe.look(at(0, requests_per_s=99))
    assert [c.is_enforced for c in changes] == [False, False]
    assert shut_of(observe) == {}
    assert {d["state"] for d in observe.describe(0) if d["guard"] == "load_guard"} == {"shut"}
    off = GuardPanel(replace(CONFIG, load=LoadGuard(mode="off")), LIMITS)
    assert off.look(at(0, requests_per_s=99)) == []
    assert GuardPanel(replace(CONFIG, consistency=ConsistencyGuard(mode="off")), LIMITS).look(at(0)) == []


def test_what_is_accepted_of_made_up_text_shuts_nothing() -> None:
    """Before the first request the engine tries out step sizes on random tokens: hardly a draft is right."""
    panel = GuardPanel(CONFIG, Limits())
    for _ in range(200):
        panel.add_step(replace(step(DraftWork("draft", 4, 1, 4, 0)), is_warm_up=True), 0.0)
    assert panel.look(at(1)) == []
    for _ in range(200):
        panel.add_step(step(DraftWork("draft", 4, 1, 4, 0)), 2.0)
    assert trips(panel.look(at(3))) == [("acceptance_floor", "draft", None)]


def test_state_tells_reading_threshold_and_since_when() -> None:
    panel = GuardPanel(CONFIG, LIMITS)
    panel.look(at(5, requests_per_s=99))
    door = next(d for d in panel.describe(7) if (d["guard"], d["policy"]) == ("load_guard", "draft"))
    assert (door["reading"], door["threshold"], door["unit"], door["since_s"]) == (99, 10, "requests/s", 2)
    assert (door["state"], door["opens_in_s"], door["mode"]) == ("shut", 3, "enforce")


def test_probes_are_counted_against_a_budget() -> None:
    panel = GuardPanel(CONFIG, LIMITS)
    panel.add_step(step(errors=(DrafterError("draft", "oom", ""),)), 0.0)
    panel.look(at(0))
    panel.look(at(10.1))
    probes = 0
    for _ in range(100):
        openings = panel.openings("chat", may_probe=True)
        probes += panel.count(openings, "draft" if "draft" in openings.probes else BASELINE)
        refused = panel.openings("chat", may_probe=False)
        assert set(refused.shut) == {"draft"}
    assert probes == 10


def test_the_planner_leaves_a_policy_in_the_very_next_step_and_says_why() -> None:
    for view in (None, model_view("ngram")):
        planner = StepPlanner()
        if view is not None:
            planner.use(view)
        assigned = PolicyAssignment("ngram", 4)
        for number in range(1, 4):
            assert planner.plan(step_view(number, s=assigned))["s"].max_draft_tokens > 0
        planner.set_shut([Shut("ngram", Reason.LATENCY_GUARD, "chat")])
        plan = planner.plan(step_view(4, s=assigned))["s"]
        assert (plan.method, plan.max_draft_tokens, plan.reason) == (BASELINE, 0, "latency_guard")
        planner.set_shut([])
        for number in range(5, 60):
            plan = planner.plan(step_view(number, s=assigned))["s"]
        assert (plan.method, plan.max_draft_tokens > 0) == ("ngram", True)


def test_other_limits_act_from_the_next_look_on_and_doors_stay_until_then() -> None:
    panel = GuardPanel(CONFIG, LIMITS)
    assert panel.look(at(0, requests_per_s=11))
    shut = panel.shut.entries
    assert shut
    panel.reconfigure(CONFIG, replace(LIMITS, max_requests_per_s=100.0))
    assert panel.shut.entries == shut
    later = CONFIG.timing.cooldown_s + 1
    assert {change.after for change in panel.look(at(later, requests_per_s=11))} == {DoorState.ALLOWED}
    assert panel.shut.entries == ()
    panel.reconfigure(replace(CONFIG, load=LoadGuard(mode="off")), LIMITS)
    assert panel.look(at(later + 1, requests_per_s=11)) == []
