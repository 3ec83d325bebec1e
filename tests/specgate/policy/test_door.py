"""One door: hysteresis, cool-down with back-off, probing, and no way to be stuck."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specgate.config.guards import DoorTiming
from specgate.policy.door import Door, DoorState, ProbeBudget, Reading, advance

ALLOWED, PROBING, SHUT = DoorState.ALLOWED, DoorState.PROBING, DoorState.SHUT
TIMING = DoorTiming(
    cooldown_s=20, sensed_cooldown_s=10, backoff=2, max_cooldown_s=60, reopen_ratio=0.8, forgive_s=100
)


def reading(value: float, num: int = 100, least: int = 10) -> Reading:
    return Reading(value, 100.0, "ms", num, least, what="the wait")


def test_an_ambient_door_shuts_above_and_opens_only_well_below() -> None:
    door = advance(Door(), reading(101), 0, TIMING, needs_probes=False)
    assert (door.state, door.opens_s) == (SHUT, 10)
    assert door.why == "the wait is 101 ms, above 100"
    assert advance(door, reading(1), 9.9, TIMING, needs_probes=False).state is SHUT  # cooling down
    assert advance(door, reading(90), 50, TIMING, needs_probes=False).state is SHUT  # between 80 and 100
    assert advance(door, reading(80), 10, TIMING, needs_probes=False).state is ALLOWED
    assert advance(door, None, 10, TIMING, needs_probes=False).state is ALLOWED  # nobody waits any more


def test_an_ambient_door_does_not_back_off_since_it_sees_when_it_is_over() -> None:
    """A server that is full every ten seconds must not stay shut for minutes in between."""
    door, now = Door(), 0.0
    for _ in range(8):
        door = advance(door, reading(200), now, TIMING, needs_probes=False)
        assert (door.state, door.opens_s - now) == (SHUT, 10)
        now = door.opens_s
        door = advance(door, reading(10), now, TIMING, needs_probes=False)
        assert door.state is ALLOWED
        now += 1


def test_too_few_samples_do_not_shut() -> None:
    assert advance(Door(), reading(500, num=9), 0, TIMING, needs_probes=True).state is ALLOWED
    assert advance(Door(), reading(500, num=10), 0, TIMING, needs_probes=True).state is SHUT


def test_probes_decide_and_failures_back_off() -> None:
    door, waits = Door(), []
    now = 0.0
    for _ in range(6):
        door = advance(door, reading(200), now, TIMING, needs_probes=True)
        assert door.state is SHUT
        waits.append(door.opens_s - now)
        now = door.opens_s
        door = advance(door, reading(200), now, TIMING, needs_probes=True)
        assert door.state is PROBING  # whatever was read before the cool-down
    assert waits == [20, 40, 60, 60, 60, 60]
    assert advance(door, reading(10, num=9), now, TIMING, needs_probes=True).state is PROBING
    assert advance(door, reading(90, num=10), now, TIMING, needs_probes=True).state is PROBING
    assert advance(door, reading(90, num=40), now, TIMING, needs_probes=True).state is ALLOWED
    door = advance(door, reading(10), now, TIMING, needs_probes=True)
    assert (door.state, door.num_trips) == (ALLOWED, 6)
    assert advance(door, reading(10), now + 99, TIMING, needs_probes=True).num_trips == 6
    assert advance(door, reading(10), now + 100, TIMING, needs_probes=True).num_trips == 0


def test_floors_shut_below() -> None:
    low = Reading(1.1, 1.4, "tokens/step", 50, 10, is_floor=True, what="the yield")
    door = advance(Door(), low, 0, TIMING, needs_probes=True)
    assert (door.state, door.why) == (SHUT, "the yield is 1.1 tokens/step, below 1.4")
    nothing = Reading(0.0, 1.4, "tokens/step", 50, 10, is_floor=True)
    assert advance(Door(), nothing, 0, TIMING, needs_probes=True).state is SHUT
    assert (
        advance(Door(), Reading(0.0, 0.0, "", 50, 10, is_floor=True), 0, TIMING, needs_probes=True).state
        is ALLOWED
    )


readings = st.none() | st.builds(
    Reading, st.floats(0, 300), st.sampled_from([0.0, 100.0]), st.just("ms"), st.integers(0, 100),
    st.integers(1, 50), is_floor=st.booleans(),
)  # fmt: skip
timings = st.builds(
    DoorTiming,
    cooldown_s=st.floats(0.1, 100), backoff=st.floats(1, 1000), max_cooldown_s=st.floats(0.1, 1000),
    reopen_ratio=st.floats(0.1, 1), forgive_s=st.floats(1, 1000), probe_samples=st.integers(1, 20),
)  # fmt: skip


@settings(max_examples=300)
@given(timings, st.booleans(), st.lists(st.tuples(readings, st.floats(0, 50)), max_size=60))
def test_no_history_leaves_a_door_stuck(
    timing: DoorTiming, needs_probes: bool, history: list[tuple[Reading | None, float]]
) -> None:
    """From wherever it got to: shut ends within the longest cool-down, and good news open it."""
    door, now = Door(), 0.0
    for read, passed in history:
        now += passed
        before, door = door, advance(door, read, now, timing, needs_probes=needs_probes)
        if door.state is SHUT and before.state is not SHUT:
            assert read is not None
            assert read.is_enough
            assert read.severity > 1
            assert 0 < door.opens_s - now <= max(timing.max_cooldown_s, 1e-9) * (1 + 1e-9)
        if before.state is SHUT and door.state is not SHUT:
            assert now >= before.opens_s
    good = Reading(1.0, 100.0, "ms", 1000, 1)
    now += timing.max_cooldown_s + 1e-6
    for _ in range(2):  # out of shut; out of probing
        door = advance(door, good, now, timing, needs_probes=needs_probes)
    assert door.state is ALLOWED


@given(st.floats(0.01, 0.5), st.lists(st.booleans(), max_size=300))
def test_probes_are_a_bounded_share_of_requests(share: float, wishes: list[bool]) -> None:
    budget, probes = ProbeBudget(share), 0
    for asked, wants in enumerate(wishes, 1):
        was_probe = wants and budget.has_one
        probes += was_probe
        budget.count(was_probe=was_probe)
        assert probes <= 1 + share * asked + 1e-6
    for _ in range(int(1 / share) + 2):
        budget.count(was_probe=False)
    assert budget.has_one  # and never runs dry for good


def test_both_kinds_of_door_keep_the_longest_cool_down() -> None:
    timing = DoorTiming(cooldown_s=50, sensed_cooldown_s=40, max_cooldown_s=30)
    for needs_probes in (False, True):
        assert advance(Door(), reading(200), 0, timing, needs_probes=needs_probes).opens_s == 30
