"""Requests and tokens per minute: never more than the limit in any minute, and what the headers say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgate.clock import FakeClock
from specgate.config import KeyLimits
from specgate.errors import RateLimited
from specgate.rate_limits import RateLimits


def limits(clock: FakeClock, **fields: int) -> RateLimits:
    return RateLimits(lambda _key: KeyLimits(**fields), clock)


def test_what_is_refused_is_let_in_after_the_retry_hint_and_takes_nothing_before() -> None:
    clock = FakeClock(5.0)
    rates = limits(clock, requests_per_minute=7, tokens_per_minute=1000)
    for _ in range(7):
        rates.take("a", 10)
    for _ in range(3):  # refusals cost nothing
        with pytest.raises(RateLimited, match="7 requests a minute") as refused:
            rates.take("a", 10)
    assert refused.value.retry_after_s == 9
    assert rates.headers("a") == {
        "x-ratelimit-limit-requests": "7",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "930",
        "x-ratelimit-reset-tokens": "5s",
    }
    clock.advance(9.0)
    rates.take("a", 10)
    rates.take("b", 10)  # every key has its own


def test_tokens_are_set_right_by_what_was_used() -> None:
    clock = FakeClock()
    rates = limits(clock, tokens_per_minute=600)
    asked_for_much = rates.take("a", 10_000)  # more than a minute's worth: from a full bucket only
    assert rates.headers("a")["x-ratelimit-remaining-tokens"] == "0"
    asked_for_much.set_to(100)
    assert rates.headers("a")["x-ratelimit-remaining-tokens"] == "500"
    rates.take("a", 1).set_to(1100)  # an answer without a limit took more than there was
    with pytest.raises(RateLimited) as refused:
        rates.take("a", 1)
    assert refused.value.retry_after_s == 61
    clock.advance(60.0)
    with pytest.raises(RateLimited):
        rates.take("a", 1)
    clock.advance(1.0)
    rates.take("a", 1)
    assert "x-ratelimit-limit-requests" not in rates.headers("a")


def test_an_answer_that_may_become_long_holds_back_a_minutes_tokens_at_most() -> None:
    clock = FakeClock()
    rates = limits(clock, tokens_per_minute=600)
    rates.take("a", 10).hold(8192)
    with pytest.raises(RateLimited) as refused:
        rates.take("a", 10)
    assert refused.value.retry_after_s == 1


def test_a_changed_limit_keeps_what_was_used() -> None:
    clock, now = FakeClock(), {"limit": 10}
    rates = RateLimits(lambda _key: KeyLimits(requests_per_minute=now["limit"]), clock)
    for _ in range(4):
        rates.take("a", 0)
    now["limit"] = 20
    assert rates.headers("a")["x-ratelimit-remaining-requests"] == "16"
    now["limit"] = 5
    assert rates.headers("a")["x-ratelimit-remaining-requests"] == "1"


@settings(max_examples=150, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.floats(0, 20), st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=60
    ),
    per_minute=st.integers(1, 300),
)
def test_the_long_run_never_exceeds_the_limit(
    moves: list[tuple[float, int, int]], per_minute: int
) -> None:
    """Tokens used until now never exceed one bucket, what has flowed in, and the one request that is
    served from a bucket not yet empty."""
    clock = FakeClock()
    rates = limits(clock, tokens_per_minute=per_minute)
    used, overshoot = 0, 0
    for passed_s, asked, actual in moves:
        clock.advance(passed_s)
        try:
            reservation = rates.take("a", asked)
        except RateLimited:
            continue
        reservation.set_to(actual)
        used += actual
        overshoot = max(overshoot, actual - min(asked, per_minute))
        assert used <= per_minute * (1 + clock.now / 60) + max(0, overshoot) + 1e-6
        assert 0 <= int(rates.headers("a")["x-ratelimit-remaining-tokens"]) <= per_minute
