"""Drafters whose acceptance is known beforehand, for tests of everything around a draft.

They look up the continuation the target is known to give and change it at chosen places, so that
stop strings, end-of-sequence and length limits fall at every offset of an accepted block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.spec.drafter import DraftContext
from engine.spec.tree import EMPTY_TREE, DraftTree

Oracle = Callable[[DraftContext], Sequence[int]]
"""The tokens known to follow a context, as many as are known (more than asked for is fine)."""


def known_continuations(outputs: Mapping[tuple[int, ...], Sequence[int]]) -> Oracle:
    """An oracle from whole outputs by prompt, e.g. those of a baseline run."""

    def oracle(context: DraftContext) -> Sequence[int]:
        prompt = tuple(context.token_ids[: context.prompt_length])
        return outputs.get(prompt, ())[len(context.token_ids) - context.prompt_length :]

    return oracle


class StubDrafter:
    """Right for the first `num_right` draft tokens and wrong after that; None is always right.

    `num_right=0` is always wrong. Past the end of what the oracle knows it drafts nothing.
    """

    def __init__(
        self,
        oracle: Oracle,
        vocab_size: int,
        num_right: int | None = None,
        *,
        name: str = "stub",
        num_speculative_tokens: int = 4,
    ) -> None:
        self.name = name
        self.num_speculative_tokens = num_speculative_tokens
        self._oracle = oracle
        self._vocab_size = vocab_size
        self._num_right = num_right

    def begin(self, seq_id: str, token_ids: Sequence[int]) -> None:
        """Holds nothing."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """One chain per context."""
        return [self._propose_one(context) for context in contexts]

    def _propose_one(self, context: DraftContext) -> DraftTree:
        if context.max_draft_tokens <= 0 or len(context.token_ids) == 0:
            return EMPTY_TREE
        known = list(self._oracle(context)[: context.max_draft_tokens])
        if self._num_right is not None:
            wrong = known[self._num_right :]
            known[self._num_right :] = [(token + 1) % self._vocab_size for token in wrong]
        return DraftTree.chain(tuple(known))

    def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """Holds nothing."""

    def end(self, seq_id: str) -> None:
        """Holds nothing."""

    def work(self) -> tuple[int, int]:
        """No forwards, no KV."""
        return 0, 0
