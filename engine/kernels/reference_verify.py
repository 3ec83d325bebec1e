"""Processors and acceptance rules as the papers state them, to be read and compared against.

One sequence at a time, the whole vocabulary sorted, float64, no shortcuts. `engine.processors`,
`engine.sampling` and `engine.spec.verify` must agree with these functions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from engine.grammar.state import unpacked
from engine.sampling_state import LogitsRow, SamplingState
from engine.spec.tree import ROOT, DraftTree
from engine.types import AcceptRule

Decision = tuple[tuple[int, ...], tuple[int, ...]]
"""Emitted tokens and accepted nodes of one sequence."""


def adjusted(logits: torch.Tensor, state: SamplingState, path: Sequence[int] = ()) -> torch.Tensor:
    """A row [vocab] after min_tokens, bias, penalties and grammar, `path` being the draft before it."""
    params, scores = state.params, logits.double().clone()
    output = [*state.output_token_ids, *path]
    if (mask := LogitsRow(0, state, tuple(path)).allowed()) is not None:
        scores[~torch.from_numpy(unpacked([mask], len(scores))[0])] = -math.inf
    elif state.grammar is None and len(output) < params.min_tokens:
        for token in state.eos_token_ids | set(params.stop_token_ids):
            scores[token] = -math.inf
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in {*state.prompt_token_ids, *output}:
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in Counter(output).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    return scores


def distribution(logits: torch.Tensor, state: SamplingState, path: Sequence[int] = ()) -> torch.Tensor:
    """The row's distribution [vocab] after all processors; temperature above 0."""
    params = state.params
    scores = adjusted(logits, state, path)
    scores = (scores - scores.max()) / params.temperature
    order = scores.argsort(descending=True, stable=True)  # equals: lower token ids first
    kept = scores[order].exp()
    if params.min_p > 0.0:
        kept[scores[order] < math.log(params.min_p)] = 0.0
    if params.top_k > 0:
        kept[params.top_k :] = 0.0
    if params.top_p < 1.0:
        before = (kept.cumsum(0) - kept) / kept.sum()
        before[0] = 0.0
        kept[before >= max(params.top_p, torch.finfo(torch.float64).tiny)] = 0.0
    p = torch.zeros_like(scores)
    p[order] = kept / kept.sum()
    return p


def verify_one(tree: DraftTree, logits: torch.Tensor, state: SamplingState, rule: AcceptRule) -> Decision:
    """One sequence by the given rule; `logits` [1 + len(tree), vocab], root row first."""
    if rule is AcceptRule.KEYED:
        return _keyed(tree, logits, state)
    if rule is AcceptRule.RATIO:
        return _ratio(tree, logits, state)
    return _block(tree, logits, state)


def _keyed(tree: DraftTree, logits: torch.Tensor, state: SamplingState) -> Decision:
    node = ROOT
    tokens: list[int] = []
    nodes: list[int] = []
    while True:
        y = _decide(logits[1 + node], state, tokens)
        tokens.append(y)
        child = next((i for i in _children(tree, node) if tree.token_ids[i] == y), None)
        if child is None:
            return tuple(tokens), tuple(nodes)
        node = child
        nodes.append(child)


def _decide(row: torch.Tensor, state: SamplingState, path: Sequence[int]) -> int:
    if state.params.is_greedy:
        return int(adjusted(row, state, path).argmax())
    p = distribution(row, state, path)
    noise = state.key.gumbel(state.root_position + len(path), len(p)).double()
    return int((p.log() + noise).argmax())


def _ratio(tree: DraftTree, logits: torch.Tensor, state: SamplingState) -> Decision:
    uniform = state.key.uniform(state.root_position, len(tree) + 1)
    node = ROOT
    tokens: list[int] = []
    nodes: list[int] = []
    p = distribution(logits[0], state)
    refused: list[int] = []
    pending = _children(tree, node)
    while pending:
        child = pending.pop(0)
        x = tree.token_ids[child]
        q = _draft_distribution(tree, child, len(p))
        if tree.probs is not None:  # siblings were sampled without replacement
            q[refused] = 0.0
            q = q / q.sum()
        if uniform[child] * q[x] < p[x]:
            node, refused = child, []
            tokens.append(x)
            nodes.append(child)
            p = distribution(logits[1 + node], state, tokens)
            pending = _children(tree, node)
        else:
            p = _positive_part(p - q, otherwise=p)
            refused.append(x)
    tokens.append(_draw(p, float(uniform[-1])))
    return tuple(tokens), tuple(nodes)


def _block(tree: DraftTree, logits: torch.Tensor, state: SamplingState) -> Decision:
    """Sun et al., algorithm 2, for a chain."""
    x, num = tree.token_ids, len(tree)
    p = [distribution(logits[i], state, x[:i]) for i in range(num + 1)]
    q = [_draft_distribution(tree, i, logits.shape[1]) for i in range(num)]
    uniform = state.key.uniform(state.root_position, num + 1)
    weight = [1.0]
    for i in range(num):
        weight.append(min(weight[i] * float(p[i][x[i]] / q[i][x[i]]), 1.0))
    tau = 0
    for i in range(1, num + 1):
        if i == num:
            h = weight[i]
        else:
            z = float((weight[i] * p[i] - q[i]).clamp(min=0.0).sum())
            h = z / (z + 1.0 - weight[i]) if z + 1.0 - weight[i] > 0.0 else 1.0
        if uniform[i - 1] < h:
            tau = i
    last = p[tau] if tau == num else _positive_part(weight[tau] * p[tau] - q[tau], otherwise=p[tau])
    return (*x[:tau], _draw(last, float(uniform[-1]))), tuple(range(tau))


def _children(tree: DraftTree, node: int) -> list[int]:
    return [child for child, parent in enumerate(tree.parents) if parent == node]


def _draft_distribution(tree: DraftTree, node: int, vocab_size: int) -> torch.Tensor:
    """The distribution that a node was drawn from, [vocab] float64; one-hot where it was not drawn."""
    if tree.probs is not None:
        return tree.probs[node].double().clone()
    q = torch.zeros(vocab_size, dtype=torch.float64)
    q[tree.token_ids[node]] = 1.0
    return q


def _positive_part(difference: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    rest = difference.clamp(min=0.0)
    return rest / rest.sum() if rest.sum() > 0.0 else otherwise


def _draw(p: torch.Tensor, uniform: float) -> int:
    cumulated = p.cumsum(0)
    return int((cumulated <= uniform * cumulated[-1]).sum())
