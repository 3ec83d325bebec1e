"""When a draft had better end: the draft model's own distribution before the next token is drawn.

The chance that the next draft token stands is judged as the product of the draft's largest
probabilities so far, this position's included, times how often such products came true in this
sequence. Below `min_confidence` nothing more is drawn; an unsure draft is not begun at all, and the
step stays a plain one. Looking at the distribution *before* drawing keeps the text's distribution:
no drawn token is ever thrown away (dynamic speculation as in Mamou et al., arXiv:2405.04304).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_PRIOR_TOKENS = 8.0
"""Products count as true until about that many expected tokens have shown otherwise."""


@dataclass(slots=True)
class _Record:
    """One sequence: the running draft's product, and what was expected and came of earlier ones."""

    reach: float = 1.0
    worth: float = 1.0  # how many tokens came for one that was expected, when the draft began
    expected: float = 0.0
    accepted: int = 0

    @property
    def truth(self) -> float:
        """How many tokens came for one that was expected."""
        return (self.accepted + _PRIOR_TOKENS) / (self.expected + _PRIOR_TOKENS)


class ConfidenceStop:
    """Decides for every sequence whether its draft goes on. 0 as `min_confidence`: always."""

    def __init__(self, min_confidence: float) -> None:
        if not 0.0 <= min_confidence < 1.0:
            raise ValueError(f"min_confidence is {min_confidence}; it must be at least 0 and below 1")
        self._min_confidence = min_confidence
        self._records: dict[str, _Record] = {}

    @property
    def min_confidence(self) -> float:
        """Below it nothing is drawn; 0: everything is."""
        return self._min_confidence

    def truth(self, seq_id: str) -> float:
        """What this sequence's products are worth, for a draft that is made elsewhere."""
        record = self._records.get(seq_id)
        return 1.0 if record is None else record.truth

    def drafted(self, seq_id: str, expected: float) -> None:
        """A draft was made elsewhere, drawn from products with this sum."""
        if self._min_confidence and expected > 0.0:
            self._records.setdefault(seq_id, _Record()).expected += expected

    def going_on(self, seq_ids: Sequence[str], logits: torch.Tensor, *, is_first: bool) -> list[int]:
        """Places of the sequences whose next token is to be drawn; `logits`: [len(seq_ids), any vocabulary].

        `is_first`: these are the drafts' first tokens.
        """
        if not self._min_confidence:
            return list(range(len(seq_ids)))
        places = []
        tops = (logits.amax(1) - logits.logsumexp(1)).exp().tolist()
        for place, (seq_id, top) in enumerate(zip(seq_ids, tops, strict=True)):
            record = self._records.setdefault(seq_id, _Record())
            if is_first:
                record.worth = record.truth  # nothing of this draft has been verified yet
            reach = (1.0 if is_first else record.reach) * top
            if reach * record.worth >= self._min_confidence:
                record.reach = reach
                record.expected += reach
                places.append(place)
        return places

    def observe(self, seq_id: str, num_accepted: int) -> None:
        """So many of the sequence's draft tokens stood."""
        if (record := self._records.get(seq_id)) is not None:
            record.accepted += num_accepted

    def end(self, seq_id: str) -> None:
        """Forget a sequence."""
        self._records.pop(seq_id, None)
