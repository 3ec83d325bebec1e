"""From raw logits to scores: min_tokens, bias, penalties, grammar, temperature, min_p, top_k, top_p.

They run in this order, which `SamplingParams` states. Choices where the literature leaves room:

- The repetition penalty counts prompt and output tokens; frequency and presence count output
  tokens only. Draft tokens on the path to a row count as output, one by one.
- `min_p` keeps tokens with at least `min_p` times the largest probability.
- `top_k` keeps exactly k tokens; of equals at the threshold the lower token ids.
- `top_p` keeps the smallest set whose mass reaches `top_p` of what min_p and top_k left, the
  token that crosses included; of equals the lower token ids go first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.errors import InvalidLogits
from engine.grammar.state import PackedMask, unpacked
from engine.sampling_state import LogitsRow, has_filters, has_penalties
from engine.types import SamplingParams

_FIRST_NUCLEUS_WINDOW = 8.0
"""Nats below the best token within which the nucleus is sought first; widened when too small."""

_SMALL_VOCABULARY = 1024
"""Up to this size sorting all rows at once beats looking for the few tokens of each."""


def adjusted_rows(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
    """The rows after min_tokens, bias, penalties and grammar, a copy: [num_rows, vocab]."""
    vocab_size = logits.shape[1]
    scores = logits[torch.tensor([row.index for row in rows], device=logits.device)]
    if not any(row.is_adjusted for row in rows):
        return scores
    flat = scores.view(-1)
    masked: list[int] = []
    biased: dict[int, float] = {}
    for start, row in zip(range(0, len(flat), vocab_size), rows, strict=True):
        params = row.state.params
        if row.state.grammar is None:  # else the grammar's mask sees to it
            masked += [start + token for token in row.unwanted_ends if 0 <= token < vocab_size]
        for token, bias in params.logit_bias.items():
            biased[start + token] = bias
    if masked:
        flat[torch.tensor(masked, device=flat.device)] = -math.inf
    if biased:
        at = torch.tensor(list(biased), device=flat.device)
        flat[at] += torch.tensor(list(biased.values()), dtype=flat.dtype, device=flat.device)
    _penalise(flat, vocab_size, rows)
    _hold_to_grammars(scores, rows)
    return scores


def _hold_to_grammars(scores: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
    """What the rows' grammars forbid goes to -inf, in place on [num_rows, vocab]."""
    masks: dict[int, PackedMask] = {}
    for index, row in enumerate(rows):
        if (mask := row.allowed()) is not None:
            masks[index] = mask
    if not masks:
        return
    allowed = torch.from_numpy(unpacked(list(masks.values()), scores.shape[1])).to(scores.device)
    if len(masks) == len(rows):
        scores.masked_fill_(~allowed, -math.inf)
    else:
        at = torch.tensor(list(masks), device=scores.device)
        scores[at] = scores[at].masked_fill_(~allowed, -math.inf)


def _penalise(flat: torch.Tensor, vocab_size: int, rows: Sequence[LogitsRow]) -> None:
    """Apply the three penalties of all rows at once, in place on [num_rows * vocab]."""
    places: list[np.ndarray] = []
    factors: list[np.ndarray] = []
    losses: list[np.ndarray] = []
    for start, row in zip(range(0, len(flat), vocab_size), rows, strict=True):
        params = row.state.params
        if has_penalties(params):
            token_ids, counts = row.state.history.with_path(row.path)
            places.append(token_ids + start)
            factors.append(np.full(len(counts), params.repetition_penalty))
            losses.append(params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
    if not places:
        return
    at = torch.from_numpy(np.concatenate(places)).to(flat.device)
    factor = torch.from_numpy(np.concatenate(factors)).to(flat)
    known = flat[at]
    known = torch.where(known > 0, known / factor, known * factor)
    flat[at] = known - torch.from_numpy(np.concatenate(losses)).to(flat)


def changed_scores(logits: torch.Tensor, row: LogitsRow) -> tuple[np.ndarray, np.ndarray] | None:
    """The tokens that min_tokens, a bias or penalties touch, and their scores: ascending ids int64, float32.

    As `adjusted_rows` without copying the row, on the CPU; a grammar is left out. None: nothing is touched.
    """
    if not row.is_adjusted:
        return None
    params = row.state.params
    logits_of_row = logits[row.index].numpy()
    if row.unwanted_ends or params.logit_bias:
        masked = [
            token for token in row.unwanted_ends if 0 <= token < logits.shape[1]
        ]  # a file may name others
        biased = list(params.logit_bias)
        known, counts = row.state.history.with_path(row.path) if has_penalties(params) else (None, None)
        touched = [np.array(masked + biased, dtype=np.int64), *([] if known is None else [known])]
        token_ids = np.unique(np.concatenate(touched))
        scores: np.ndarray = logits_of_row[token_ids]
        scores[np.searchsorted(token_ids, masked)] = -math.inf
        scores[np.searchsorted(token_ids, biased)] += np.array(
            [*params.logit_bias.values()], dtype=np.float32
        )
        if known is None or counts is None:
            return token_ids, scores
        at = np.searchsorted(token_ids, known)
        scores[at] = _penalised(scores[at], counts, params)
        return token_ids, scores
    known, counts = row.state.history.with_path(row.path)
    order = known.argsort()
    known, counts = known[order], counts[order]
    return known, _penalised(logits_of_row[known], counts, params)


def _penalised(scores: np.ndarray, counts: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Scores of known tokens, said `counts` times, after the three penalties; float32."""
    factor = np.float32(params.repetition_penalty)
    scores = np.where(scores > 0, scores / factor, scores * factor)
    if params.frequency_penalty == 0.0 and params.presence_penalty == 0.0:
        return scores
    losses = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    return scores - losses.astype(np.float32)


def scaled_rows(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
    """Adjusted rows over the temperature, the best of each at 0 (so that no temperature
    overflows): [num_rows, vocab], a copy."""
    scores = adjusted_rows(logits, rows)
    best = scores.amax(dim=1, keepdim=True)
    raise_unless_finite(best[:, 0])
    temperatures = torch.tensor([row.state.params.temperature for row in rows], device=scores.device)
    return scores.sub_(best).div_(temperatures[:, None])


def prefers_whole_rows(scores: torch.Tensor) -> bool:
    """True where `filtered_rows` is the faster of the two ways to filter."""
    return scores.device.type != "cpu" or scores.shape[1] <= _SMALL_VOCABULARY


def filtered_rows(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Scaled scores with everything that min_p, top_k and top_p leave out at -inf: [num_rows, vocab].

    All rows at once, by sorting the vocabulary.
    """

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=scores.device)[:, None]

    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    keep = ordered >= column([math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]).to(scores)
    keep &= rank < column([p.top_k if p.top_k > 0 else math.inf for p in params])
    top_p = column([p.top_p for p in params])
    mass = ordered.double().exp() * keep
    before = mass.cumsum(dim=1) - mass
    keep &= (before < top_p * mass.sum(dim=1, keepdim=True)) | (top_p >= 1.0) | (rank == 0)
    return scores.masked_fill(~torch.zeros_like(keep).scatter_(1, order, keep), -math.inf)


def filtered(scores: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """What min_p, top_k and top_p leave of one row of scaled scores [vocab]: (token ids, scores),
    best first.

    As `filtered_rows`, but only the tokens that can survive are sorted, not the vocabulary.
    """
    vocab_size = scores.shape[-1]
    total: torch.Tensor | None = None  # mass that top_p refers to; None: that of the tokens left
    floor = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    if 0 < params.top_k < vocab_size:
        floor = max(floor, scores.topk(params.top_k).values[-1].item())
    elif params.min_p <= 0.0 and params.top_p < 1.0:
        total = scores.double().exp().sum()
        floor = _nucleus_floor(scores, params.top_p, total)
    token_ids = (scores >= floor).nonzero()[:, 0]
    left, order = scores[token_ids].sort(descending=True, stable=True)
    token_ids = token_ids[order]
    if params.top_k > 0:
        token_ids, left = token_ids[: params.top_k], left[: params.top_k]
    if params.top_p < 1.0:
        mass = left.double().exp()
        before = mass.cumsum(0) - mass
        num_kept = max(1, int((before < params.top_p * (mass.sum() if total is None else total)).sum()))
        token_ids, left = token_ids[:num_kept], left[:num_kept]
    return token_ids, left


def _nucleus_floor(scores: torch.Tensor, top_p: float, total: torch.Tensor) -> float:
    """A score such that the tokens at or above it hold at least `top_p` of the mass."""
    window = _FIRST_NUCLEUS_WINDOW
    lowest = -scores.min().item()
    while window < lowest:
        mass = scores[scores >= -window].double().exp().sum()
        if mass >= top_p * total:
            return -window
        window *= 2.0
    return -math.inf


def probabilities(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
    """The target's distribution at each row, after all processors: [num_rows, vocab] float32."""
    scores = scaled_rows(logits, rows)
    params = [row.state.params for row in rows]
    if not any(map(has_filters, params)):
        return scores.softmax(dim=1)
    if prefers_whole_rows(scores):
        return filtered_rows(scores, params).softmax(dim=1)
    for own, out in zip(params, scores, strict=True):
        if has_filters(own):
            token_ids, left = filtered(out, own)
            out.zero_()[token_ids] = left.softmax(0)
        else:
            torch.softmax(out, 0, out=out)
    return scores


def raise_unless_finite(best: torch.Tensor) -> None:
    """`best` holds the largest score of each row; NaN wins every maximum."""
    if not bool(best.isfinite().all()):
        raise InvalidLogits(
            "the target's logits hold NaN or infinity, or every token is masked; "
            "check the model's weights and dtype, and the request's logit_bias"
        )
