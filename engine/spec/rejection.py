"""The two rules that weigh a sampled draft by p/q: ratio (chains and trees) and block (chains).

Each works on all its sequences at once; only small integers are touched one by one. All
probabilities are after every processor; p is the target's, q the drafter's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from engine.processors import probabilities
from engine.sampling_state import LogitsRow
from engine.spec.walk import Walk

_TINY = torch.finfo(torch.float32).tiny


def verify_ratio(walks: Sequence[Walk], logits: torch.Tensor) -> None:
    """Rejection sampling, token by token (Leviathan et al. 2023, arXiv:2211.17192; for siblings
    Miao et al., arXiv:2305.09781).

    A child x stands with probability min(1, p(x)/q(x)). At a refusal p becomes
    norm(max(p - q, 0)), which the next sibling is tried on, its q without the tokens refused;
    when none is left the token is drawn from p.
    """
    if not walks:
        return
    q_rows = _draft_probs(walks, logits.device)  # [num_nodes, vocab]
    first_node = _offsets(len(walk.tree) for walk in walks)
    uniforms = [_uniforms(walk) for walk in walks]
    refused: list[list[int]] = [[] for _ in walks]  # tokens of siblings already refused
    live = list(range(len(walks)))
    p = probabilities(logits, [walk.row for walk in walks])  # [num_live, vocab]
    while live:
        is_over = [not walks[i].pending for i in live]
        ended = [i for i, over in zip(live, is_over, strict=True) if over]
        _emit(walks, ended, uniforms, p[torch.tensor(is_over, device=p.device)])
        p = p[torch.tensor([not over for over in is_over], device=p.device)]
        live = [i for i, over in zip(live, is_over, strict=True) if not over]
        if not live:
            return
        tried = [walks[i].pending.pop(0) for i in live]
        q = q_rows[[first_node[i] + node for i, node in zip(live, tried, strict=True)]]
        for row, i in enumerate(live):
            if refused[i]:
                q[row, refused[i]] = 0.0
                q[row] /= q[row].sum().clamp_min(_TINY)
        token_ids = [walks[i].tree.token_ids[node] for i, node in zip(live, tried, strict=True)]
        p_token, q_token = _at(p, token_ids), _at(q, token_ids)
        stays = [
            uniforms[i][node] * q_x < p_x
            for i, node, p_x, q_x in zip(live, tried, p_token, q_token, strict=True)
        ]
        for i, node, token, stands in zip(live, tried, token_ids, stays, strict=True):
            if stands:
                walks[i].accept(node)
                refused[i] = []
            else:
                refused[i].append(token)
        _replace_rows(p, q, logits, [walks[i] for i in live], stays)


def _replace_rows(
    p: torch.Tensor, q: torch.Tensor, logits: torch.Tensor, walks: Sequence[Walk], stays: Sequence[bool]
) -> None:
    """After a round: the next row's p where a child stood, the residual where it was refused."""
    moved = [row for row, stands in enumerate(stays) if stands]
    stuck = [row for row, stands in enumerate(stays) if not stands]
    if moved:
        p[moved] = probabilities(logits, [walks[row].row for row in moved])
    if stuck:
        p[stuck] = _residual(p[stuck], q[stuck])


def verify_block(walks: Sequence[Walk], logits: torch.Tensor) -> None:
    """Block verification of chains (Sun et al., arXiv:2403.10444, algorithm 2).

    weight_i = min(weight_{i-1} * p(x_i)/q(x_i), 1) is how much of the target's mass the first i
    tokens carry; the largest i with u_i < h_i stands, where h_i sets what the rest of the chain
    may still add.
    """
    if not walks:
        return
    rows = [
        LogitsRow(walk.root_row + i, walk.state, walk.tree.token_ids[:i])
        for walk in walks
        for i in range(len(walk.tree) + 1)
    ]
    p = probabilities(logits, rows)  # [sum(num_nodes + 1), vocab]
    q = _draft_probs(walks, logits.device)  # [sum(num_nodes), vocab]
    first_p = _offsets(len(walk.tree) + 1 for walk in walks)
    before = [first + i for walk, first in zip(walks, first_p, strict=True) for i in range(len(walk.tree))]
    p_before = p[before]  # [sum(num_nodes), vocab]: node i's row, like q's
    token_ids = [token for walk in walks for token in walk.tree.token_ids]
    p_token, q_token = _at(p_before, token_ids), _at(q, token_ids)
    weights: list[float] = []  # of the chain before each node
    ends: list[float] = []  # of each whole chain
    node = 0
    for walk in walks:
        weight = 1.0
        for _ in walk.tree.token_ids:
            weights.append(weight)
            weight = min(weight * p_token[node] / max(q_token[node], _TINY), 1.0)
            node += 1
        ends.append(weight)
    rest = _positive_part(p_before * torch.tensor(weights, device=p.device)[:, None] - q)
    masses = rest.sum(dim=1).tolist()
    uniforms = [_uniforms(walk) for walk in walks]
    last = torch.empty((len(walks), p.shape[1]), device=p.device)
    first_node = _offsets(len(walk.tree) for walk in walks)
    for i, walk in enumerate(walks):
        nodes = range(first_node[i], first_node[i] + len(walk.tree))
        chances = [_chance(weights[node], masses[node]) for node in nodes[1:]] + [ends[i]]
        num_accepted = max((n for n, h in enumerate(chances, start=1) if uniforms[i][n - 1] < h), default=0)
        for node in range(num_accepted):
            walk.accept(node)
        at = first_node[i] + num_accepted
        is_residual = num_accepted < len(walk.tree) and masses[at] > 0.0
        last[i] = rest[at] if is_residual else p[first_p[i] + num_accepted]
    _emit(walks, range(len(walks)), uniforms, last)


def _chance(weight: float, mass: float) -> float:
    """h_i of block verification, with 0/0 = 1."""
    total = mass + 1.0 - weight
    return mass / total if total > 0.0 else 1.0


def _emit(
    walks: Sequence[Walk], ended: Sequence[int], uniforms: Sequence[Sequence[float]], p: torch.Tensor
) -> None:
    """Draw the last token of the given walks from the rows of p (not necessarily normalised)."""
    if not ended:
        return
    cumulated = p.double().cumsum(dim=1)
    numbers = torch.tensor([[uniforms[i][-1]] for i in ended], dtype=torch.float64, device=p.device)
    # right=True: the first token whose cumulated mass exceeds the number, never one of mass 0.
    drawn = torch.searchsorted(cumulated, numbers * cumulated[:, -1:], right=True)
    for i, token in zip(ended, drawn[:, 0].tolist(), strict=True):
        walks[i].token_ids.append(int(token))


def _draft_probs(walks: Sequence[Walk], device: torch.device) -> torch.Tensor:
    """All drafts' distributions under each other, [sum(num_nodes), vocab] float32."""
    probs = [walk.tree.probs for walk in walks]
    return torch.cat([rows.to(device, torch.float32) for rows in probs if rows is not None])


def _uniforms(walk: Walk) -> list[float]:
    """One number for each node and one for the last token. Keyed by the root's position, which no
    two steps share, so every step's numbers are fresh."""
    numbers: list[float] = walk.state.key.uniform(walk.state.root_position, len(walk.tree) + 1).tolist()
    return numbers


def _offsets(lengths: Iterable[int]) -> list[int]:
    """Where each of the given pieces starts when they lie one behind the other."""
    return [0, *accumulate(lengths)][:-1]


def _at(rows: torch.Tensor, token_ids: Sequence[int]) -> list[float]:
    """`rows[i, token_ids[i]]` for every i."""
    picked = rows.gather(1, torch.tensor(token_ids, device=rows.device)[:, None])
    numbers: list[float] = picked[:, 0].tolist()
    return numbers


def _positive_part(difference: torch.Tensor) -> torch.Tensor:
    return difference.clamp_(min=0.0)


def _residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """norm(max(p - q, 0)) by row. Where rounding leaves nothing p and q are equal, and p stands."""
    rest = _positive_part(p - q)
    mass = rest.sum(dim=1, keepdim=True)
    return torch.where(mass > 0.0, rest / mass.clamp_min(_TINY), p)
