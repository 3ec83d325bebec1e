"""A suffix automaton that grows token by token, and says what tends to follow where the text stands.

The automaton (Blumer et al., 1985) holds every substring of its texts in at most two states a
token. Appending is O(1) amortised, and the suffix link of the newest state *is* the longest
suffix of the text that occurred before. Each time a place is come back to, its state notes which
token followed; so continuations have frequencies, not just a newest example.
"""

from __future__ import annotations

from collections.abc import Sequence

ROOT = 0
_NONE = -1
_NOTED_LINKS = 3
"""How many ever shorter contexts learn from a token: a constant, so that a token costs O(1)."""


class SuffixAutomaton:
    """All substrings of one or more texts, with what followed them."""

    __slots__ = ("_counts", "_end", "_last", "_length", "_link", "_next", "place", "text")

    def __init__(self) -> None:
        self.text: list[int] = []  # all texts, one behind the other
        self._length = [0]  # of the longest string of each state
        self._link = [_NONE]  # the state of its longest suffix that occurs elsewhere too
        self._next: list[dict[int, int]] = [{}]
        self._end = [_NONE]  # an index of `text` at which the state's strings end, the newest noted
        self._counts: list[dict[int, int] | None] = [None]  # how often each token followed, once noted
        self._last = ROOT
        self.place = ROOT  # the state of the longest suffix of the text that occurred earlier

    def __len__(self) -> int:
        """Tokens held."""
        return len(self.text)

    def match_length(self, state: int) -> int:
        """Tokens of the longest string of a state."""
        return self._length[state]

    def begin_text(self) -> None:
        """What is appended next does not follow on what is there."""
        self._last = self.place = ROOT

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        for token in token_ids:
            self._append(token)

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """From a match of `length` tokens at `state` to the longest match after `token`."""
        while state != ROOT and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        following = self._next[state].get(token)
        return (ROOT, 0) if following is None else (following, length + 1)

    def follow(self, state: int, token: int) -> int:
        """The state after a token that `guess` gave."""
        return self._next[state][token]

    def guess(self, state: int) -> tuple[int, int, int] | None:
        """(token, times it followed, times anything did) at a state, or None where the text ends."""
        counts = self._counts[state]
        if counts:
            token = max(reversed(counts), key=counts.__getitem__)  # of equals the newest
            return token, counts[token], sum(counts.values())
        following = self._end[state] + 1
        if state == ROOT or following >= len(self.text):
            return None
        token = self.text[following]
        # Where one text ends and another begins nothing follows.
        return (token, 1, 1) if token in self._next[state] else None

    def _append(self, token: int) -> None:
        self._note(token)
        length, link, following = self._length, self._link, self._next
        at, state = len(self.text), self._last
        self.text.append(token)
        known = following[state].get(token)
        if known is not None:  # only where a further text repeats the beginning of an earlier one
            self._last = known if length[known] == length[state] + 1 else self._split(state, known, token)
            self.place = self._last
            return
        new = self._add(length[state] + 1, ROOT, {}, at)
        while state != _NONE and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state != _NONE:
            known = following[state][token]
            link[new] = known if length[known] == length[state] + 1 else self._split(state, known, token)
        self._last, self.place = new, link[new]

    def _note(self, token: int) -> None:
        """`token` follows where the text stands: its contexts that occurred before learn of it."""
        state, newest = self.place, len(self.text) - 1
        for _ in range(_NOTED_LINKS):
            if state <= ROOT:
                return
            counts = self._counts[state]
            if counts is None:
                guess = self.guess(state)
                counts = self._counts[state] = {} if guess is None else {guess[0]: 1}
            # Put last, so that of equally frequent tokens `guess` can prefer the newest.
            counts[token] = counts.pop(token, 0) + 1
            self._end[state] = newest
            state = self._link[state]

    def _add(self, length: int, link: int, following: dict[int, int], end: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._next.append(following)
        self._end.append(end)
        self._counts.append(None)
        return len(self._length) - 1

    def _split(self, state: int, known: int, token: int) -> int:
        """A state for the shorter strings of `known`, which from now on occur where its longest does not."""
        copy = self._add(
            self._length[state] + 1, self._link[known], dict(self._next[known]), self._end[known]
        )
        counts = self._counts[known]
        self._counts[copy] = None if counts is None else dict(counts)
        self._link[known] = copy
        while state != _NONE and self._next[state].get(token) == known:
            self._next[state][token] = copy
            state = self._link[state]
        return copy
