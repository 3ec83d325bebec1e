"""The only acceptance code. (Seam; see docs in theory order: greedy, keyed, ratio, block, tree.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.spec.randomness import RandomKey
from engine.spec.tree import DraftTree
from engine.types import AcceptRule, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class SamplingState:
    """What the processors need to know about one sequence at the root of its draft.

    `output_token_ids` are those before the draft; the draft's own tokens are added along each
    path, so that penalties and min_tokens advance per token.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    eos_token_ids: frozenset[int]
    key: RandomKey
    rule: AcceptRule


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Per sequence, what was decided. `accepted_nodes` indexes the tree; the last token of
    `token_ids` is always the recovered or bonus token, so len(token_ids) == len(accepted) + 1.
    """

    token_ids: tuple[tuple[int, ...], ...]
    accepted_nodes: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]  # empty where not asked for


def verify(
    trees: Sequence[DraftTree], target_logits: torch.Tensor, sampling: Sequence[SamplingState]
) -> VerifyResult:
    """Decide which draft tokens stand.

    `target_logits`: [sum(1 + len(tree)), vocab] float32; for each sequence its root row (the
    distribution after the last committed token), then one row per node in tree order.
    """
    raise NotImplementedError
