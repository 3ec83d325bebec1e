"""Stop strings: whatever the pieces, the finder agrees with a search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgate.backends.embedded.stop import StopFinder

ALPHABET = "ab\n你"
TEXT = st.text(ALPHABET, max_size=24)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def first_stop(text: str, stops: list[str], from_end: int = 0) -> tuple[str, str] | None:
    """Naive: of all occurrences ending after `from_end` the one that ends first, the longest of these."""
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(max(len(stop), from_end + 1), len(text) + 1)
        if text[:end].endswith(stop)
    ]
    if not ends:
        return None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


def num_held(text: str, stops: list[str]) -> int:
    """The longest end of `text` that is the beginning of a stop string, but not a whole one."""
    beginnings = {stop[:size] for stop in stops for size in range(len(stop))}
    return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)


@given(st.lists(TEXT, max_size=8), STOPS)
def test_pieces_give_what_the_whole_text_gives(pieces: list[str], stops: list[str]) -> None:
    finder = StopFinder(stops)
    shown, found, seen = "", None, ""
    for piece in pieces:
        seen += piece
        text, found = finder.push(piece)
        shown += text
        expected = first_stop(seen, stops)
        if expected is not None:
            assert (shown, found) == expected
            return
        assert found is None
        assert seen.startswith(shown)
        # Nothing is shown that a later piece could turn into a stop string, and no more is held back.
        assert len(seen) - len(shown) == num_held(seen, stops)
    assert shown + finder.finish() == seen


@given(st.text(ALPHABET, max_size=12), st.text(ALPHABET, max_size=12), STOPS)
def test_a_stop_complete_while_forbidden_is_text(early: str, late: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    shown, found = finder.push(early, can_stop=False)
    assert found is None
    assert len(early) - len(shown) == num_held(early, stops)
    more, found = finder.push(late)
    expected = first_stop(early + late, stops, from_end=len(early))
    if expected is None:
        assert found is None
        assert shown + more + finder.finish() == early + late
    else:
        assert (shown + more, found) == expected


def test_without_stops_everything_passes() -> None:
    finder = StopFinder(())
    assert finder.push("some text") == ("some text", None)
    assert finder.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopFinder(["a", ""])
