"""The step model recovers known costs, follows a machine that changes speed, and shrugs off pauses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from router_models.base import StateError
from router_models.drift import PageHinkley
from router_models.least_squares import solve_nonnegative
from router_models.step_latency import StepLatency
from router_models.types import DraftCoefficients, DraftFeatures, StepFeatures, StepTiming

TRUE = {"c0": 0.02, "c_seq": 0.0008, "c_tok": 0.0015, "c_kv": 2e-6, "c_sample": 1e-4}


def step(rng: np.random.Generator, slow: float = 1.0, noise: float = 0.03) -> tuple[StepFeatures, StepTiming]:
    """One step of a machine whose costs are TRUE times `slow`."""
    batch, depth = int(rng.integers(1, 17)), int(rng.integers(0, 6))
    kv, tokens = float(batch * rng.integers(100, 1500)), float(batch * (1 + depth))
    sampled = tokens if rng.random() < 0.3 else 0.0
    target = TRUE["c0"] + TRUE["c_seq"] * batch + TRUE["c_tok"] * tokens + TRUE["c_kv"] * kv
    target += TRUE["c_sample"] * sampled
    drafts: tuple[DraftFeatures, ...] = ()
    draft_s: tuple[float, ...] = ()
    if depth:
        drafts = (DraftFeatures("draft", depth, batch, batch * depth, kv * depth),)
        cost = 0.004 * depth + 0.0003 * batch * depth + 5e-7 * kv * depth
        draft_s = (slow * cost * float(np.exp(noise * rng.normal())),)
    seconds = slow * target * float(np.exp(noise * rng.normal())) + sum(draft_s)
    return StepFeatures(batch, tokens, kv, 0.0, sampled, drafts), StepTiming(seconds, draft_s)


def errors(
    model: StepLatency, make: Callable[[], tuple[StepFeatures, StepTiming]], count: int
) -> list[float]:
    """Relative errors of predictions made before each step was learned."""
    found = []
    for _ in range(count):
        x, y = make()
        found.append(abs(model.predict_one(x).seconds - y.seconds) / y.seconds)
        model.learn_one(x, y)
    return found


def test_known_costs_are_recovered_under_noise() -> None:
    rng, model = np.random.default_rng(0), StepLatency()
    late = errors(model, lambda: step(rng), 600)[300:]
    assert np.mean(late) < 0.035  # the noise itself is 3 % on each part
    c = model.coefficients()
    assert c.c0_s == pytest.approx(TRUE["c0"], rel=0.15)
    assert c.c_tok_s == pytest.approx(TRUE["c_tok"], rel=0.15)
    assert c.c_kv_s == pytest.approx(TRUE["c_kv"], rel=0.3)
    assert c.drafters["draft"].d0_s == pytest.approx(0.004, rel=0.15)
    assert c.drafters["draft"].calls_per_token == pytest.approx(1.0)
    assert c.drafters["draft"].kv_per_target_kv == pytest.approx(1.0)
    assert c.knee_tokens is None


def test_windows_over_long_contexts_are_told_from_their_tokens() -> None:
    """A draft token costs what any token does, and what its comparing with the KV before it takes."""
    rng, model = np.random.default_rng(6), StepLatency()

    def windows() -> tuple[StepFeatures, StepTiming]:
        x, y = step(rng)
        over = (x.num_tokens - x.num_sequences) * x.num_kv_tokens / x.num_sequences
        return replace(x, num_window_kv_tokens=over), StepTiming(y.seconds + 1.5e-6 * over, y.draft_s)

    late = errors(model, windows, 600)[300:]
    assert np.mean(late) < 0.04
    c = model.coefficients()
    assert c.c_win_s == pytest.approx(1.5e-6, rel=0.1)
    assert c.c_tok_s == pytest.approx(TRUE["c_tok"], rel=0.2)


def test_draft_calls_spare_no_more_than_they_take_upon_themselves() -> None:
    """Plain steps that are slow for other reasons do not make a draft model's calls look like a saving."""
    rng, model = np.random.default_rng(7), StepLatency()

    def busy() -> tuple[StepFeatures, StepTiming]:
        x, y = step(rng)
        work = tuple(replace(d, num_calls=float(rng.integers(1, 4))) for d in x.drafts)
        draft_s = tuple(0.001 + 0.003 * d.num_calls for d in work)
        others_s = 0.0 if work else 0.006
        return replace(x, drafts=work), StepTiming(
            y.seconds - sum(y.draft_s) + sum(draft_s) + others_s, draft_s
        )

    errors(model, busy, 600)
    c = model.coefficients()
    assert 0 < c.c_lead_s <= c.drafters["draft"].d_lead_s < 0.002


def test_a_machine_at_half_speed_is_followed_within_a_few_steps() -> None:
    rng, model = np.random.default_rng(1), StepLatency()
    errors(model, lambda: step(rng), 400)
    after = errors(model, lambda: step(rng, slow=2.0), 120)
    assert np.mean(after[:5]) > 0.3
    assert np.mean(after[20:]) < 0.06
    assert model.num_drifts >= 1


def test_drift_while_only_one_kind_of_step_runs_scales_what_is_known_of_others() -> None:
    rng, model = np.random.default_rng(2), StepLatency()
    errors(model, lambda: step(rng), 400)
    lone = StepFeatures(1, 1, 500)
    for _ in range(60):
        model.learn_one(lone, StepTiming(3.0 * (0.02 + 0.0008 + 0.0015 + 0.001)))
    big = StepFeatures(16, 16, 16 * 800)
    slow = 3.0 * (0.02 + 16 * 0.0023 + 16 * 800 * 2e-6)
    assert model.predict_one(big).seconds == pytest.approx(slow, rel=0.15)


def test_pauses_do_not_wreck_the_model() -> None:
    rng, model = np.random.default_rng(3), StepLatency()
    errors(model, lambda: step(rng), 200)
    for _ in range(5):
        x, y = step(rng)
        model.learn_one(x, StepTiming(y.seconds + 2.0, y.draft_s))
        assert np.mean(errors(model, lambda: step(rng), 20)) < 0.06
    assert model.num_drifts == 0


def test_coefficients_are_never_negative() -> None:
    rng, model = np.random.default_rng(4), StepLatency()
    for _ in range(200):  # a cost that falls with the batch cannot be said with the model's terms
        batch = int(rng.integers(1, 9))
        model.learn_one(StepFeatures(batch, batch, batch * 100.0), StepTiming(0.1 / batch))
    c = model.coefficients()
    assert min(c.c0_s, c.c_seq_s, c.c_tok_s, c.c_kv_s, c.c_sample_s) >= 0


def test_a_knee_is_taken_where_it_is_and_only_there() -> None:
    rng, model = np.random.default_rng(5), StepLatency()
    for _ in range(800):
        tokens = int(rng.integers(1, 80))
        seconds = 0.01 + 0.0001 * tokens + 0.004 * max(0, tokens - 16)
        model.learn_one(
            StepFeatures(1, tokens, 200), StepTiming(seconds * float(np.exp(0.02 * rng.normal())))
        )
    c = model.coefficients()
    assert c.knee_tokens == 16
    assert c.c_tok_above_s == pytest.approx(0.004, rel=0.1)
    assert c.c_tok_s < 0.001


def test_calls_per_token_is_read_from_steps_where_one_sequence_drafts() -> None:
    model = StepLatency()
    for depths in ((6, 1, 1), (5, 2), (4,), (6, 1, 1)):  # calls follow the deepest of the batch
        work = DraftFeatures("draft", max(depths), len(depths), sum(depths), 100.0 * sum(depths))
        batch = float(len(depths))
        step_of = StepFeatures(batch, batch + sum(depths), 100.0 * batch, drafts=(work,))
        model.learn_one(step_of, StepTiming(0.05, (0.02,)))
    found = model.coefficients().drafters["draft"]
    assert found.calls_per_token == pytest.approx(1.0)
    assert found.kv_per_target_kv == pytest.approx(1.0)


def test_a_head_that_is_not_sure_has_been_called_all_the_same() -> None:
    model = StepLatency()
    for num_calls, num_drafted in ((2, 2), (2, 1), (1, 0), (1, 0)):
        work = DraftFeatures("draft", num_calls, 1, num_drafted, 100.0, num_granted_tokens=2)
        step_of = StepFeatures(1, 1 + num_drafted, 100.0, drafts=(work,))
        model.learn_one(step_of, StepTiming(0.05, (0.02,)))
    assert model.coefficients().drafters["draft"].calls_per_token == pytest.approx(6 / 8, abs=0.01)


def test_one_lone_step_does_not_outweigh_what_batches_told() -> None:
    model = StepLatency()
    for batch in (4,) * 300 + (1,):
        calls = 2.0 if batch > 1 else 0.0
        work = DraftFeatures("hybrid", calls, batch, batch, 9.0, num_granted_tokens=2 * batch)
        model.learn_one(StepFeatures(batch, 2 * batch, 100.0, drafts=(work,)), StepTiming(0.05, (0.02,)))
    assert model.coefficients().drafters["hybrid"].asked_share > 0.6


def test_a_drafter_that_reads_up_whenever_it_is_asked_is_asked_all_the_same() -> None:
    """As the model of a hybrid, which missed the steps that matches drafted for; not when it reads only."""
    model = StepLatency()
    for number in range(300):
        asked, is_first = number % 3 == 0, number < 9
        work = DraftFeatures(
            "hybrid", 4.0 * asked, 1, 0 if is_first else 4, 9.0, num_fill_tokens=9.0 * asked,
            num_granted_tokens=4,
        )  # fmt: skip
        model.learn_one(StepFeatures(1, 5, 100.0, drafts=(work,)), StepTiming(0.05, (0.02,)))
    found = model.coefficients().drafters["hybrid"]
    assert found.asked_share == pytest.approx(1 / 3, abs=0.03)
    assert found.has_calls


@pytest.mark.parametrize("batch", [1, 3])
def test_who_is_asked_now_and_then_is_known_from_lone_steps_or_from_a_batch(batch: int) -> None:
    """A drafter that needs its model for every fourth sequence."""
    rng, model = np.random.default_rng(5), StepLatency()
    for _ in range(400):
        asked = rng.random(batch) < 0.25
        work = DraftFeatures("hybrid", 4.0 * asked.any(), batch, batch, 9.0, num_granted_tokens=4 * batch)
        model.learn_one(StepFeatures(batch, 2 * batch, 100.0, drafts=(work,)), StepTiming(0.05, (0.02,)))
    found = model.coefficients().drafters["hybrid"]
    assert found.asked_share == pytest.approx(0.25, abs=0.12)
    assert found.calls(4, 1) == pytest.approx(1.0, abs=0.5)
    assert found.calls(4, 30) == pytest.approx(4.0, abs=0.1)
    assert found.asked(0) == found.calls(4, 0) == 0.0
    never = DraftCoefficients(d_seq_s=1e-5)
    assert never.asked(8) == never.calls(4, 8) == 0.0


def test_prefill_steps_are_apart() -> None:
    model = StepLatency()
    for tokens in (64, 128, 256, 512) * 10:
        model.learn_one(StepFeatures(0, tokens, tokens, tokens), StepTiming(0.005 + 0.001 * tokens))
        model.learn_one(StepFeatures(1, 1, 100), StepTiming(0.03))
    assert model.predict_one(StepFeatures(0, 384, 384, 384)).seconds == pytest.approx(0.389, rel=0.05)
    assert model.predict_one(StepFeatures(1, 1, 100)).seconds == pytest.approx(0.03, rel=0.02)


def test_untrained_says_so() -> None:
    assert StepLatency().predict_one(StepFeatures(1, 1, 10)).is_prior


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float64, (6, 4), elements=st.floats(0, 10)), arrays(np.float64, 6, elements=st.floats(-5, 5))
)
def test_solve_nonnegative_meets_the_optimality_conditions(x: np.ndarray, y: np.ndarray) -> None:
    a = x.T @ x + 1e-3 * np.eye(4)
    b = x.T @ y
    theta = solve_nonnegative(a, b)
    gradient = a @ theta - b
    assert (theta >= 0).all()
    tolerance = 1e-6 * (1 + np.abs(b).max())
    assert (gradient >= -tolerance).all()
    assert np.abs(gradient * theta).max() <= tolerance * (1 + theta.max())


def test_drift_test_ignores_one_outlier_and_finds_a_shift() -> None:
    test = PageHinkley()
    assert not any(test.observe(1000.0) for _ in range(1))
    assert not any(test.observe(0.0) for _ in range(50))
    assert any(test.observe(5.0) for _ in range(10))


def test_work_that_is_all_alike_does_not_wash_out_what_other_work_costs() -> None:
    """With two draft tokens for everybody, tokens, sequences and KV grow together: what a plain step
    costs then rests on the steps of the start, however often the machine changes its speed."""

    def work(batch: int, depth: int, context: int = 200) -> StepFeatures:
        return StepFeatures(batch, batch * (1 + depth), batch * context, 0, 0)

    def cost(x: StepFeatures) -> float:
        return 6e-3 + 1e-4 * x.num_sequences + 7e-4 * x.num_tokens + 1e-6 * x.num_kv_tokens

    rng = random.Random(7)
    model = StepLatency()
    for batch in (1, 4, 2, 8, 12) * 3:
        for depth in (0, 4, 2):
            x = work(batch, depth, rng.choice((50, 200, 400)))
            model.learn_one(x, StepTiming(cost(x) * rng.lognormvariate(0, 0.05), ()))
    for step in range(4000):
        x = work(rng.randint(1, 16), 2)
        slow = 1.6 if step // 200 % 2 else 1.0
        model.learn_one(x, StepTiming(cost(x) * slow * rng.lognormvariate(0, 0.1), ()))
    plain = work(16, 0)
    assert model.predict_one(plain).seconds == pytest.approx(1.6 * cost(plain), rel=0.2)


def test_slow_seconds_change_the_pace_and_not_what_tells_work_apart() -> None:
    """Neighbours on the machine come and go, in stretches of a few dozen steps: no reason to think that a
    token costs another share of a step than before."""
    rng, model = np.random.default_rng(8), StepLatency()
    errors(model, lambda: step(rng), 300)
    plain, drafted = StepFeatures(8, 8, 4000), StepFeatures(8, 32, 4000)
    truth = (TRUE["c0"] + 8 * TRUE["c_seq"] + 32 * TRUE["c_tok"] + 0.008) / (
        TRUE["c0"] + 8 * TRUE["c_seq"] + 8 * TRUE["c_tok"] + 0.008
    )
    for _ in range(60):
        slow = float(rng.choice([1.0, 1.0, 1.15, 1.4, 1.7]))
        errors(model, lambda slow=slow: step(rng, slow, noise=0.1), int(rng.integers(10, 80)))  # type: ignore[misc]
        ratio = model.predict_one(drafted).seconds / model.predict_one(plain).seconds
        assert ratio == pytest.approx(truth, rel=0.12)
    assert model.num_drifts <= 3


def test_a_restored_model_goes_on_as_the_one_it_was_made_from() -> None:
    rng, model = np.random.default_rng(9), StepLatency()
    errors(model, lambda: step(rng, noise=0.15), 300)
    copy = StepLatency.from_state(json.loads(json.dumps(model.state())))
    for _ in range(100):
        x, y = step(rng, noise=0.15)
        # But for the order of sums, which the layout of arrays decides.
        assert astuple(copy.predict_one(x)) == pytest.approx(astuple(model.predict_one(x)), rel=1e-9)
        model.learn_one(x, y)
        copy.learn_one(x, y)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("fit", "cov", 0, 0, 0), -1.0),
        (("fit", "cov", 0, 0, 1), 1e9),
        (("fit", "mean", 0, 0), -1e-3),
        (("fit", "pace", 0), 700.0),
        (("fit", "typical"), -1.0),
        (("num_outcomes",), float("inf")),
        (("num_outcomes",), -1),
        (("noise",), -0.1),
        (("recent",), [0.0] * 50),
    ],
)
def test_a_state_that_cannot_be_is_refused(path: tuple[Any, ...], value: Any) -> None:
    rng, model = np.random.default_rng(10), StepLatency()
    errors(model, lambda: step(rng), 100)
    state: Any = json.loads(json.dumps(model.state()))
    place = state["decode"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(StateError):
        StepLatency.from_state(state)


def test_a_first_step_a_thousand_times_too_slow_is_got_over() -> None:
    """Pages that had to be read, kernels that had to be compiled."""
    rng, model = np.random.default_rng(11), StepLatency()
    x, y = step(rng)
    model.learn_one(x, StepTiming(1000 * y.seconds, y.draft_s))
    errors(model, lambda: step(rng), 200)
    assert np.mean(errors(model, lambda: step(rng), 100)) < 0.06


def test_doubt_stays_bounded_however_long_all_work_is_alike() -> None:
    rng, model = np.random.default_rng(12), StepLatency()
    errors(model, lambda: step(rng), 200)
    alike, other = StepFeatures(4, 12, 2000), StepFeatures(16, 16, 20000)
    for _ in range(20_000):
        model.learn_one(alike, StepTiming(0.045 * float(np.exp(0.05 * rng.normal()))))
    found = model.predict_one(other)
    assert 0 < found.spread_s < 2 * found.seconds
    StepLatency.from_state(json.loads(json.dumps(model.state())))  # still a covariance


def test_how_much_a_drafter_reads_of_a_new_sequence_is_seen() -> None:
    """One that keeps a window of 256 tokens must not be thought to read a document of 800."""
    model = StepLatency()
    work = DraftFeatures("draft", 2.0, 1.0, 2.0, 100.0)
    for number in range(200):
        x = StepFeatures(1.0, 3.0, 100.0, drafts=(work,))
        if number % 10 == 0:
            first = replace(work, num_fill_tokens=256.0, num_begun_tokens=800.0, num_begun_fill=256.0)
            x = replace(x, drafts=(first,))
        elif number % 3 == 0:  # one that decoded otherwise for a while is read up on: not a new one
            x = replace(x, drafts=(replace(work, num_fill_tokens=20.0),))
        model.learn_one(x, StepTiming(0.01, (0.002,)))
    assert model.coefficients().drafters["draft"].fill_per_token == pytest.approx(0.32)
    restored = StepLatency.from_state(json.loads(json.dumps(model.state())))
    assert restored.coefficients() == model.coefficients()
    other = StepFeatures(1.0, 3.0, 100.0, drafts=(replace(work, method="new"),))
    model.learn_one(other, StepTiming(0.01, (0.002,)))
    assert model.coefficients().drafters["new"].fill_per_token == 1.0  # nothing was seen yet
