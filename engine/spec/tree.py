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

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """True when every node has at most one child: node i follows node i - 1."""
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    @classmethod
    def chain(cls, token_ids: tuple[int, ...], probs: torch.Tensor | None = None) -> DraftTree:
        """A straight line of tokens."""
        return cls(token_ids, tuple(range(ROOT, len(token_ids) - 1)), probs)


EMPTY_TREE = DraftTree()


def validate_tree(tree: DraftTree, max_nodes: int, vocab_size: int) -> str | None:
    """What is wrong with a draft, or None. Cheap: small integers and one pass over `probs`."""
    num_nodes = len(tree.token_ids)
    if num_nodes > max_nodes:
        return f"{num_nodes} draft tokens where {max_nodes} were granted"
    if len(tree.parents) != num_nodes:
        return f"{num_nodes} tokens but {len(tree.parents)} parents"
    seen: set[tuple[int, int]] = set()
    for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        if not 0 <= token < vocab_size:
            return f"token id {token} at node {node} is outside the vocabulary of {vocab_size}"
        if not ROOT <= parent < node:
            return f"node {node} names parent {parent}, which does not precede it"
        if (parent, token) in seen:
            return f"node {node} repeats token {token} among its siblings"
        seen.add((parent, token))
    return None if tree.probs is None else _fault_of_probs(tree.probs, tree.token_ids, vocab_size)


def _fault_of_probs(probs: torch.Tensor, token_ids: tuple[int, ...], vocab_size: int) -> str | None:
    if tuple(probs.shape) != (len(token_ids), vocab_size):
        return f"probs has shape {tuple(probs.shape)}, expected ({len(token_ids)}, {vocab_size})"
    if not token_ids:
        return None
    sums, lowest = probs.double().sum(dim=1).tolist(), probs.amin(dim=1).tolist()
    for node, token in enumerate(token_ids):
        if not abs(sums[node] - 1.0) < 1e-3 or not lowest[node] >= 0.0:  # NaN fails both
            return f"probs of node {node} are no distribution: sum {sums[node]:.6g}, least {lowest[node]:.3g}"
        if not float(probs[node, token]) > 0.0:
            return f"token id {token} at node {node} has probability 0 under its own draft"
    return None
