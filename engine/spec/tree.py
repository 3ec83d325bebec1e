"""A draft as a tree of tokens. No draft is the empty tree; n-gram and draft models give chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = -1
"""Parent index of a node that follows the sequence's last committed token."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens for one sequence, in an order where every parent precedes its children.

    `parents[i]` is the node that token i follows, or `ROOT`. `probs[i]` is the drafter's
    distribution that token i was drawn from, [num_nodes, vocab]; None says that the draft is
    one-hot (deterministic), as for n-gram and greedy drafts. Siblings with probs were sampled
    without replacement, in node order.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: torch.Tensor | None = None
    expected_accepted: float | None = (
        None  # how many tokens its drafter thinks will be accepted, if it can say
    )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """True when every node has at most one child: node i follows node i - 1."""
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    @classmethod
    def chain(
        cls,
        token_ids: tuple[int, ...],
        probs: torch.Tensor | None = None,
        expected_accepted: float | None = None,
    ) -> DraftTree:
        """A straight line of tokens."""
        return cls(token_ids, tuple(range(ROOT, len(token_ids) - 1)), probs, expected_accepted)


EMPTY_TREE = DraftTree()
