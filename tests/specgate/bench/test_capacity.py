"""Capacity from a steady window, SLOs, and the search for the largest concurrency."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgate.bench.capacity import Probe, Slo, _throughput, find_concurrency
from specgate.bench.record import Record


def record(**fields: object) -> Record:
    return Record("j", "p", "chat", "baseline", 0.0, 0.0, **fields)  # type: ignore[arg-type]


def test_throughput_counts_the_part_of_each_answer_inside_the_window() -> None:
    records = [
        record(emitted_s=(1.0, 2.0, 3.0, 4.0), num_output_tokens=8),  # half of it from 3 on
        record(emitted_s=(5.0, 6.0), num_output_tokens=4),  # all of it
        record(emitted_s=(12.0, 13.0), num_output_tokens=4),  # too late
        record(emitted_s=(), num_output_tokens=0),
    ]
    assert _throughput(records, 3.0, 11.0) == pytest.approx((1.5 / 8.0, (4 + 4) / 8.0))
    assert _throughput(records, 20.0, 30.0) is None


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 40))
def test_the_search_finds_the_largest_that_meets_them(largest: int, limit: int) -> None:
    async def probe(concurrency: int) -> Probe:
        assert 1 <= concurrency <= limit
        return Probe(concurrency, 1.0 if concurrency <= largest else 0.5, 1.0)

    found, probes = asyncio.run(find_concurrency(probe, 0.95, limit))
    assert found == (min(largest, limit) or None)
    tried = [one.concurrency for one in probes]
    assert len(tried) == len(set(tried)) <= 12


@pytest.mark.parametrize(
    ("slo", "fields", "is_met"),
    [
        (Slo(100.0, 10.0), {"ttft_ms": 99.0, "tpot_ms": 9.0}, True),
        (Slo(100.0, 10.0), {"ttft_ms": 101.0, "tpot_ms": 9.0}, False),
        (Slo(100.0, 10.0), {"ttft_ms": 99.0, "tpot_ms": 11.0}, False),
        (Slo(100.0), {"ttft_ms": 99.0, "tpot_ms": 1e9}, True),
        (Slo(None, 10.0), {"ttft_ms": 99.0}, True),  # a single token has no TPOT to miss
        (Slo(100.0), {"ttft_ms": 1.0, "error": "429"}, False),
        (Slo(100.0), {}, False),
    ],
)
def test_slos(slo: Slo, fields: dict[str, object], is_met: bool) -> None:
    assert slo.is_met(record(**fields)) is is_met
