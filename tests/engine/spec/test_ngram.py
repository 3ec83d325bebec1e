"""Prompt lookup against its quadratic statement, and its cost by step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import NgramConfig
from engine.spec.drafter import DraftContext
from engine.spec.ngram import NgramDrafter
from engine.spec.randomness import RandomKey
from engine.spec.tree import DraftTree


def naive(tokens: Sequence[int], min_n: int, max_n: int, num: int) -> tuple[int, ...]:
    """The longest suffix that occurred before, its newest occurrence, and what followed it."""
    tokens = list(tokens)
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        suffix = tokens[-n:]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == suffix:
                return tuple(tokens[start + n : start + n + num])
    return ()


def context(tokens: Sequence[int], num: int = 4, seq_id: str = "a") -> DraftContext:
    return DraftContext(seq_id, tokens, 1, num, 0.0, None, RandomKey(0))


def propose(drafter: NgramDrafter, tokens: Sequence[int], num: int = 4, seq_id: str = "a") -> tuple[int, ...]:
    (tree,) = drafter.propose([context(tokens, num, seq_id)])
    assert tree == DraftTree.chain(tree.token_ids)
    return tree.token_ids


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 6),
    st.lists(st.integers(0, 2), max_size=200),
)
@settings(max_examples=200, deadline=None)
def test_every_step_gives_the_naive_answer(
    steps: list[list[int]], min_n: int, extra_n: int, num: int, prompt: list[int]
) -> None:
    drafter = NgramDrafter(NgramConfig(num, min_n, min_n + extra_n))
    tokens = list(prompt)
    for step in steps:
        tokens += step
        assert propose(drafter, tokens, num) == naive(tokens, min_n, min_n + extra_n, num)


def test_the_longest_match_wins_then_the_newest() -> None:
    drafter = NgramDrafter(NgramConfig(2, 2, 3))
    assert propose(drafter, [1, 2, 3, 7, 7, 2, 3, 8, 8, 1, 2, 3], 2) == (7, 7)
    drafter.end("a")
    assert propose(drafter, [9, 2, 3, 7, 7, 2, 3, 8, 8, 1, 2, 3], 2) == (8, 8)


def test_a_continuation_runs_to_the_end_of_the_known_tokens() -> None:
    drafter = NgramDrafter(NgramConfig(8, 2, 5))
    assert propose(drafter, [5, 6, 7, 5, 6], 8) == (7, 5, 6)
    drafter.end("a")
    assert propose(drafter, [4, 4, 4], 8) == (4,)
    drafter.end("a")
    assert propose(drafter, [5, 6], 8) == ()


def test_large_token_ids_do_not_collide() -> None:
    """Bulk and single hashing agree for ids far beyond 16 bits."""
    base = [10**6 + i * 7919 for i in range(150)]
    drafter = NgramDrafter()
    assert propose(drafter, base + base[20:25]) == tuple(base[25:29])
    longer = base + base[20:25] + base[90:94]
    assert propose(drafter, longer) == tuple(base[94:98])


class CountingList(list[int]):
    """Counts the elements read."""

    num_read = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self):  # type: ignore[no-untyped-def]
        raise AssertionError("walks the whole context")


@pytest.mark.parametrize("length", [500, 20_000])
def test_a_step_costs_its_new_tokens_and_not_the_context(length: int) -> None:
    tokens = CountingList([(i * i) % 97 for i in range(length)])
    drafter = NgramDrafter()
    drafter.propose([context(tokens)])
    for new in ([3], [5, 6, 7, 8, 9], [3]):
        tokens.extend(new)
        tokens.num_read = 0
        drafter.propose([context(tokens)])
        assert tokens.num_read <= 5 * (len(new) + 8)


def test_a_step_in_which_another_method_drafted_is_caught_up() -> None:
    drafter = NgramDrafter(NgramConfig(3, 2, 4))
    tokens = [1, 2, 3, 4]
    propose(drafter, tokens)
    tokens += [8, 9, 1, 7, 8, 9]  # committed while other methods drafted
    assert propose(drafter, tokens, 3) == (1, 7, 8)


def test_sequences_do_not_see_each_other() -> None:
    drafter = NgramDrafter()
    trees = drafter.propose([context([1, 2, 3, 4], seq_id="a"), context([9, 1, 2], seq_id="b")])
    assert [tree.token_ids for tree in trees] == [(), ()]


@pytest.mark.parametrize(("low", "high"), [(0, 3), (4, 3)])
def test_impossible_lookups_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="prompt_lookup_min"):
        NgramDrafter(NgramConfig(4, low, high))


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(0, 60),
)
@settings(max_examples=200, deadline=None)
def test_hindsight_tells_what_drafting_would_have_done(
    prompt: list[int], more: list[int], min_n: int, extra_n: int, num: int, looked_at: int
) -> None:
    """Every step as `propose` would have drafted it then; in two looks as in one."""
    config = NgramConfig(num, min_n, min_n + extra_n)
    text = prompt + more
    expected, at = [], len(prompt)
    while at + num < len(text):
        draft = naive(text[:at], min_n, min_n + extra_n, num)
        right = next((i for i, token in enumerate(draft) if token != text[at + i]), len(draft))
        expected.append((len(draft), right))
        at += right + 1
    drafter = NgramDrafter(config)
    first, begins = drafter.hindsight(context(text[: len(prompt) + looked_at], num), len(prompt))
    rest, ends = drafter.hindsight(context(text, num), begins)
    assert first + rest == expected
    assert ends == at
    assert propose(drafter, text, num) == naive(text, min_n, min_n + extra_n, num)
