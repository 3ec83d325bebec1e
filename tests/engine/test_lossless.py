"""Greedy output is the same token for token under every policy, however the work is scheduled."""

from __future__ import annotations

import pytest

from tests.engine.harness import (
    GREEDY,
    POLICIES,
    all_drafters,
    drive,
    make_engine,
    prompt,
    reference_greedy,
    request,
    target,
)

NUM_TOKENS = GREEDY.max_tokens
PROMPTS = (
    (5,) * 48,  # one word repeated: drafts of every kind agree with themselves
    prompt(1, 1),
    prompt(2, 17),
    prompt(3, 16),  # ends on a block border
    prompt(4, 6) * 5,
    prompt(5, 40),
    prompt(5, 40) + prompt(6, 9),  # shares a prefix with the one before
    prompt(5, 40) + prompt(7, 3),
)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], list[int]]:
    """Each prompt's greedy continuation, decoded without the engine."""
    return {ids: reference_greedy(target(), ids, NUM_TOKENS) for ids in PROMPTS}


def check(run_tokens: dict[str, list[int]], expected: dict[tuple[int, ...], list[int]]) -> None:
    for key, tokens in run_tokens.items():
        assert tokens == expected[PROMPTS[int(key.split("-")[0])]], key


@pytest.mark.parametrize("policy", POLICIES)
def test_alone(policy: str, expected: dict[tuple[int, ...], list[int]]) -> None:
    """One request at a time, then the same again from the prefix cache."""
    engine = make_engine(all_drafters(expected))
    for turn in ("first", "cached"):
        for index, ids in enumerate(PROMPTS):
            run = drive(engine, [request(f"{index}-{turn}", ids, policy=policy)])
            check(run.tokens(), expected)
            assert not any(record.drafter_errors for record in run.records)
            if policy == "right":
                stats = run.finished[f"{index}-{turn}"].stats
                assert stats is not None
                assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
                assert stats.num_target_steps == 6  # 1 + 4 * 5 + 3 tokens
            if policy == "wrong":
                assert run.finished[f"{index}-{turn}"].num_accepted_tokens == 0


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 7, 16, 33, 512])
@pytest.mark.parametrize("num_blocks", [256, 26])
def test_mixed_in_one_batch(
    max_batch_tokens: int, num_blocks: int, expected: dict[tuple[int, ...], list[int]]
) -> None:
    """Every prompt under every policy at once, for any step budget; few blocks force preemptions."""
    engine = make_engine(
        all_drafters(expected), max_batch_tokens=max_batch_tokens, num_blocks=num_blocks, max_sequences=9
    )
    requests = [
        request(f"{index}-{policy}", ids, policy=policy, num_speculative_tokens=1 + (index + p) % 5)
        for p, policy in enumerate(POLICIES)
        for index, ids in enumerate(PROMPTS)
    ]
    run = drive(engine, requests)
    check(run.tokens(), expected)
    assert len(run.finished) == len(requests)
    assert all(record.num_tokens <= max_batch_tokens for record in run.records)
    if num_blocks == 26 and max_batch_tokens >= 7:
        assert sum(record.num_preemptions for record in run.records) > 0
    if max_batch_tokens >= 16:
        assert {"mixed", "verify"} <= {record.kind for record in run.records}


def test_without_prefix_cache(expected: dict[tuple[int, ...], list[int]]) -> None:
    engine = make_engine(all_drafters(expected), enable_prefix_cache=False, num_blocks=30)
    for _ in range(2):
        requests = [
            request(f"{i}-{policy}", ids, policy=policy)
            for policy in ("baseline", "right2", "draft")
            for i, ids in enumerate(PROMPTS)
        ]
        run = drive(engine, requests)
        check(run.tokens(), expected)
        assert all(item.stats.num_cached_tokens == 0 for item in run.finished.values() if item.stats)
        assert engine.load().num_cached_blocks == 0
