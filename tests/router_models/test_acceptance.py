"""Acceptance curves: unbiased in K, shrunk where little is known, bent to the running request."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_models.acceptance import Acceptance, RequestCurves, sampling_band, start_continue_tokens
from router_models.types import AcceptanceCounts, AcceptanceKey

KEY = AcceptanceKey("ngram", "chat")


def simulate(start: float, go_on: float, depth: int, steps: int, seed: int) -> AcceptanceCounts:
    """Draft every step; a step after a fully accepted draft begins inside a match."""
    rng = random.Random(seed)
    inside, accepted = False, [0] * depth
    for _ in range(steps):
        chance, length = (go_on if inside else start), 0
        while length < depth and rng.random() < chance:
            accepted[length] += 1
            length, chance = length + 1, go_on
        inside = length == depth and rng.random() < chance
    return AcceptanceCounts(steps, steps, (steps,) * depth, tuple(accepted))


@pytest.mark.parametrize(("start", "go_on"), [(0.2, 0.85), (0.6, 0.6), (0.1, 0.95)])
def test_curves_measured_at_one_depth_hold_at_others(start: float, go_on: float) -> None:
    for depth in (4, 8):
        model = Acceptance(max_depth=8)
        model.learn_one(KEY, simulate(start, go_on, depth, 6000, depth))
        curve = model.predict_one(KEY)
        for k in (1, 2, 4, 8):
            assert curve.expected_tokens[k] == pytest.approx(start_continue_tokens(start, go_on, k), rel=0.1)
        assert curve.continuation == pytest.approx(go_on, abs=0.04)


def test_start_continue_law_reduces_to_the_usual_one() -> None:
    for depth in (1, 3, 7):
        assert start_continue_tokens(0.7, 0.7, depth) == pytest.approx(sum(0.7**j for j in range(depth + 1)))


def test_steps_without_a_draft_count() -> None:
    model = Acceptance(max_depth=2)
    model.learn_one(KEY, AcceptanceCounts(1000, 100, (100, 100), (90, 80)))
    curve = model.predict_one(KEY)
    assert curve.draft_rate == pytest.approx(0.1, abs=0.02)
    assert curve.expected_tokens[2] < 1.3


def draft_and_stop(go_on: float, accept: float, granted: int, steps: int, seed: int) -> AcceptanceCounts:
    """A drafter that is not sure stops: each further token is drafted with chance `go_on`."""
    rng = random.Random(seed)
    drafted, accepted = [0] * granted, [0] * granted
    for _ in range(steps):
        length = 1
        while length < granted and rng.random() < go_on:
            length += 1
        right = 0
        while right < length and rng.random() < accept:
            right += 1
        for depth in range(length):
            drafted[depth] += 1
            accepted[depth] += depth < right
    return AcceptanceCounts(steps, steps, tuple(drafted), tuple(accepted), (steps,) * granted)


@pytest.mark.parametrize("granted", [2, 4])
def test_a_drafter_that_stops_early_is_not_taken_for_one_that_does_not(granted: int) -> None:
    """What it yields and drafts with K granted, measured at one grant, holds at the others."""
    go_on, accept = 0.5, 0.7
    model = Acceptance(max_depth=4)
    model.learn_one(KEY, draft_and_stop(go_on, accept, granted, 6000, granted))
    curve = model.predict_one(KEY)
    for k in (1, 2, 4):
        tokens = 1 + sum(accept**j * go_on ** (j - 1) for j in range(1, k + 1))
        length = sum(go_on ** (j - 1) for j in range(1, k + 1))
        assert curve.expected_tokens[k] - 1 == pytest.approx(tokens - 1, rel=0.06)
        assert curve.drafted_tokens[k] == pytest.approx(length, rel=0.06)
    with pytest.raises(ValueError, match="allowed"):
        model.learn_one(KEY, AcceptanceCounts(3, 3, (3, 3), (2, 1), (3, 2)))


@pytest.mark.parametrize(("go_on", "granted"), [(0.2, 4), (0.9, 2), (0.5, 1)])
def test_a_request_is_compared_at_the_depth_it_was_granted(go_on: float, granted: int) -> None:
    """However long its drafts were: one whose drafter stops sooner than its task's is no better for it."""
    model = Acceptance(max_depth=4)
    model.learn_one(KEY, draft_and_stop(0.5, 0.7, 4, 6000, 1))
    curves = RequestCurves([model.predict_one(KEY)])
    counts = draft_and_stop(go_on, 0.7, granted, 4000, 2)
    right = sum(counts.accepted_per_position)
    found, _, _ = curves.expected_one(0, 4000, 4000 * granted, right, 4000)
    assert found[granted] - 1 == pytest.approx(right / 4000, rel=0.05)


def test_what_was_never_granted_follows_the_average_of_all_tasks() -> None:
    model = Acceptance(max_depth=4)
    model.learn_one(AcceptanceKey("ngram", "reasoning"), draft_and_stop(0.5, 0.7, 4, 6000, 1))
    model.learn_one(KEY, draft_and_stop(0.5, 0.7, 1, 6000, 2))
    drafted = model.predict_one(KEY).drafted_tokens
    assert drafted[4] == pytest.approx(1.875, rel=0.1)


def test_an_unseen_task_takes_the_policys_average_and_is_less_sure() -> None:
    model = Acceptance(max_depth=4)
    model.learn_one(KEY, simulate(0.8, 0.8, 4, 500, 1))
    seen, unseen = model.predict_one(KEY), model.predict_one(AcceptanceKey("ngram", "reasoning"))
    assert unseen.expected_tokens[4] == pytest.approx(seen.expected_tokens[4], rel=0.1)
    assert unseen.num_steps == 0
    other = model.predict_one(AcceptanceKey("draft", "chat"))
    assert other.high_tokens[4] - other.low_tokens[4] > seen.high_tokens[4] - seen.low_tokens[4]


def test_bands_are_kept_apart() -> None:
    model = Acceptance(max_depth=4)
    for _ in range(20):
        model.learn_one(KEY, simulate(0.9, 0.9, 4, 200, 1))
        model.learn_one(AcceptanceKey("ngram", "chat", "hot"), simulate(0.2, 0.3, 4, 200, 2))
    hot = model.predict_one(AcceptanceKey("ngram", "chat", "hot"))
    assert hot.expected_tokens[4] < 1.5 < 3.0 < model.predict_one(KEY).expected_tokens[4]
    assert [sampling_band(t, p) for t, p in ((0, 1), (0.3, 1), (1.0, 1.0), (1.2, 1.0))] == [
        "greedy",
        "cool",
        "warm",
        "hot",
    ]


def test_what_was_learned_fades() -> None:
    model = Acceptance(max_depth=4)
    model.learn_one(KEY, simulate(0.9, 0.9, 4, 4000, 1))
    for seed in range(6):
        model.learn_one(KEY, simulate(0.2, 0.2, 4, 4000, seed))
    assert model.predict_one(KEY).expected_tokens[4] < 1.4


def test_a_running_request_bends_the_curve_by_what_it_showed() -> None:
    model = Acceptance(max_depth=6)
    model.learn_one(KEY, simulate(0.5, 0.6, 6, 4000, 1))
    curve = model.predict_one(KEY)
    curves = RequestCurves([curve])
    drafts = np.array([0.0, 40.0, 40.0])
    bent = curves.expected(np.zeros(3, dtype=np.intp), drafts, 6 * drafts, np.array([0.0, 200.0, 2.0]))
    assert bent[0] == pytest.approx(curve.expected_tokens, rel=0.05)  # nothing shown: the task's own
    assert bent[1, 6] == pytest.approx(1 + 200 / 40, rel=0.12)
    assert bent[2, 6] < 1.5
    assert (np.diff(bent, axis=1) >= -1e-9).all()
    assert (bent <= np.arange(1, 8)).all()


@given(
    st.integers(0, 1), st.integers(0, 50), st.floats(0, 6), st.floats(0, 1), st.integers(0, 50),
)  # fmt: skip
def test_one_request_alone_is_expected_what_it_is_in_a_batch(
    curve: int, drafts: int, each: float, accepted: float, more_steps: int
) -> None:
    model = Acceptance(max_depth=6)
    model.learn_one(KEY, simulate(0.5, 0.6, 6, 4000, 1))
    curves = RequestCurves([model.predict_one(KEY), model.predict_one(AcceptanceKey("draft", None))])
    tokens = round(drafts * each)
    told = (float(drafts), float(tokens), float(round(tokens * accepted)), float(drafts + more_steps))
    batch = curves.expected(np.array([1 - curve, curve]), *(np.array([3.0, value]) for value in told))
    one, rate, lengths = curves.expected_one(curve, *told)
    assert lengths == curves.lengths[curve].tolist()
    assert one == pytest.approx(batch[1].tolist())
    assert 0 < rate <= 1
