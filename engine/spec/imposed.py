"""A drafter that is right with a given probability per position: it separates cost from quality.

For benches and calibration only. It knows the target's continuation beforehand, so its speed-up is
no result; what it costs the target to verify is.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.spec.drafter import DraftContext
from engine.spec.randomness import RandomKey
from engine.spec.stub import Oracle
from engine.spec.tree import EMPTY_TREE, DraftTree

_IMPOSED_SALT = 0xFFFFFFFF  # no root position is as large


class ImposedDrafter:
    """Draft token j is right with probability `acceptance[j]` given that those before were.

    Past the end of `acceptance` its last value holds. Errors are keyed by (seed of the sequence,
    position of the draft), so a run repeats. Where the oracle knows nothing the draft is empty.
    """

    def __init__(
        self,
        oracle: Oracle,
        vocab_size: int,
        acceptance: Sequence[float],
        *,
        name: str = "imposed",
        num_speculative_tokens: int = 4,
    ) -> None:
        if not acceptance or not all(0.0 <= chance <= 1.0 for chance in acceptance):
            raise ValueError(f"acceptance is {tuple(acceptance)}; give probabilities between 0 and 1")
        self.name = name
        self.num_speculative_tokens = num_speculative_tokens
        self._oracle = oracle
        self._vocab_size = vocab_size
        self._acceptance = tuple(acceptance)

    def begin(self, seq_id: str, token_ids: Sequence[int]) -> None:
        """Holds nothing."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """One chain per context."""
        return [self._propose_one(context) for context in contexts]

    def _propose_one(self, context: DraftContext) -> DraftTree:
        if context.max_draft_tokens <= 0 or len(context.token_ids) == 0:
            return EMPTY_TREE
        tokens = list(self._oracle(context)[: context.max_draft_tokens])
        # Noise of its own: verification must not share it.
        key = RandomKey(context.generator.seed, salt=_IMPOSED_SALT)
        for j, number in enumerate(key.uniform(len(context.token_ids), len(tokens)).tolist()):
            if number >= self._acceptance[min(j, len(self._acceptance) - 1)]:
                tokens[j:] = [(token + 1) % self._vocab_size for token in tokens[j:]]
                break
        return DraftTree.chain(tuple(tokens))

    def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """Holds nothing."""

    def end(self, seq_id: str) -> None:
        """Holds nothing."""

    def work(self) -> tuple[int, int]:
        """No forwards, no KV."""
        return 0, 0
