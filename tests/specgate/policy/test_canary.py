"""Rollouts: arms, stages, guardrails, and every history of one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specgate.config.rollout import GuardrailsConfig, OverlayConfig, RolloutConfig
from specgate.policy.assignment import CANDIDATE, CONTROL, SHADOW, arm_at, position
from specgate.policy.canary import ACTIONS, ActionRefused, Event, Rollout, Status
from specgate.policy.guardrails import ArmSample, make_guardrails

NO_RAILS = GuardrailsConfig(
    ttft_ratio=None, tpot_ratio=None, e2e_ratio=None, ttft_p95_ratio=None, tpot_p95_ratio=None,
    e2e_p95_ratio=None, error_ratio=None, acceptance_ratio=None, queue_wait_p95_ms=None,
)  # fmt: skip
CONFIG = RolloutConfig(
    rollout="trial", overlay=OverlayConfig(drafter="ngram"), stages_percent=(10, 50, 100), min_samples=100,
    min_stage_s=60, batch_samples=20, expires_after_h=24,
)  # fmt: skip


def sample(rng: random.Random, slower: float = 1.0, is_error: bool = False, **more: float) -> ArmSample:
    prompt, output = rng.randrange(20, 2000), rng.randrange(5, 400)
    noise = rng.lognormvariate(0, 0.2)
    ttft = slower * (0.02 + prompt * 1e-4) * rng.lognormvariate(0, 0.2)
    tpot = slower * 0.01 * noise
    return ArmSample(prompt, output, ttft, tpot, ttft + tpot * (output - 1), more.get("wait", 0.001),
                     int(more.get("accepted", 0)), int(more.get("reached", 0)), is_error)  # fmt: skip


def feed(
    rollout: Rollout, num: int, now_s: float, rng: random.Random, slower: float = 1.0, **candidate: float
) -> Event | None:
    """`num` requests of each arm; the first event, if there is one."""
    for _ in range(num):
        for arm in (CANDIDATE, CONTROL):
            is_candidate = arm == CANDIDATE
            more = candidate if is_candidate else {}
            event = rollout.observe(arm, sample(rng, slower if is_candidate else 1.0, **more), now_s)
            if event is not None:
                return event
    return None


# --- arms --------------------------------------------------------------------------------------


def test_the_hash_is_the_same_everywhere() -> None:
    """Pinned values: another replica, another Python, another day give the same arms."""
    assert position("trial", "user:alice") == pytest.approx(0.47644096, abs=1e-8)
    code = "from specgate.policy.assignment import position; print(position('trial', 'user:alice'))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                         env={"PYTHONHASHSEED": "77", "PYTHONPATH": "."})  # fmt: skip
    assert float(out.stdout) == position("trial", "user:alice")
    assert position("other", "user:alice") != position("trial", "user:alice")


@given(st.text(), st.lists(st.floats(0.001, 1), min_size=2, max_size=5))
def test_growing_shares_only_add_to_the_candidate(key: str, shares: list[float]) -> None:
    place = position("trial", key)
    arms = [arm_at(place, share) for share in sorted(shares)]
    assert sorted(arms, key=lambda arm: arm == CANDIDATE) == arms
    assert arm_at(place, 1.0) == CANDIDATE


def test_arms_are_of_equal_size_and_as_large_as_said() -> None:
    rollout = Rollout(CONFIG, 0.0)
    arms = [rollout.arm(f"user:{i}") for i in range(20_000)]
    for arm in (CANDIDATE, CONTROL):
        assert arms.count(arm) / len(arms) == pytest.approx(0.1, abs=0.01)


# --- stages ------------------------------------------------------------------------------------


def test_a_neutral_candidate_rises_stage_by_stage_and_is_promoted() -> None:
    rng, rollout, now = random.Random(1), Rollout(CONFIG, 0.0), 0.0
    assert feed(rollout, 100, 1.0, rng) is None  # too early, whatever was seen
    assert "59 s of its time" in rollout.missing(1.0)
    seen = []
    for _ in range(400):
        now += 60
        feed(rollout, 20, now, rng)
        event = rollout.advance(now)
        seen.append((rollout.status, rollout.stage))
        if event is not None and event.status is Status.PROMOTED:
            break
    assert list(dict.fromkeys(seen)) == [
        (Status.RUNNING, 0), (Status.RUNNING, 1), (Status.RUNNING, 2), (Status.PROMOTED, 2),
    ]  # fmt: skip
    assert rollout.share == 1.0
    assert rollout.arm("anybody") == CANDIDATE


def test_a_slower_candidate_falls_with_the_reason_in_numbers() -> None:
    rng, rollout = random.Random(2), Rollout(CONFIG, 0.0)
    event = feed(rollout, 5000, 1.0, rng, slower=1.25)
    assert event is not None
    assert event.status is Status.ROLLED_BACK
    assert "ratio is 1.2" in event.why or "ratio is 1.3" in event.why
    assert (rollout.share, rollout.arm("anybody"), rollout.is_active) == (0.0, None, False)
    assert rollout.advance(1e9) is None  # and that is the end of it


def test_errors_acceptance_and_queue_wait_roll_back_too() -> None:
    rng = random.Random(3)
    errors = Rollout(replace(CONFIG, guardrails=replace(NO_RAILS, error_ratio=2.0)), 0.0)
    event = None
    for index in range(400):
        errors.observe(CONTROL, sample(rng), 1.0)
        event = event or errors.observe(CANDIDATE, sample(rng, is_error=index % 10 == 0), 1.0)
    assert event is not None
    assert event.why.startswith("error_ratio")
    waits = Rollout(replace(CONFIG, guardrails=replace(NO_RAILS, queue_wait_p95_ms=50)), 0.0)
    event = feed(waits, 2000, 1.0, rng, wait=0.2)
    assert event is not None
    assert event.why.startswith("queue_wait_p95_ms is 199 ms")
    accepts = Rollout(replace(CONFIG, guardrails=replace(NO_RAILS, acceptance_ratio=0.7)), 0.0)
    event = None
    for _ in range(2000):
        accepts.observe(CONTROL, sample(rng, accepted=20, reached=25), 1.0)
        event = accepts.observe(CANDIDATE, sample(rng, accepted=rng.randrange(8, 12), reached=25), 1.0)
        if event is not None:
            break
    assert event is not None
    assert event.why.startswith("acceptance_ratio is 0.4")


def test_a_tail_that_gets_worse_alone_is_seen_by_the_p95() -> None:
    rng = random.Random(4)
    config = replace(CONFIG, guardrails=replace(NO_RAILS, tpot_ratio=1.3, tpot_p95_ratio=1.2))
    rollout = Rollout(config, 0.0)
    event = None
    for _ in range(6000):
        rollout.observe(CONTROL, sample(rng), 1.0)
        event = rollout.observe(CANDIDATE, sample(rng, slower=2.5 if rng.random() < 0.12 else 1.0), 1.0)
        if event is not None:
            break
    assert event is not None
    assert event.why.startswith("tpot_p95_ratio")


def test_long_answers_are_no_slow_ones() -> None:
    """The arms differ in what is asked, not in how fast it is answered."""
    rng = random.Random(5)
    (rail,) = [r for r in make_guardrails(GuardrailsConfig()) if r.name == "e2e_ratio"]
    for _ in range(200):
        batches = []
        for scale in (3, 1):
            batch = [sample(rng) for _ in range(40)]
            outputs = [s.num_output_tokens * scale for s in batch]
            batches.append([
                replace(s, num_output_tokens=g, e2e_s=(s.ttft_s or 0) + (s.tpot_s or 0) * (g - 1))
                for s, g in zip(batch, outputs, strict=True)
            ])  # fmt: skip
        rail.add(*batches)
    assert rail.reading == pytest.approx(1.0, abs=0.05)


def test_a_rollout_that_is_never_decided_expires() -> None:
    rollout = Rollout(CONFIG, 0.0)
    assert rollout.advance(24 * 3600 - 1) is None
    event = rollout.advance(24 * 3600)
    assert event is not None
    assert (event.status, event.why) == (Status.ROLLED_BACK, "expired after 24 h")
    promoted = Rollout(replace(CONFIG, stages_percent=(100,), min_stage_s=0), 0.0)
    assert promoted.advance(1) is not None
    assert promoted.advance(1e9) is None  # promoted does not expire


def test_shadow_applies_nothing_until_promoted() -> None:
    rollout = Rollout(replace(CONFIG, mode="shadow"), 0.0)
    arms = {rollout.arm(f"user:{i}") for i in range(2000)}
    assert arms == {SHADOW, None}
    assert rollout.share == 0.0
    rollout.act("promote", 1.0)
    assert (rollout.status, rollout.stage) == (Status.RUNNING, 0)
    assert {rollout.arm(f"user:{i}") for i in range(2000)} == {CANDIDATE, CONTROL, None}


def test_by_hand() -> None:
    rollout = Rollout(CONFIG, 0.0)
    assert rollout.act("pause", 1).is_by_hand
    assert rollout.share == 0.1  # keeps its share
    with pytest.raises(ActionRefused, match="is paused: pause does not apply; promote, resume, rollback do"):
        rollout.act("pause", 1)
    rollout.act("resume", 2)
    rollout.act("promote", 3)
    assert (rollout.stage, rollout.since_s) == (1, 3)
    rollout.act("promote", 4)
    rollout.act("promote", 5)
    assert rollout.status is Status.PROMOTED
    rollout.act("rollback", 6)
    assert rollout.share == 0
    rollout.act("resume", 7)
    assert (rollout.status, rollout.stage, rollout.started_s) == (Status.RUNNING, 0, 7)


def test_paused_still_falls_but_does_not_rise() -> None:
    rng, rollout = random.Random(6), Rollout(CONFIG, 0.0)
    rollout.act("pause", 0)
    assert feed(rollout, 3000, 100, rng) is None
    assert (rollout.status, rollout.stage) == (Status.PAUSED, 0)
    event = feed(rollout, 6000, 100, rng, slower=1.5)
    assert event is not None
    assert event.status is Status.ROLLED_BACK


def test_state_survives_as_json_and_rubbish_is_refused() -> None:
    rng, rollout = random.Random(7), Rollout(CONFIG, 0.0)
    rollout.act("promote", 5)
    feed(rollout, 90, 6, rng)
    state = json.loads(json.dumps(rollout.state()))
    again = Rollout(CONFIG, 999.0)
    again.load(state)
    assert again.state() == rollout.state()
    assert again.describe(10) == rollout.describe(10)
    # The stage of the restored evidence and what follows are the same.
    one, two = random.Random(8), random.Random(8)
    for a, b in ((rollout, one), (again, two)):
        for buffer in a._evidence.buffers.values():
            buffer.clear()  # the batch being filled is lost
        feed(a, 200, 100, b)
    assert again.state() == rollout.state()
    for bad in ({}, state | {"stage": 9}, state | {"status": "x"}, state | {"guardrails": {}},
                state | {"since_s": "soon"}):  # fmt: skip
        with pytest.raises(ValueError, match="no state of the rollout trial"):
            Rollout(CONFIG, 0.0).load(bad)


class RolloutMachine(RuleBasedStateMachine):
    """Any history of requests, time, operators and restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.config = replace(CONFIG, min_samples=20, batch_samples=10, min_stage_s=10)
        self.rollout = Rollout(self.config, self.now)
        self.rng = random.Random(0)
        self.highest = 0
        self.key_arms: dict[str, str | None] = {}
        self.share = self.rollout.share

    def note(self, event: Event | None) -> None:
        if event is not None:
            assert event.status is self.rollout.status
            assert event.why

    @rule(seconds=st.floats(0.1, 40_000))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.note(self.rollout.advance(self.now))

    @rule(num=st.integers(1, 40), slower=st.sampled_from([0.8, 1.0, 1.0, 1.3]), errors=st.booleans())
    def requests_finish(self, num: int, slower: float, errors: bool) -> None:
        for index in range(num):
            for arm in (CANDIDATE, CONTROL):
                is_error = errors and arm == CANDIDATE and index % 7 == 0
                done = sample(self.rng, slower if arm == CANDIDATE else 1.0, is_error)
                self.note(self.rollout.observe(arm, done, self.now))

    @rule(action=st.sampled_from(ACTIONS))
    def an_operator_acts(self, action: str) -> None:
        before = self.rollout.state()
        try:
            self.note(self.rollout.act(action, self.now))
        except ActionRefused:
            assert self.rollout.state() == before

    @rule()
    def the_server_restarts(self) -> None:
        state = json.loads(json.dumps(self.rollout.state()))
        self.rollout = Rollout(self.config, self.now)
        self.rollout.load(state)
        assert self.rollout.state() == state

    @rule()
    def traffic_is_good_and_time_is_enough(self) -> None:
        """No path to a stuck state: a running rollout of a good candidate gets to its end."""
        if self.rollout.status is not Status.RUNNING:
            return
        for _ in range(600):
            self.now += 11
            for _ in range(20):
                for arm in (CANDIDATE, CONTROL):
                    slower = 0.7 if arm == CANDIDATE else 1.0
                    self.note(self.rollout.observe(arm, sample(self.rng, slower), self.now))
            self.note(self.rollout.advance(self.now))
            if self.rollout.status is not Status.RUNNING:
                break
        assert self.rollout.status in (Status.PROMOTED, Status.ROLLED_BACK)

    @precondition(lambda self: self.rollout.status is not Status.PROMOTED)
    @rule()
    def it_expires(self) -> None:
        self.now += self.config.expires_after_h * 3600
        self.note(self.rollout.advance(self.now))
        assert self.rollout.status is Status.ROLLED_BACK

    @invariant()
    def shares_and_arms_fit_the_status(self) -> None:
        rollout = self.rollout
        arms = {rollout.arm(f"user:{i}") for i in range(60)}
        if rollout.status is Status.ROLLED_BACK:
            assert (rollout.share, arms) == (0.0, {None})
            assert rollout.describe(self.now)["missing"] == []
        elif rollout.status is Status.PROMOTED:
            assert (rollout.share, arms) == (1.0, {CANDIDATE})
        else:
            assert rollout.share == self.config.stages_percent[rollout.stage] / 100
            assert CANDIDATE in arms
        json.dumps(rollout.state())


RolloutMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestRolloutMachine = RolloutMachine.TestCase
