"""A small month of simulated rollouts; `python -m specgate.bench.rollouts` runs the large one.

Stated for the shipped defaults: a candidate 10 % slower is rolled back before it passes a stage in at
least 95 % of runs, a neutral one promoted in at least 90 %, and rolled back in at most 5 %. Here 12
runs of each, with fixed seeds and fewer stages: one failure is allowed, which true rates of 95 % exceed
in about one choice of seeds out of eight, and true rates of 99 % in one of a hundred and fifty.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from specgate.bench.rollouts import (
    TEN_PERCENT,
    Ending,
    load_series,
    main,
    needs,
    places,
    run_many,
    slowed,
)
from specgate.config.rollout import GuardrailsConfig, OverlayConfig, RolloutConfig
from specgate.policy.canary import Rollout, Status

SHIPPED = RolloutConfig(rollout="simulated", overlay=OverlayConfig(drafter="ngram"))
SMALL = replace(SHIPPED, stages_percent=(5.0, 50.0, 100.0), min_samples=3000)
RUNS = 12


@pytest.fixture(scope="module")
def slower() -> list[Ending]:
    return run_many(SMALL, load_series(), TEN_PERCENT, RUNS, requests_per_s=2.0)


@pytest.fixture(scope="module")
def neutral() -> list[Ending]:
    return run_many(SMALL, load_series(), 1.0, RUNS, requests_per_s=2.0)


def test_ten_percent_slower_is_caught_before_it_passes_a_stage(slower: list[Ending]) -> None:
    caught = [e for e in slower if e.status is Status.ROLLED_BACK and e.stage == 0 and "ratio" in e.why]
    assert len(caught) >= RUNS - 1


def test_neutral_is_promoted_and_not_rolled_back(neutral: list[Ending]) -> None:
    assert sum(e.status is Status.PROMOTED for e in neutral) >= RUNS - 1


def test_the_shipped_defaults_respect_the_sample_size_that_is_needed() -> None:
    alpha = Rollout(SHIPPED, 0.0).alpha
    sizes = needs(SHIPPED.guardrails, load_series(), TEN_PERCENT, alpha, SHIPPED.batch_samples)
    assert {need.name for need in sizes} >= {"tpot_ratio", "e2e_ratio", "ttft_ratio"}
    assert max(need.num_samples for need in sizes) <= SHIPPED.min_samples


def test_blocks_keep_neighbours_together() -> None:
    source = places(100, random.Random(0))
    seen = [next(source) for _ in range(4000)]
    follows = sum((b - a) % 100 == 1 for a, b in itertools.pairwise(seen))
    assert follows / len(seen) > 0.95
    assert set(seen) == set(range(100))


def test_slowed_is_slower_in_every_time_and_nothing_else() -> None:
    sample = load_series()[0]
    other = slowed(sample, 1.1)
    assert other.ttft_s == pytest.approx((sample.ttft_s or 0) * 1.1)
    assert other.e2e_s == pytest.approx((sample.e2e_s or 0) * 1.1)
    assert (other.num_prompt_tokens, other.queue_wait_s) == (sample.num_prompt_tokens, sample.queue_wait_s)


def test_the_command_prints_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", "1", "--rate", "2", "--slower", "30"]) == 0
    out = capsys.readouterr().out
    assert "needs" in out
    assert "30 % slower: rolled back 100.0% (before passing a stage 100.0%" in out
    assert "neutral: " in out


def test_without_guardrails_nothing_is_caught() -> None:
    """What the figures rest on: the guardrails, not the clock."""
    blind = GuardrailsConfig(
        ttft_ratio=None,
        tpot_ratio=None,
        e2e_ratio=None,
        ttft_p95_ratio=None,
        tpot_p95_ratio=None,
        e2e_p95_ratio=None,
    )
    config = replace(SMALL, guardrails=blind, min_samples=100)
    (ending,) = run_many(config, load_series(), 2.0, 1, requests_per_s=2.0)
    assert ending.status is Status.PROMOTED
