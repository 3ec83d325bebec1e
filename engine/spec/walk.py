"""One sequence on its way down its draft tree while `verify` decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.sampling_state import LogitsRow, SamplingState
from engine.spec.tree import ROOT, DraftTree


@dataclass(slots=True)
class Walk:
    """`node` is where the sequence stands (ROOT at first), `pending` its children yet untried.

    Node i has row `root_row + 1 + i` of the logits.
    """

    tree: DraftTree
    state: SamplingState
    root_row: int
    children: dict[int, list[int]]
    node: int = ROOT
    pending: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)  # accepted
    token_ids: list[int] = field(default_factory=list)  # emitted

    @property
    def row(self) -> LogitsRow:
        """The row of logits that decides what follows `node`."""
        return LogitsRow(self.root_row + 1 + self.node, self.state, tuple(self.token_ids))

    def accept(self, node: int) -> None:
        """Go down to `node`, a child of the one before."""
        self.node = node
        self.pending = list(self.children.get(node, ()))
        self.nodes.append(node)
        self.token_ids.append(self.tree.token_ids[node])

    def follow(self, token: int) -> bool:
        """Go to the child that holds `token`; without one, emit it and say that the walk is over."""
        for child in self.pending:
            if self.tree.token_ids[child] == token:
                self.accept(child)
                return True
        self.token_ids.append(token)
        return False


def start_walks(trees: Sequence[DraftTree], sampling: Sequence[SamplingState]) -> list[Walk]:
    """A walk at the root of every tree, the rows of logits counted through."""
    walks: list[Walk] = []
    root_row = 0
    for tree, state in zip(trees, sampling, strict=True):
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        walks.append(Walk(tree, state, root_row, children, pending=list(children.get(ROOT, ()))))
        root_row += 1 + len(tree)
    return walks
