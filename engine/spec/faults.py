"""What is wrong with a draft. The one check: the engine runs it on every draft, `check_drafter` too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.spec.tree import ROOT, DraftTree

PROBS_TOLERANCE = 1e-3
"""How far a draft distribution's sum may be from 1."""


@dataclass(frozen=True, slots=True)
class DraftFault:
    """Why a draft cannot be verified. `kind`: `nan` for distributions with NaN, else `invalid_draft`."""

    kind: str
    message: str


def find_faults(
    trees: Sequence[DraftTree], max_draft_tokens: Sequence[int], vocab_size: int, *, are_chains: bool
) -> dict[int, DraftFault]:
    """Index of each draft that is at fault -> its first fault. `are_chains`: forks are a fault as well.

    Found are: something else than a tree, too many nodes, token ids outside the vocabulary, parents
    that do not precede their children, equal siblings; distributions of the wrong shape, not summing
    to 1, or giving their own draft token no probability (such a token was not drawn from them).
    """
    faults: dict[int, DraftFault] = {}
    sampled: dict[int, torch.Tensor] = {}
    for index, (tree, ceiling) in enumerate(zip(trees, max_draft_tokens, strict=True)):
        message = _shape_fault(tree, ceiling, vocab_size, are_chains)
        if message is not None:
            faults[index] = DraftFault("invalid_draft", message)
        elif tree.probs is not None and len(tree) > 0:
            sampled[index] = tree.probs
    if sampled:
        faults |= _probs_faults(trees, sampled)
    return faults


def _shape_fault(tree: object, ceiling: int, vocab_size: int, is_chain: bool) -> str | None:
    if not isinstance(tree, DraftTree):
        return f"a {type(tree).__name__} instead of a DraftTree"
    num_nodes = len(tree)
    if num_nodes > ceiling:
        return f"{num_nodes} draft tokens where at most {ceiling} were granted"
    if len(tree.parents) != num_nodes:
        return f"{num_nodes} tokens but {len(tree.parents)} parents"
    if is_chain and not tree.is_chain:
        return f"parents {tree.parents} make no chain, and only chains are drafted here"
    seen: set[tuple[int, int]] = set()
    for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        if not _is_token(token, vocab_size):
            return f"token id {token!r} at node {node} is outside the vocabulary of {vocab_size}"
        if not ROOT <= parent < node:
            return f"node {node} names parent {parent}, which does not precede it"
        if (parent, token) in seen:
            return f"node {node} repeats token {token} among its siblings"
        seen.add((parent, token))
    probs: object = tree.probs
    if probs is None or (isinstance(probs, torch.Tensor) and probs.shape == (num_nodes, vocab_size)):
        return None
    return f"probs are no tensor of shape {(num_nodes, vocab_size)}"


def _is_token(token: object, vocab_size: int) -> bool:
    return isinstance(token, int) and 0 <= token < vocab_size


def _probs_faults(trees: Sequence[DraftTree], sampled: Mapping[int, torch.Tensor]) -> dict[int, DraftFault]:
    """All distributions at once; the numbers are only read where something is wrong."""
    nodes = [(index, node) for index in sampled for node in range(len(trees[index]))]
    probs = torch.cat(list(sampled.values()))  # [num_nodes, vocab]
    drawn = torch.tensor([trees[index].token_ids[node] for index, node in nodes], device=probs.device)
    sums = probs.sum(dim=1, dtype=torch.float32)
    lowest = probs.amin(dim=1)
    chosen = probs.gather(1, drawn[:, None])[:, 0]
    is_sound = ((sums - 1).abs() <= PROBS_TOLERANCE) & (lowest >= 0) & (chosen > 0)  # NaN fails all
    if bool(is_sound.all()):
        return {}
    faults: dict[int, DraftFault] = {}
    for row in (~is_sound).nonzero()[:, 0].tolist():
        index, node = nodes[row]
        total, least = float(sums[row]), float(lowest[row])
        if total != total:
            fault = DraftFault("nan", f"probs of node {node} are no distribution: they hold NaN")
        elif not abs(total - 1) <= PROBS_TOLERANCE or not least >= 0:
            message = f"probs of node {node} are no distribution: sum {total:.6g}, least {least:.3g}"
            fault = DraftFault("invalid_draft", message)
        else:
            token = trees[index].token_ids[node]
            message = f"token id {token} at node {node} has probability 0 under its own draft"
            fault = DraftFault("invalid_draft", message)
        faults.setdefault(index, fault)
    return faults
