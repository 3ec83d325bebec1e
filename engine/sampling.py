"""From a row of target logits to a token: processors, noise, logprobs.

The processors run in the order that `SamplingParams` states: min_tokens mask (end-of-sequence and
stop tokens), logit_bias, repetition / frequency / presence penalties, temperature, min_p, top_k,
top_p. Choices where the literature leaves room:

- The repetition penalty counts prompt and output tokens; frequency and presence count output
  tokens only. Draft tokens on the path to a row count as output, one by one.
- `min_p` keeps tokens with at least `min_p` times the largest probability.
- `top_k` keeps exactly k tokens; of equals at the threshold the lower token ids.
- `top_p` keeps the smallest set whose mass reaches `top_p` of what min_p and top_k left, the
  token that crosses included; of equals the lower token ids go first.
- Sampling is Gumbel-max with the sequence's keyed noise, so that it is a function of the row, the
  seed and the position alone. Greedy and sampled ties go to the lower token id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.errors import InvalidLogits
from engine.history import TokenHistory
from engine.spec.randomness import RandomKey, gumbel_of, gumbel_rows
from engine.types import AcceptRule, SamplingParams, TokenLogprob

_FIRST_NUCLEUS_WINDOW = 8.0
"""Nats below the best token within which the nucleus is sought first; widened when too small."""


@dataclass(frozen=True, slots=True)
class SamplingState:
    """What the processors need to know about one sequence at the root of its draft.

    `output_token_ids` are those before the draft; the draft's own tokens are added along each
    path, so that penalties and min_tokens advance per token. The lists may grow behind this
    object's back, but never change what they once held.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    eos_token_ids: frozenset[int]
    key: RandomKey
    rule: AcceptRule
    _histories: list[TokenHistory] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def history(self) -> TokenHistory:
        """The tokens so far, counted; made when a penalty first asks for it."""
        if not self._histories:
            self._histories.append(TokenHistory(self.prompt_token_ids))
        self._histories[0].update(self.output_token_ids)
        return self._histories[0]

    @property
    def root_position(self) -> int:
        """Index in the sequence of the first token to be decided."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """One row of the target's logits: whose it is, and the draft tokens between root and row."""

    index: int
    state: SamplingState
    path: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Index in the sequence of the token that this row decides."""
        return self.state.root_position + len(self.path)

    @property
    def is_adjusted(self) -> bool:
        """True when min_tokens, a bias or a penalty changes this row."""
        params = self.state.params
        return bool(params.logit_bias) or self.is_below_min_tokens or has_penalties(params)

    @property
    def is_below_min_tokens(self) -> bool:
        """True while the sequence must not end at this row."""
        return len(self.state.output_token_ids) + len(self.path) < self.state.params.min_tokens


def has_penalties(params: SamplingParams) -> bool:
    """True when earlier tokens change the scores."""
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


def has_filters(params: SamplingParams) -> bool:
    """True when min_p, top_k or top_p may leave out tokens."""
    return params.min_p > 0.0 or params.top_k > 0 or params.top_p < 1.0


# --- processors -------------------------------------------------------------------------------


def adjusted_logits(logits: torch.Tensor, row: LogitsRow) -> torch.Tensor:
    """The row after min_tokens, bias and penalties: [vocab]. A view if nothing changes it."""
    scores = logits[row.index]
    if not row.is_adjusted:
        return scores
    scores = scores.clone()
    params = row.state.params
    if row.is_below_min_tokens:
        ends = sorted(row.state.eos_token_ids | set(params.stop_token_ids))
        scores[torch.tensor(ends, dtype=torch.int64, device=scores.device)] = -math.inf
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=scores.device)
        biases = torch.tensor(list(params.logit_bias.values()), dtype=scores.dtype, device=scores.device)
        scores[ids] += biases
    if has_penalties(params):
        _penalise(scores, row)
    return scores


def _penalise(scores: torch.Tensor, row: LogitsRow) -> None:
    """Apply the three penalties in place."""
    params = row.state.params
    token_ids, counts = row.state.history.with_path(row.path)
    ids = torch.from_numpy(token_ids).to(scores.device)
    known = scores[ids]
    factor = params.repetition_penalty
    if factor != 1.0:
        known = torch.where(known > 0, known / factor, known * factor)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        loss = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        known = known - torch.from_numpy(loss).to(known)
    scores[ids] = known


def filtered(scores: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """What min_p, top_k and top_p leave of scaled scores [vocab]: (token ids, scores), best first.

    Only the tokens that can survive are sorted, not the vocabulary.
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
    scores = _scaled_rows(logits, rows)
    for row, out in zip(rows, scores, strict=True):
        if has_filters(row.state.params):
            token_ids, left = filtered(out, row.state.params)
            out.zero_()[token_ids] = left.softmax(0)
        else:
            torch.softmax(out, 0, out=out)
    return scores


def _scaled_rows(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
    """Adjusted scores over the temperature, the best of each row at 0 (so that no temperature
    overflows): [num_rows, vocab], a copy."""
    scores = torch.stack([adjusted_logits(logits, row) for row in rows])
    best = scores.amax(dim=1, keepdim=True)
    _raise_unless_finite(best[:, 0])
    temperatures = torch.tensor([row.state.params.temperature for row in rows], device=scores.device)
    return scores.sub_(best).div_(temperatures[:, None])


# --- choices ----------------------------------------------------------------------------------


def argmax_rows(logits: torch.Tensor) -> list[int]:
    """The best token of every row, lowest id on a tie. One pass over [num_rows, vocab] logits."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        best = torch.from_numpy(logits.numpy().argmax(axis=1))  # many times faster than torch's
    else:
        best = logits.argmax(dim=1)
    # A NaN counts as the maximum in both libraries, so the best value tells of any.
    chosen = logits.gather(1, best[:, None])[:, 0]
    _raise_unless_finite(chosen)
    return [int(token) for token in best.tolist()]


def choose(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> list[int]:
    """The token each row decides by itself: the argmax, or the Gumbel-max with keyed noise.

    It is a function of the row, the seed and the position alone, hence the same with and without
    drafts. Raises `InvalidLogits` for rows that hold NaN or leave no token.
    """
    greedy = [i for i, row in enumerate(rows) if row.state.params.is_greedy]
    sampled = [i for i, row in enumerate(rows) if not row.state.params.is_greedy]
    tokens = [0] * len(rows)
    if greedy:
        best = argmax_rows(torch.stack([adjusted_logits(logits, rows[i]) for i in greedy]))
        for i, token in zip(greedy, best, strict=True):
            tokens[i] = token
    if sampled:
        drawn = _sample(_scaled_rows(logits, [rows[i] for i in sampled]), [rows[i] for i in sampled])
        for i, token in zip(sampled, drawn, strict=True):
            tokens[i] = token
    return tokens


def _sample(scores: torch.Tensor, rows: Sequence[LogitsRow]) -> list[int]:
    """Gumbel-max over scaled scores, [num_rows, vocab]: over what the filters leave, where any."""
    whole = [i for i, row in enumerate(rows) if not has_filters(row.state.params)]
    parts = [i for i, row in enumerate(rows) if has_filters(row.state.params)]
    tokens = [0] * len(rows)
    if whole:
        keys, positions = [rows[i].state.key for i in whole], [rows[i].position for i in whole]
        noise = gumbel_rows(keys, positions, scores.shape[1], scores.device)
        noise += scores if len(whole) == len(rows) else scores[torch.tensor(whole, device=scores.device)]
        for i, token in zip(whole, argmax_rows(noise), strict=True):
            tokens[i] = token
    if parts:
        left = [filtered(scores[i], rows[i].state.params) for i in parts]
        keys, positions = [rows[i].state.key for i in parts], [rows[i].position for i in parts]
        noises = gumbel_of(keys, positions, [token_ids for token_ids, _ in left])
        for i, (token_ids, part), noise in zip(parts, left, noises, strict=True):
            tokens[i] = int(token_ids[(part + noise).argmax()])
    return tokens


def _raise_unless_finite(best: torch.Tensor) -> None:
    """`best` holds the largest score of each row; NaN wins every maximum."""
    if not bool(best.isfinite().all()):
        raise InvalidLogits(
            "the target's logits hold NaN or infinity, or every token is masked; "
            "check the model's weights and dtype, and the request's logit_bias"
        )


# --- logprobs ---------------------------------------------------------------------------------


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Log-probabilities of `token_ids[i]` under the raw row i, with its `num_top[i]` best tokens.

    `logits` is [num_rows, vocab]. Raw means before every processor, as for the OpenAI API.
    """
    if not token_ids:
        return []
    logprobs = logits.float().log_softmax(dim=1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(max(1, *num_top), dim=1)
    values, ids = best.values.tolist(), best.indices.tolist()
    return [
        TokenLogprob(token, chosen[i], tuple(zip(ids[i][:count], values[i][:count], strict=True)))
        for i, (token, count) in enumerate(zip(token_ids, num_top, strict=True))
    ]
