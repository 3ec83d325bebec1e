"""Stop strings in a text that arrives in pieces.

An Aho-Corasick automaton reads every character once. Its state knows how much of the text's end
could still become a stop string: that much is held back, the rest may be shown. Because the
automaton works on characters, what it finds does not depend on where pieces (tokens, steps,
drafts) begin and end. Of several stop strings the one that is complete first wins, the longest
of them if they end together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    depth: int
    children: dict[str, _Node] = field(default_factory=dict)
    fail: _Node | None = None
    stop: str | None = None  # the longest stop string that ends here
    num_held: int = 0  # characters at the end that may be the beginning of a stop string


def _build(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.children.setdefault(char, _Node(node.depth + 1))
        node.stop = stop
    queue = deque(root.children.values())
    for node in queue:
        node.fail = root
    while queue:
        node = queue.popleft()
        assert node.fail is not None
        if node.stop is None:
            node.stop = node.fail.stop
        node.num_held = node.depth if node.children else node.fail.num_held
        for char, child in node.children.items():
            child.fail = _step(root, node.fail, char)
            queue.append(child)
    return root


def _step(root: _Node, node: _Node, char: str) -> _Node:
    while char not in node.children:
        if node.fail is None:
            return root
        node = node.fail
    return node.children[char]


class StopFinder:
    """Reads one answer's text and says what may be shown and when it has to end.

    `stops` are non-empty strings. After a stop was found the finder is done.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._root = _build(stops)
        self._node = self._root
        self._held = ""

    def push(self, text: str, can_stop: bool = True) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that was found (text ends before it).

        With `can_stop` False (min_tokens not reached) a stop string that is complete within
        `text` is ordinary text.
        """
        if not self._root.children:
            return text, None
        held = self._held + text
        num_seen = len(self._held)
        node = self._node
        for char in text:
            node = _step(self._root, node, char)
            num_seen += 1
            if node.stop is not None and can_stop:
                self._node, self._held = self._root, ""
                return held[: num_seen - len(node.stop)], node.stop
        border = len(held) - node.num_held
        self._node, self._held = node, held[border:]
        return held[:border], None

    def finish(self) -> str:
        """The text held back, now that nothing more comes."""
        held, self._held, self._node = self._held, "", self._root
        return held
