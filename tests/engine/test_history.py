"""Token counts kept incrementally equal counts made afresh."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.history import TokenHistory

tokens = st.lists(st.integers(0, 200), max_size=40)


@given(tokens, st.lists(tokens, max_size=8), tokens)
@settings(max_examples=100, deadline=None)
def test_counts_equal_those_made_afresh(prompt: list[int], steps: list[list[int]], path: list[int]) -> None:
    history = TokenHistory(prompt)
    output: list[int] = []
    for step in steps:
        output += step
        history.update(output)
        for drafted in ([], path):
            token_ids, counts = history.with_path(drafted)
            expected = Counter(output) + Counter(drafted)
            found = dict(zip(token_ids.tolist(), counts.tolist(), strict=True))
            assert found == {token: expected[token] for token in {*prompt, *output, *drafted}}
            assert len(token_ids) == len(found)
