"""Suffix decoding: what followed the longest match, in this text and in earlier answers of its kind?

After Oliaro et al., "SuffixDecoding" (arXiv:2411.04975). A sequence is matched against its own
tokens and, where that is on, against the past outputs of the same salt (tenant) and label (task).
The longer match drafts, along the most frequent continuations, and only as far as they are likely:
a short or ambiguous match gives a short draft, a long one that never varied a long draft.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.config import SuffixConfig
from engine.spec.drafter import DraftContext, num_right
from engine.spec.suffix_automaton import ROOT, SuffixAutomaton
from engine.spec.tree import EMPTY_TREE, DraftTree

_PRIOR_WEIGHT = 2.0
"""What the match's length says counts as much as that many times of having seen what follows."""
_CATCH_UP_TOKENS = 4096
"""Tokens indexed in one `propose` at most, for all sequences: a long prompt must not stall a step."""
_LOOK_BACK_TOKENS = 128
"""The same in one look back, which must not be noticed at all."""
_MATCHED_TOKENS = 256
"""Of many new tokens, those that are matched against past outputs: longer matches say no more."""


@dataclass(slots=True)
class _Match:
    """Where a sequence stands in past outputs."""

    automaton: SuffixAutomaton
    state: int = ROOT
    length: int = 0

    def advance(self, token: int) -> None:
        self.state, self.length = self.automaton.step(self.state, self.length, token)


@dataclass(slots=True)
class _Text:
    """One sequence: its own automaton, and its matches in past outputs."""

    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    matches: list[_Match] = field(default_factory=list)
    scope: tuple[str, str] | None = None
    prompt_length: int = 0
    is_level: bool = False  # all tokens there are are indexed
    has_drafted: bool = False  # else it was only looked back at


class PastOutputs:
    """Outputs by scope, in two generations of automata each; the oldest tokens go first.

    A generation holds up to half of `scope_tokens`. When it is full it becomes the older one, and
    the older one is dropped. Over `max_tokens` in all, the scope unused for longest is dropped.
    """

    def __init__(self, scope_tokens: int, max_tokens: int) -> None:
        self._generation_tokens = scope_tokens // 2
        self._max_tokens = max_tokens
        self._scopes: OrderedDict[tuple[str, str], list[SuffixAutomaton]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return sum(len(automaton) for scope in self._scopes.values() for automaton in scope)

    def automata(self, scope: tuple[str, str]) -> list[SuffixAutomaton]:
        """What there is for a scope, newest first; none but its own."""
        if scope not in self._scopes:
            return []
        self._scopes.move_to_end(scope)
        return list(self._scopes[scope])

    def add(self, scope: tuple[str, str], token_ids: Sequence[int]) -> None:
        """Keep an output."""
        if not token_ids:
            return
        generations = self._scopes.setdefault(scope, [])
        self._scopes.move_to_end(scope)
        if not generations or len(generations[0]) + len(token_ids) > self._generation_tokens:
            generations.insert(0, SuffixAutomaton())
            del generations[2:]
        generations[0].begin_text()
        generations[0].extend(token_ids[-self._generation_tokens :])
        while self.num_tokens > self._max_tokens and len(self._scopes) > 1:
            self._scopes.popitem(last=False)


class SuffixDrafter:
    """Chains copied from the sequence's own past and from past outputs. Needs no model, reads no KV."""

    name = "suffix"

    def __init__(self, config: SuffixConfig | None = None, past: PastOutputs | None = None) -> None:
        """`past`: past outputs that another drafter keeps too."""
        config = config or SuffixConfig()
        if config.min_match < 1 or not 0.0 < config.min_confidence < 1.0:
            raise ValueError(
                f"min_match is {config.min_match} and must be at least 1; min_confidence is"
                f" {config.min_confidence} and must lie between 0 and 1"
            )
        self._config = config
        self._texts: dict[str, _Text] = {}
        self.past = past or PastOutputs(config.scope_tokens, config.max_past_tokens)

    @property
    def num_speculative_tokens(self) -> int:
        return self._config.num_speculative_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences for which something is held."""
        return len(self._texts)

    def begin(self, seq_id: str, token_ids: Sequence[int]) -> None:
        """Nothing is indexed before the first draft."""
        self._texts.pop(seq_id, None)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """One chain per context, empty where nothing likely follows."""
        budget = _CATCH_UP_TOKENS
        trees = []
        for context in contexts:
            tree = EMPTY_TREE
            if context.max_draft_tokens > 0 and context.token_ids:
                text = self._text(context)
                budget -= self._catch_up(text, context.token_ids, budget)
                text.is_level = len(text.own) == len(context.token_ids)
                text.has_drafted |= text.is_level
                if text.is_level:
                    tree = self._draft(text, context.max_draft_tokens)
            trees.append(tree)
        return trees

    def hindsight(self, context: DraftContext, start: int) -> tuple[list[tuple[int, int]], int]:
        """See `KnowsInHindsight.hindsight`. The text before is read bit by bit; what was read already,
        beyond `start`, is not judged. Past outputs are those of when the sequence was first seen."""
        tokens, depth = context.token_ids, context.max_draft_tokens
        text = self._text(context)
        self._catch_up(text, tokens[:start], _LOOK_BACK_TOKENS)
        steps: list[tuple[int, int]] = []
        at = max(start, len(text.own))
        while len(text.own) == at and at + depth < len(tokens):
            draft = self._draft(text, depth).token_ids
            right = num_right(draft, tokens, at)
            steps.append((len(draft), right))
            self._extend(text, tokens[at : at + right + 1])
            at += right + 1
        text.is_level = False  # or what comes now would be read before it is judged
        return steps, at

    def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """Index them at once, so that a last step's tokens are part of what `end` keeps."""
        text = self._texts.get(seq_id)
        if text is not None and text.is_level:
            self._extend(text, token_ids)

    def end(self, seq_id: str) -> None:
        """Forget the sequence; its output stays, where past outputs are kept and it was drafted for."""
        text = self._texts.pop(seq_id, None)
        if text is not None and text.scope is not None and text.has_drafted:
            self.past.add(text.scope, text.own.text[text.prompt_length :])

    def work(self) -> tuple[int, int]:
        """No forwards, no KV."""
        return 0, 0

    def _text(self, context: DraftContext) -> _Text:
        text = self._texts.get(context.seq_id)
        if text is None or len(text.own) > len(context.token_ids):
            text = _Text(prompt_length=context.prompt_length)
            if self._config.share_past_outputs and context.cache_salt is not None:
                text.scope = context.cache_salt, context.label
                text.matches = [_Match(automaton) for automaton in self.past.automata(text.scope)]
            self._texts[context.seq_id] = text
        return text

    def _catch_up(self, text: _Text, token_ids: Sequence[int], budget: int) -> int:
        """Index what is new, up to `budget` tokens; how many that were."""
        new = token_ids[len(text.own) : len(text.own) + max(budget, 0)]
        self._extend(text, new)
        return len(new)

    @staticmethod
    def _extend(text: _Text, token_ids: Sequence[int]) -> None:
        text.own.extend(token_ids)
        for match in text.matches:
            for token in token_ids[-_MATCHED_TOKENS:]:
                match.advance(token)

    def _draft(self, text: _Text, max_tokens: int) -> DraftTree:
        own = text.own
        length, automaton, state = own.match_length(own.place), own, own.place
        for match in text.matches:  # other texts must match better than the own one, and never just barely
            if match.length > max(length, self._config.min_match_past - 1):
                length, automaton, state = match.length, match.automaton, match.state
        if length < self._config.min_match:
            return EMPTY_TREE
        tokens: list[int] = []
        confidence, expected = 1.0, 0.0
        while len(tokens) < max_tokens:
            guess = automaton.guess(state)
            if guess is None:
                break
            token, times, times_any = guess
            prior = (length - 0.5) / (length + 1.0)
            confidence *= (times + _PRIOR_WEIGHT * prior) / (times_any + _PRIOR_WEIGHT)
            if confidence < self._config.min_confidence:
                break
            tokens.append(token)
            expected += confidence
            state, length = automaton.follow(state, token), length + 1
        return DraftTree.chain(tuple(tokens), expected_accepted=expected if tokens else None)
