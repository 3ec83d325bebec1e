"""Suffix decoding where the text repeats itself, a draft model where it does not, decided step by step.

For each sequence both have an estimate of how many tokens they will bring: the suffix match by how
sure it is, the draft model by what it brought so far in this answer. The one that promises more
tokens for its time drafts; a drafter that is not asked costs nothing in that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import HybridConfig
from engine.spec.drafter import DraftContext, Drafter
from engine.spec.suffix import PastOutputs, SuffixDrafter
from engine.spec.tree import DraftTree

_PRIOR_DRAFTS = 4.0
"""The assumed acceptance counts as much as that many drafts of the answer itself."""


@dataclass(slots=True)
class _Record:
    """What both brought so far in one sequence."""

    suffix_expected: float = 0.0
    suffix_accepted: int = 0
    draft_accepted: int = 0
    num_drafts: int = 0
    is_pending: bool = False  # a draft is being verified,
    pending: float | None = None  # of a match that expects so many tokens to be accepted; None: the model's


class HybridDrafter:
    """Two drafters behind one name. The draft model may be loaded under its own name too."""

    name = "hybrid"

    def __init__(self, suffix: SuffixDrafter, draft: Drafter, config: HybridConfig) -> None:
        """`suffix` must be this drafter's own: it is told everything once. `draft` may be shared."""
        self.num_speculative_tokens = config.num_speculative_tokens
        self._suffix = suffix
        self._draft = draft
        self._config = config
        self._records: dict[str, _Record] = {}
        self._work: tuple[int, ...] = (0, 0)

    @property
    def past(self) -> PastOutputs:
        """What is kept of past outputs."""
        return self._suffix.past

    @property
    def num_sequences(self) -> int:
        """Sequences for which something is held."""
        return len(self._records)

    def begin(self, seq_id: str, token_ids: Sequence[int]) -> None:
        """Begin with both."""
        self._records.pop(seq_id, None)
        self._suffix.begin(seq_id, token_ids)
        self._draft.begin(seq_id, token_ids)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """The suffix match's draft where it promises more for its time, else the draft model's."""
        self._work = (0, 0)
        trees = self._suffix.propose(contexts)
        asked = [place for place, context in enumerate(contexts) if self._asks_model(context, trees[place])]
        drafted = self._draft.propose([contexts[place] for place in asked]) if asked else []
        if asked:
            self._work = self._draft.work()
        for place, tree in zip(asked, drafted, strict=True):
            trees[place] = tree if tree.token_ids else trees[place]
        model_drafted = {place for place, tree in zip(asked, drafted, strict=True) if tree.token_ids}
        for place, (context, tree) in enumerate(zip(contexts, trees, strict=True)):
            record = self._records.setdefault(context.seq_id, _Record())
            record.is_pending = bool(tree.token_ids)
            record.pending = None if place in model_drafted else tree.expected_accepted
        return trees

    def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """Tell both, and remember what the one that drafted brought."""
        record = self._records.get(seq_id)
        is_models = record is not None and record.is_pending and record.pending is None
        self._suffix.observe(seq_id, token_ids, num_accepted)
        # What the match brought says nothing of the draft model's confidence.
        self._draft.observe(seq_id, token_ids, num_accepted if is_models else 0)
        if record is None or not record.is_pending:
            return
        record.is_pending = False
        if record.pending is not None:
            record.suffix_expected += record.pending
            record.suffix_accepted += num_accepted
        else:
            record.num_drafts += 1
            record.draft_accepted += num_accepted

    def end(self, seq_id: str) -> None:
        """End with both."""
        self._records.pop(seq_id, None)
        self._suffix.end(seq_id)
        self._draft.end(seq_id)

    def work(self) -> tuple[int, ...]:
        """The draft model's, where it was asked."""
        return self._work

    def _asks_model(self, context: DraftContext, found: DraftTree) -> bool:
        """True where the draft model promises more tokens for the time of a step than the match found."""
        if context.max_draft_tokens <= 0 or not context.token_ids:
            return False
        record = self._records.get(context.seq_id, _Record())
        prior = self._config.assumed_accepted_tokens
        accepted = (record.draft_accepted + _PRIOR_DRAFTS * prior) / (record.num_drafts + _PRIOR_DRAFTS)
        # Matches bring more or less than they promise, by text: scale by what they kept of it so far.
        kept = (record.suffix_accepted + _PRIOR_DRAFTS) / (record.suffix_expected + _PRIOR_DRAFTS)
        promised = (found.expected_accepted or 0.0) * kept
        return (1.0 + accepted) / (1.0 + self._config.draft_cost) > 1.0 + promised
