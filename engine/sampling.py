"""From a row of target logits to a token: the argmax or keyed Gumbel-max, and logprobs.

Sampling is a function of the row, the seed and the position alone. Greedy and sampled ties go to
the lower token id. What happens to the logits before is in `engine.processors`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels import choose_rows, has_choose_rows
from engine.processors import (
    adjusted_rows,
    changed_scores,
    filtered,
    filtered_rows,
    prefers_whole_rows,
    raise_unless_finite,
    scaled_rows,
)
from engine.sampling_state import LogitsRow, SamplingState, has_filters
from engine.spec.randomness import counter_rows, gumbel_of, gumbel_rows
from engine.types import TokenLogprob

__all__ = ["LogitsRow", "SamplingState", "argmax_rows", "choose", "token_logprobs"]


def argmax_rows(logits: torch.Tensor) -> list[int]:
    """The best token of every row, lowest id on a tie. One pass over [num_rows, vocab] logits."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        best = torch.from_numpy(logits.numpy().argmax(axis=1))  # many times faster than torch's
    else:
        best = logits.argmax(dim=1)
    # A NaN counts as the maximum in both libraries, so the best value tells of any.
    chosen = logits.gather(1, best[:, None])[:, 0]
    raise_unless_finite(chosen)
    return [int(token) for token in best.tolist()]


def choose(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> list[int]:
    """The token each row decides by itself.

    It is the same with and without drafts. Raises `InvalidLogits` for rows that hold NaN or leave
    no token.
    """
    tokens = [0] * len(rows)
    left = list(range(len(rows)))
    if has_choose_rows(logits):
        fit = [i for i in left if rows[i].state.grammar is None]  # masks of grammars are torch's matter
        left = [i for i in left if rows[i].state.grammar is not None]
        for i, token in zip(fit, _choose_by_kernel(logits, [rows[i] for i in fit]), strict=True):
            tokens[i] = token
    for is_greedy, decide in ((True, _decide_greedily), (False, _sample)):
        picked = [i for i in left if rows[i].state.params.is_greedy == is_greedy]
        if picked:
            for i, token in zip(picked, decide(logits, [rows[i] for i in picked]), strict=True):
                tokens[i] = token
    return tokens


def _choose_by_kernel(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> list[int]:
    if not rows:
        return []
    counters = counter_rows([row.state.key for row in rows], [row.position for row in rows])
    return choose_rows(logits, rows, counters, [changed_scores(logits, row) for row in rows])


def _decide_greedily(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> list[int]:
    return argmax_rows(adjusted_rows(logits, rows))


def _sample(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> list[int]:
    """Gumbel-max, over what the filters leave where there are any."""
    scores = scaled_rows(logits, rows)
    parts = [i for i, row in enumerate(rows) if has_filters(row.state.params)]
    if parts and prefers_whole_rows(scores):
        scores = filtered_rows(scores, [row.state.params for row in rows])
        parts = []
    whole = [i for i in range(len(rows)) if i not in parts]
    tokens = [0] * len(rows)
    if whole:
        keys, positions = [rows[i].state.key for i in whole], [rows[i].position for i in whole]
        noise = gumbel_rows(keys, positions, scores.shape[1], scores.device)
        noise += scores if not parts else scores[torch.tensor(whole, device=scores.device)]
        for i, token in zip(whole, argmax_rows(noise), strict=True):
            tokens[i] = token
    if parts:
        left = [filtered(scores[i], rows[i].state.params) for i in parts]
        keys, positions = [rows[i].state.key for i in parts], [rows[i].position for i in parts]
        noises = gumbel_of(keys, positions, [token_ids for token_ids, _ in left])
        for i, (token_ids, part), part_noise in zip(parts, left, noises, strict=True):
            tokens[i] = int(token_ids[(part + part_noise).argmax()])
    return tokens


# --- logprobs ---------------------------------------------------------------------------------


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Log-probabilities of `token_ids[i]` under the raw row i, with its `num_top[i]` best tokens.

    `logits` is [num_rows, vocab]. Raw means before every processor, as for the OpenAI API. More
    than the vocabulary holds is the whole vocabulary.
    """
    if not token_ids:
        return []
    logprobs = logits.float().log_softmax(dim=1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(min(max(1, *num_top), logprobs.shape[1]), dim=1)
    values, ids = best.values.tolist(), best.indices.tolist()
    return [
        TokenLogprob(token, chosen[i], tuple(zip(ids[i][:count], values[i][:count], strict=True)))
        for i, (token, count) in enumerate(zip(token_ids, num_top, strict=True))
    ]
