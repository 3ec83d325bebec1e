"""Which drafter a piece of text came from: texts of tokens in, the same text cut at its origins out."""

from __future__ import annotations

from collections import deque


class Origins:
    """Text goes in token by token and comes out when it may be shown, which can be later and in other
    pieces (a stop string may be beginning); the order of characters is the same."""

    def __init__(self) -> None:
        self._runs: deque[tuple[str | None, int]] = deque()  # (drafter or None, characters)

    def add(self, text: str, method: str | None) -> None:
        """The text of the next token. `method`: the drafter whose accepted draft token it is."""
        if text:
            self._runs.append((method, len(text)))

    def take(self, shown: str) -> tuple[tuple[str, str | None], ...]:
        """`shown`, the next characters of what went in, in pieces of one origin, a token each at the most."""
        pieces = []
        start = 0
        while start < len(shown):
            method, length = self._runs.popleft() if self._runs else (None, len(shown) - start)
            end = min(start + length, len(shown))
            if start + length > end:
                self._runs.appendleft((method, start + length - end))
            pieces.append((shown[start:end], method))
            start = end
        return tuple(pieces)
