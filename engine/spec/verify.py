"""The only acceptance code: which draft tokens stand, and what token follows them.

Every rule keeps the target's distribution p exactly; q is the drafter's (sources: Leviathan et al.
2023, arXiv:2211.17192; Sun et al., arXiv:2403.10444; Miao et al., arXiv:2305.09781 for trees).

- Greedy and keyed: each row of logits decides a token y by itself (argmax, or Gumbel-max with
  noise keyed by seed and position). Walk down the tree following y; the first y that is no child
  is the recovered or bonus token. No draft is this walk over the empty tree.
- Ratio: accept a child x with min(1, p(x)/q(x)); at a refusal p becomes norm(max(p - q, 0)) and,
  for siblings (sampled without replacement), q loses x. All refused: sample what is left of p.
- Block: for chains, the whole draft is judged at once; accepts at least as much as ratio.

Greedy requests use the greedy rule; seeded requests and drafts without `probs` the keyed rule;
the rest `SamplingState.rule`. Ratio stands in for block where the tree is no chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.errors import InvalidLogits
from engine.sampling import (
    LogitsRow,
    SamplingState,
    argmax_rows,
    choose,
    probabilities,
    token_logprobs,
)
from engine.spec.tree import ROOT, DraftTree
from engine.types import AcceptRule, TokenLogprob

__all__ = ["SamplingState", "VerifyResult", "accept_rule", "verify"]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Per sequence, what was decided. `accepted_nodes` indexes the tree; the last token of
    `token_ids` is always the recovered or bonus token, so len(token_ids) == len(accepted) + 1.
    """

    token_ids: tuple[tuple[int, ...], ...]
    accepted_nodes: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]  # empty where not asked for


@dataclass(slots=True)
class _Walk:
    """One sequence on its way down its tree. `node` is where it stands, ROOT at first."""

    tree: DraftTree
    state: SamplingState
    root_row: int  # index of its root in the logits; node i has row root_row + 1 + i
    children: dict[int, list[int]]
    node: int = ROOT
    nodes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def row(self) -> LogitsRow:
        return LogitsRow(self.root_row + 1 + self.node, self.state, tuple(self.token_ids))

    def accept(self, node: int) -> None:
        self.node = node
        self.nodes.append(node)
        self.token_ids.append(self.tree.token_ids[node])

    def follow(self, token: int) -> bool:
        """Go to the child that holds `token`; without one, emit it and say that the walk is over."""
        for child in self.children.get(self.node, ()):
            if self.tree.token_ids[child] == token:
                self.accept(child)
                return True
        self.token_ids.append(token)
        return False


def accept_rule(tree: DraftTree, state: SamplingState) -> AcceptRule:
    """The rule for this draft; greedy decoding follows the keyed walk with the argmax."""
    if state.params.is_greedy or state.key.is_seeded or tree.probs is None or len(tree) == 0:
        return AcceptRule.KEYED
    if state.rule is AcceptRule.BLOCK and not tree.is_chain:
        return AcceptRule.RATIO
    return state.rule


def verify(
    trees: Sequence[DraftTree], target_logits: torch.Tensor, sampling: Sequence[SamplingState]
) -> VerifyResult:
    """Decide which draft tokens stand.

    `target_logits`: [sum(1 + len(tree)), vocab] float32; for each sequence its root row (the
    distribution after the last committed token), then one row per node in tree order.

    Raises `InvalidLogits` naming the sequence if its logits hold NaN or leave no token.
    """
    walks = _start(trees, sampling)
    expected = sum(1 + len(tree) for tree in trees)
    if len(target_logits) != expected:
        raise ValueError(
            f"verify needs {expected} rows of logits, a root and nodes each, not {len(target_logits)}"
        )
    by_rule: dict[AcceptRule, list[_Walk]] = {rule: [] for rule in AcceptRule}
    for walk in walks:
        by_rule[accept_rule(walk.tree, walk.state)].append(walk)
    try:
        _follow_choices(by_rule[AcceptRule.KEYED], target_logits)
        for walk in by_rule[AcceptRule.RATIO]:
            _verify_ratio(walk, target_logits)
        for walk in by_rule[AcceptRule.BLOCK]:
            _verify_block(walk, target_logits)
    except InvalidLogits as fault:
        raise InvalidLogits(str(fault), _culprit(walks, target_logits)) from fault
    return VerifyResult(
        token_ids=tuple(tuple(walk.token_ids) for walk in walks),
        accepted_nodes=tuple(tuple(walk.nodes) for walk in walks),
        logprobs=_logprobs(walks, target_logits),
    )


def _start(trees: Sequence[DraftTree], sampling: Sequence[SamplingState]) -> list[_Walk]:
    walks: list[_Walk] = []
    root_row = 0
    for tree, state in zip(trees, sampling, strict=True):
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        walks.append(_Walk(tree, state, root_row, children))
        root_row += 1 + len(tree)
    return walks


def _culprit(walks: Sequence[_Walk], logits: torch.Tensor) -> int | None:
    """The first sequence whose rows allow no choice."""
    for index, walk in enumerate(walks):
        rows = logits[walk.root_row : walk.root_row + 1 + len(walk.tree)]
        try:
            argmax_rows(rows)
            choose(logits, [walk.row])
        except InvalidLogits:
            return index
    return None


# --- greedy and keyed -------------------------------------------------------------------------


def _follow_choices(walks: Sequence[_Walk], logits: torch.Tensor) -> None:
    """Walk all sequences down together, one depth a round.

    Plain greedy rows are decided at once by one argmax over all of them. The others are decided as
    they are reached, so that rows behind a refusal cost nothing; on an accelerator too, where
    their number a round is the batch.
    """
    plain = [walk for walk in walks if walk.state.params.is_greedy and not _is_ever_adjusted(walk)]
    _follow_argmax(plain, logits)
    live = [walk for walk in walks if not walk.token_ids]
    while live:
        tokens = choose(logits, [walk.row for walk in live])
        live = [walk for walk, token in zip(live, tokens, strict=True) if walk.follow(token)]


def _is_ever_adjusted(walk: _Walk) -> bool:
    return walk.row.is_adjusted  # the root: min_tokens only loosens further down the tree


def _follow_argmax(walks: Sequence[_Walk], logits: torch.Tensor) -> None:
    if not walks:
        return
    spans = [(walk.root_row, walk.root_row + 1 + len(walk.tree)) for walk in walks]
    num_rows = sum(end - start for start, end in spans)
    if num_rows == len(logits):
        best = argmax_rows(logits)
    else:
        indices = [row for start, end in spans for row in range(start, end)]
        best = argmax_rows(logits[torch.tensor(indices, device=logits.device)])
    start = 0
    for walk in walks:
        while walk.follow(best[start + 1 + walk.node]):
            pass
        start += 1 + len(walk.tree)


# --- ratio and block --------------------------------------------------------------------------


def _verify_ratio(walk: _Walk, logits: torch.Tensor) -> None:
    """Token-wise rejection sampling down the tree (theory: Leviathan et al.; SpecInfer for siblings)."""
    q_rows = _draft_probs(walk, logits.device)
    uniform = _uniforms(walk)
    accepted = True
    while accepted:
        accepted = False
        p = probabilities(logits, [walk.row])[0]
        drawn: list[int] = []  # tokens of siblings already refused
        for child in walk.children.get(walk.node, ()):
            token = walk.tree.token_ids[child]
            q = _without(q_rows[child], drawn)
            if uniform[child] * float(q[token]) < float(p[token]):
                walk.accept(child)
                accepted = True
                break
            p = _residual(p, q)
            drawn.append(token)
    walk.token_ids.append(_draw(p, uniform[-1]))


def _verify_block(walk: _Walk, logits: torch.Tensor) -> None:
    """Block verification of a chain (Sun et al., arXiv:2403.10444, algorithm 2)."""
    tokens, q = walk.tree.token_ids, _draft_probs(walk, logits.device)
    rows = [LogitsRow(walk.root_row + i, walk.state, tokens[:i]) for i in range(len(tokens) + 1)]
    p = probabilities(logits, rows)
    uniform = _uniforms(walk)
    weights = [1.0]  # p_i of the paper: how much of the target's mass the prefix still carries
    for i, token in enumerate(tokens):
        ratio = float(p[i, token]) / max(float(q[i, token]), torch.finfo(torch.float32).tiny)
        weights.append(min(weights[-1] * ratio, 1.0))
    num_accepted = 0
    for i in range(1, len(tokens) + 1):
        if i == len(tokens):
            chance = weights[i]
        else:
            excess = float((weights[i] * p[i] - q[i]).clamp_(min=0.0).sum())
            lack = excess + 1.0 - weights[i]
            chance = excess / lack if lack > 0.0 else 1.0
        if uniform[i - 1] < chance:
            num_accepted = i
    for node in range(num_accepted):
        walk.accept(node)
    last = p[num_accepted]
    if num_accepted < len(tokens):
        last = _residual(weights[num_accepted] * last, q[num_accepted])
    walk.token_ids.append(_draw(last, uniform[-1]))


def _draft_probs(walk: _Walk, device: torch.device) -> torch.Tensor:
    assert walk.tree.probs is not None  # one-hot drafts are keyed
    return walk.tree.probs.to(device=device, dtype=torch.float32)


def _uniforms(walk: _Walk) -> list[float]:
    """One number for each node and one for the last token. Keyed by the root's position, which no
    two steps share, so every step's numbers are fresh."""
    numbers: list[float] = walk.state.key.uniform(walk.state.root_position, len(walk.tree) + 1).tolist()
    return numbers


def _without(q: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    """q given that none of `token_ids` was drawn."""
    if not token_ids:
        return q
    q = q.clone()
    q[token_ids] = 0.0
    return q / q.sum().clamp_min(torch.finfo(torch.float32).tiny)


def _residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """norm(max(p - q, 0)). Where rounding leaves nothing p and q are equal, and p stands."""
    rest = (p - q).clamp_(min=0.0)
    mass = rest.sum()
    return rest / mass if float(mass) > 0.0 else p


def _draw(p: torch.Tensor, uniform: float) -> int:
    """Sample by inverting the cumulated distribution; never a token of probability 0."""
    cumulated = p.double().cumsum(0)
    target = uniform * cumulated[-1]
    return int(torch.searchsorted(cumulated, target[None], right=True)[0])


# --- logprobs ---------------------------------------------------------------------------------


def _logprobs(walks: Sequence[_Walk], logits: torch.Tensor) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Raw log-probabilities of the emitted tokens of the sequences that asked for them."""
    rows: list[int] = []
    token_ids: list[int] = []
    num_top: list[int] = []
    for walk in walks:
        wanted = walk.state.params.num_logprobs
        if wanted is None:
            continue
        rows += [walk.root_row + 1 + node for node in (ROOT, *walk.nodes)]
        token_ids += walk.token_ids
        num_top += [wanted] * len(walk.token_ids)
    if not rows:
        return ((),) * len(walks)
    found = iter(token_logprobs(logits[torch.tensor(rows, device=logits.device)], token_ids, num_top))
    return tuple(
        tuple(next(found) for _ in walk.token_ids) if walk.state.params.num_logprobs is not None else ()
        for walk in walks
    )
