"""What sampling has to know of a sequence, and of a row of logits within its draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.grammar.state import GrammarState, PackedMask
from engine.history import TokenHistory
from engine.spec.randomness import RandomKey
from engine.types import AcceptRule, SamplingParams


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
    grammar: GrammarState | None = None
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
        """True when a grammar, min_tokens, a bias or a penalty changes this row."""
        params = self.state.params
        is_held = self.state.grammar is not None
        return is_held or bool(params.logit_bias) or self.is_below_min_tokens or has_penalties(params)

    @property
    def is_below_min_tokens(self) -> bool:
        """True while the sequence must not end at this row."""
        return len(self.state.output_token_ids) + len(self.path) < self.state.params.min_tokens

    @property
    def unwanted_ends(self) -> frozenset[int]:
        """Tokens that min_tokens forbids at this row; under a grammar ignore_eos does so too."""
        params, ends = self.state.params, self.state.eos_token_ids
        if self.is_below_min_tokens:
            return ends | frozenset(params.stop_token_ids)
        return ends if params.ignore_eos and self.state.grammar is not None else frozenset()

    def allowed(self) -> PackedMask | None:
        """What the sequence's grammar lets stand at this row, ends only where nothing else can;
        None: anything. Rows of a sequence are cheapest asked for in the order of the tree."""
        grammar = self.state.grammar
        if grammar is None:
            return None
        return grammar.allowed(self.state.output_token_ids, self.path, self.unwanted_ends)


def has_penalties(params: SamplingParams) -> bool:
    """True when earlier tokens change the scores."""
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


def has_filters(params: SamplingParams) -> bool:
    """True when min_p, top_k or top_p may leave out tokens."""
    return params.min_p > 0.0 or params.top_k > 0 or params.top_p < 1.0
