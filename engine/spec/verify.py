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
from dataclasses import dataclass

import torch

from engine.errors import InvalidLogits
from engine.kernels import fused_verify
from engine.sampling import SamplingState, argmax_rows, choose, token_logprobs
from engine.spec.rejection import verify_block, verify_ratio
from engine.spec.tree import ROOT, DraftTree
from engine.spec.walk import Walk, start_walks
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


def accept_rule(tree: DraftTree, state: SamplingState) -> AcceptRule:
    """The rule for this draft; greedy decoding follows the keyed walk with the argmax."""
    if state.params.is_greedy or state.key.is_seeded or tree.probs is None or len(tree) == 0:
        return AcceptRule.KEYED
    if state.rule is AcceptRule.BLOCK and not tree.is_chain:
        return AcceptRule.RATIO
    return state.rule


@torch.inference_mode()
def verify(
    trees: Sequence[DraftTree], target_logits: torch.Tensor, sampling: Sequence[SamplingState]
) -> VerifyResult:
    """Decide which draft tokens stand.

    `target_logits`: [sum(1 + len(tree)), vocab] float32; for each sequence its root row (the
    distribution after the last committed token), then one row per node in tree order.

    Raises `InvalidLogits` naming the sequence if its logits hold NaN or leave no token.
    """
    walks = start_walks(trees, sampling)
    expected = sum(1 + len(tree) for tree in trees)
    if len(target_logits) != expected:
        raise ValueError(
            f"verify needs {expected} rows of logits, a root and nodes each, not {len(target_logits)}"
        )
    by_rule: dict[AcceptRule, list[Walk]] = {rule: [] for rule in AcceptRule}
    for walk in _decide_on_device(walks, target_logits):
        by_rule[accept_rule(walk.tree, walk.state)].append(walk)
    try:
        _follow_choices(by_rule[AcceptRule.KEYED], target_logits)
        verify_ratio(by_rule[AcceptRule.RATIO], target_logits)
        verify_block(by_rule[AcceptRule.BLOCK], target_logits)
    except InvalidLogits as fault:
        raise InvalidLogits(str(fault), _culprit(walks, target_logits)) from fault
    return VerifyResult(
        token_ids=tuple(tuple(walk.token_ids) for walk in walks),
        accepted_nodes=tuple(tuple(walk.nodes) for walk in walks),
        logprobs=_logprobs(walks, target_logits),
    )


def _decide_on_device(walks: list[Walk], logits: torch.Tensor) -> list[Walk]:
    """Let the device's fused kernels decide what they can; the walks that are left for torch."""
    decide = fused_verify(logits.device)
    if decide is None or logits.dtype != torch.float32:
        return walks
    fit = [walk for walk in walks if walk.state.grammar is None]  # masks of grammars are made on the host
    if len(fit) < len(walks):
        rows = [row for walk in fit for row in range(walk.root_row, walk.root_row + 1 + len(walk.tree))]
        logits = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
    try:
        decide(fit, [accept_rule(walk.tree, walk.state) for walk in fit], logits)
    except InvalidLogits as fault:
        index = fault.sequence_index
        culprit = None if index is None else next(i for i, walk in enumerate(walks) if walk is fit[index])
        raise InvalidLogits(str(fault), culprit) from fault
    return [walk for walk in walks if walk.state.grammar is not None]


def _culprit(walks: Sequence[Walk], logits: torch.Tensor) -> int | None:
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


def _follow_choices(walks: Sequence[Walk], logits: torch.Tensor) -> None:
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


def _is_ever_adjusted(walk: Walk) -> bool:
    return walk.row.is_adjusted  # the root: min_tokens only loosens further down the tree


def _follow_argmax(walks: Sequence[Walk], logits: torch.Tensor) -> None:
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


# --- logprobs ---------------------------------------------------------------------------------


def _logprobs(walks: Sequence[Walk], logits: torch.Tensor) -> tuple[tuple[TokenLogprob, ...], ...]:
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
