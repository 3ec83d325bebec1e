"""Breaker, budget, choice of replicas, events, counts: the parts without a network."""

from __future__ import annotations

import email.utils
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specgate.backends.openai_http.answers import method_counts
from specgate.backends.openai_http.breaker import Breaker, BreakerState, RetryBudget
from specgate.backends.openai_http.events import EventSplitter, payload
from specgate.backends.openai_http.failures import retry_after_s
from specgate.backends.openai_http.health import note_health
from specgate.backends.openai_http.outgoing import with_member
from specgate.backends.openai_http.pool import Outcome, Pool
from specgate.clock import FakeClock
from specgate.config import load_config, parse_config
from specgate.config.upstream import BreakerConfig, OpenAIHttpConfig, PoolConfig, RetryConfig
from specgate.errors import ConfigError


class BreakerMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, time alone leads out of `open`, and one success closes it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = BreakerConfig(window=6, min_failures=3, failure_share=0.5, open_s=2.0, max_open_s=8.0)
        self.breaker = Breaker(self.config)
        self.now = 0.0
        self.running: list[bool] = []

    @rule()
    def begin(self) -> None:
        if self.breaker.lets_through(self.now):
            self.running.append(self.breaker.begin(self.now))

    @precondition(lambda self: self.running)
    @rule(failed=st.sampled_from([True, False, None]), at=st.integers(0, 20))
    def end(self, failed: bool | None, at: int) -> None:
        was_probe = self.running.pop(at % len(self.running))
        before = self.breaker.state(self.now)
        self.breaker.end(self.now, failed, was_probe=was_probe)
        after = self.breaker.state(self.now)
        if failed is None:
            assert after is before
        if not failed and before is BreakerState.CLOSED:
            assert after is BreakerState.CLOSED
        if was_probe and failed is False:
            assert after is BreakerState.CLOSED
        if was_probe and failed:
            assert after is BreakerState.OPEN

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def at_most_one_probe(self) -> None:
        assert self.running.count(True) <= 1
        state = self.breaker.state(self.now)
        assert self.breaker.lets_through(self.now) == (
            state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and True not in self.running)
        )

    @invariant()
    def never_open_for_longer_than_said(self) -> None:
        assert self.breaker.state(self.now + self.config.max_open_s + 1e-6) is not BreakerState.OPEN


BreakerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBreaker = BreakerMachine.TestCase


def test_the_breaker_stays_open_longer_each_time() -> None:
    breaker, now = Breaker(BreakerConfig(min_failures=1, open_s=1.0, max_open_s=3.0)), 0.0
    waits = []
    for _ in range(4):
        breaker.end(now, True, was_probe=breaker.begin(now))
        began = now
        while breaker.state(now) is BreakerState.OPEN:
            now += 0.25
        waits.append(now - began)
    assert waits == [1.0, 2.0, 3.0, 3.0]


@given(st.lists(st.booleans(), max_size=300), st.floats(0, 1), st.integers(0, 5))
def test_retries_never_exceed_burst_and_share(asks: list[bool], share: float, burst: int) -> None:
    budget = RetryBudget(RetryConfig(budget_share=share, budget_burst=burst))
    num_taken = 0
    for num_requests, asks_retry in enumerate(asks, 1):
        budget.earn()
        num_taken += asks_retry and budget.take()
        assert num_taken <= burst + share * num_requests + 1e-6


def test_replicas_share_the_load_and_the_sick_are_left_out() -> None:
    clock = FakeClock()
    settings_ = OpenAIHttpConfig(pools={}, breaker=BreakerConfig(min_failures=1))
    pool = Pool("baseline", PoolConfig(replicas=("http://a", "http://b", "http://c/")), settings_, clock)
    assert pool.begin() is None  # nobody was asked for health yet
    for replica in pool.replicas:
        note_health(replica, None, 2)
    attempts = [pool.begin() for _ in range(6)]
    assert [a.replica.url[-1] for a in attempts if a] == list("abcabc")
    heard: list[Outcome] = []
    pool.on_attempt(lambda policy, url, outcome: heard.append(outcome))
    assert attempts[1] is not None
    attempts[1].end(Outcome.LEFT)
    attempts[1].end(Outcome.BROKEN)  # only the first word counts
    assert heard == [Outcome.LEFT]
    again = pool.begin()
    assert again is not None
    assert again.replica.url == "http://b"
    again.end(Outcome.STATUS)
    assert [r["why_not"] for r in pool.describe()] == [None, "failed too often", None]
    pool.replicas[0].rests_until_s = 5.0
    note_health(pool.replicas[2], "no", 2)
    assert pool.fault() is None  # one bad check is not yet down
    note_health(pool.replicas[2], "no", 2)
    assert pool.fault() == "asked to be left alone for 5 s more; failed too often; no"
    assert pool.rests_s() == 5


LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)


@given(
    st.lists(st.tuples(st.lists(LINES, min_size=1, max_size=3), st.sampled_from(["\n", "\r\n"])), max_size=6),
    st.lists(st.integers(1, 9)),
)
def test_events_come_out_whole_however_the_stream_is_cut(
    blocks: list[tuple[list[str], str]], cuts: list[int]
) -> None:
    expected = [end.join(f"data: {line}" for line in lines) + end + end for lines, end in blocks]
    whole = "".join(expected).encode()
    splitter, found, at = EventSplitter(), [], 0
    for size in [*cuts, len(whole) + 1]:
        found += splitter.push(whole[at : at + size])
        at += size
    assert found == [text.encode() for text in expected]
    assert splitter.finish() == []
    assert [payload(event) for event in found] == ["\n".join(lines).encode() for lines, _ in blocks]


def test_the_rest_of_a_stream_is_an_event_too() -> None:
    splitter = EventSplitter()
    assert splitter.push(b"data: 1\n\ndata: 2\n") == [b"data: 1\n\n"]
    assert splitter.finish() == [b"data: 2\n\n"]
    assert payload(b": comment\n\n") is None


@given(
    st.lists(st.integers(0, 30), max_size=8).map(lambda n: sorted(n, reverse=True)),
    st.integers(0, 40),
    st.integers(0, 300),
    st.integers(0, 60),
)
def test_counts_by_depth_are_sound_whatever_is_told(
    accepted: list[int], num_drafts: int, num_tokens: int, num_steps: int
) -> None:
    counts = method_counts("ngram", num_steps, num_drafts, num_tokens, accepted)
    if not counts.num_drafts:
        assert counts.accepted_per_position == ()
        return
    assert sum(counts.accepted_per_position) == sum(accepted)
    depths = zip(
        (counts.num_drafts, *counts.accepted_per_position),
        counts.accepted_per_position,
        counts.drafted_per_position,
        counts.refused_per_position,
        strict=False,
    )
    for before, stood, drafted, refused in depths:
        assert 0 <= stood <= min(before, drafted)
        assert 0 <= refused <= before - stood
    assert counts.num_steps >= counts.num_drafts


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=4))
def test_a_member_is_set_and_the_others_stay(members: dict[str, object]) -> None:
    body = msgspec.json.encode(members)
    assert msgspec.json.decode(with_member(body, "specgate", {"a": 1})) == members | {"specgate": {"a": 1}}
    assert with_member(b"no JSON", "specgate", 1) == b"no JSON"


def test_retry_after_is_read_in_both_forms_and_cut() -> None:
    clock = FakeClock(1_000_000.0)
    date = email.utils.formatdate(1_000_007.0, usegmt=True)
    told = {"3": 3.0, "0.5": 0.5, date: 7.0, "99999": 30.0, "-4": 0.0, "soon": None, "nan": None, "inf": None}
    assert {text: retry_after_s(text, clock, 30.0) for text in told} == told
    assert retry_after_s(None, clock, 30.0) is None


CONFIG = """
server: {port: 0}
auth: {keyless_on_loopback: true}
models:
  - id: m
    backend: openai_http
    %s
"""


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("supervision: {}", "openai_http: is required with backend: openai_http"),
        ("openai_http: {pools: {ngram: {replicas: ['http://a']}}}", "needs a pool named baseline"),
        ("openai_http: {pools: {baseline: {replicas: []}}}", "needs at least one URL"),
        ("openai_http: {pools: {baseline: {replicas: ['a:80']}}}", "must be like http://HOST:PORT"),
        ("openai_http: {pools: {baseline: {replicas: ['http://a/v1']}}}", "leave out the trailing /v1"),
        ("openai_http: {pools: {baseline: {replicas: ['http://u@a']}}}", "must have no query"),
        ("openai_http: {pools: {baseline: {replicas: ['http://a', 'http://a']}}}", "given twice"),
        (
            "openai_http: {pools: {baseline: {replicas: ['http://a']}, auto: {replicas: ['http://b']}}}",
            "no policy",
        ),
        ("openai_http: {pools: {baseline: {replicas: ['http://a'], headers: {'X Y': v}}}}", "no HTTP header"),
        ("openai_http: {pools: {baseline: {replica: ['http://a']}}}", "did you mean 'replicas'?"),
        ("fake: {}", "does nothing with backend: openai_http"),
    ],
)
def test_a_wrong_configuration_is_named(section: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(CONFIG % section, "c.yaml")
    assert says in str(caught.value)


def test_the_example_configuration_is_valid() -> None:
    found = load_config(Path(__file__).parents[4] / "configs" / "proxy.example.yaml")
    pools = found.models[0].openai_http
    assert pools is not None
    assert set(pools.pools) == {"baseline", "ngram", "draft"}
