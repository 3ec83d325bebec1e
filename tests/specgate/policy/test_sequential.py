"""Sequential tests keep their error rates though they are looked at after every observation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specgate.policy.sequential import EventTest, MeanTest, critical_t, log_evidence, required_batches


def crossing(values: np.ndarray, alpha: float, limit: float = 0.0) -> int | None:
    """After how many values the test first says "above"; None: never."""
    test = MeanTest(limit)
    for count, value in enumerate(values.tolist(), 1):
        test.add(value)
        if test.is_above(alpha):
            return count
    return None


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_looking_all_the_time_raises_no_more_false_alarms_than_allowed(alpha: float) -> None:
    rng = np.random.default_rng(7)
    runs = 600
    alarms = sum(crossing(rng.normal(0, 3.0, 200), alpha) is not None for _ in range(runs))
    # One-sided use of a two-sided test: at most alpha, about half of it. 4 standard errors of room.
    assert alarms / runs <= alpha + 4 * math.sqrt(alpha * (1 - alpha) / runs)


def test_a_plain_t_test_looked_at_all_the_time_would_not_do() -> None:
    """The same data with a fixed-sample threshold: why `MeanTest` is needed."""
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(200):
        values = rng.normal(0, 3.0, 200)
        counts = np.arange(1, 201)
        means = np.cumsum(values) / counts
        sds = np.array([values[:n].std(ddof=1) if n > 1 else np.inf for n in counts])
        alarms += bool((np.sqrt(counts) * means / sds > 1.645)[4:].any())
    assert alarms / 200 > 0.15


def test_evidence_agrees_with_numerical_integration_over_effect_sizes() -> None:
    """The Bayes factor of a noncentral t with a normal prior on the effect size."""
    from scipy import integrate, stats

    from specgate.policy.sequential import PRIOR_VARIANCE

    for num, t in ((5, 2.0), (20, 0.3), (40, 4.5)):
        top, _ = integrate.quad(
            lambda d, n=num, t=t: stats.nct.pdf(t, n - 1, math.sqrt(n) * d)
            * stats.norm.pdf(d, 0, math.sqrt(PRIOR_VARIANCE)), -4, 4,
        )  # fmt: skip
        assert math.exp(log_evidence(num, t)) == pytest.approx(top / stats.t.pdf(t, num - 1), rel=1e-4)


def test_required_batches_are_enough_with_the_stated_power() -> None:
    sd, margin, alpha = 0.08, 0.05, 0.01
    needed = required_batches(sd, margin, alpha)
    rng = np.random.default_rng(3)
    found = sum(crossing(rng.normal(margin, sd, needed), alpha) is not None for _ in range(400))
    assert found / 400 >= 0.93  # 95 % stated; three standard errors of room
    assert required_batches(sd / 2, margin, alpha) < needed
    with pytest.raises(ValueError, match="cannot be told"):
        required_batches(1e6, 1e-6, 0.01)


def test_critical_t_is_where_the_evidence_reaches_the_threshold() -> None:
    assert critical_t(2, 1e-9) == math.inf
    for num in (20, 50, 500):
        assert log_evidence(num, critical_t(num, 0.01)) == pytest.approx(math.log(100), abs=1e-6)


def test_equal_numbers_are_evidence_only_beyond_the_noise_floor() -> None:
    test = MeanTest(0.0, min_sd=1e-3)
    for _ in range(50):
        test.add(1e-5)
    assert not test.is_above(0.05)
    assert not test.is_below(0.05)
    clear = MeanTest(0.0, min_sd=1e-3)
    for _ in range(50):
        clear.add(0.01)
    assert clear.is_above(0.001)


def test_errors_of_equal_rate_raise_no_alarm_and_of_another_rate_do() -> None:
    rng = np.random.default_rng(5)

    def alarms(times: float, runs: int) -> float:
        count = 0
        for _ in range(runs):
            test = EventTest(limit=1.5)
            candidate = rng.random(3000) < 0.01 * times
            control = rng.random(3000) < 0.01
            for ours, theirs in zip(candidate.tolist(), control.tolist(), strict=True):
                test.add(True, ours)
                test.add(False, theirs)
                if (ours or theirs) and test.is_above(0.05):
                    count += 1
                    break
        return count / runs

    assert alarms(1.5, 200) <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 200)  # exactly at the limit
    assert alarms(8.0, 30) == 1.0


def test_states_come_back_and_rubbish_is_refused() -> None:
    test, events = MeanTest(0.1), EventTest(2.0)
    for value in (0.2, 0.3, 0.25):
        test.add(value)
        events.add(True, value > 0.2)
        events.add(False, False)
    again, events_again = MeanTest(0.1), EventTest(2.0)
    again.load(test.state())
    events_again.load(events.state())
    assert (again, events_again) == (test, events)
    for bad in (
        {},
        {"num": -1, "mean": 0.0, "sum_squares": 0.0},
        {"num": 1, "mean": math.nan, "sum_squares": 0},
    ):
        with pytest.raises((KeyError, ValueError)):
            again.load(bad)
    with pytest.raises((KeyError, TypeError, ValueError)):
        events_again.load({"exposure": [1, 2], "events": [0, 0], "log_ratios": [1.0]})
