"""The drafter seam: whoever can guess tokens is one file behind this protocol.

A drafter sees a batch of contexts and answers one `DraftTree` for each. It never decides what
is emitted (that is `engine.spec.verify`), so a wrong or failing drafter costs speed, not text.
`engine.spec.check_drafter` runs the contract below against every implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from engine.spec.tree import DraftTree

if TYPE_CHECKING:
    import torch

    from engine.hidden_tail import HiddenTail
    from engine.spec.randomness import RandomKey


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One sequence as a drafter sees it. A new need is a new field, never a new parameter.

    `token_ids` is the sequence's own list (prompt, then output): read it, never write it.
    `generator` gives noise that depends on (seed, position) only; a drafter that samples draws
    from `generator.for_draft(len(token_ids))`, so that the same seed gives the same tree.
    """

    seq_id: str
    token_ids: Sequence[int]
    prompt_length: int
    max_draft_tokens: int
    temperature: float
    last_hidden: torch.Tensor | None  # [hidden], target's last hidden state, where kept
    generator: RandomKey
    cache_salt: str | None = None  # drafters share caches only between equal salts; None: never
    label: str = ""  # the request's: what past outputs are kept apart by, within a salt
    hidden: HiddenTail | None = None  # the target's last hidden states, for drafters that are `ReadsHidden`


class Drafter(Protocol):
    """Proposes draft tokens.

    Contract: at most `max_draft_tokens` nodes per tree; contexts are never mutated; an empty
    context (no tokens, or `max_draft_tokens == 0`) gives an empty tree; same seed, same tree;
    `end` frees everything held for a sequence. Raising is allowed: the engine goes on without a
    draft and counts it.
    """

    @property
    def name(self) -> str:
        """The method's name in policies, metrics and step records."""
        ...

    @property
    def num_speculative_tokens(self) -> int:
        """The default ceiling of draft tokens per sequence and step."""
        ...

    def begin(self, seq_id: str, token_ids: Sequence[int]) -> None:
        """A sequence may be drafted for from now on. Cheap: no forward happens here."""
        ...

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """One tree per context, in order."""
        ...

    def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """`token_ids` were committed after a verify; the first `num_accepted` were this drafter's."""
        ...

    def end(self, seq_id: str) -> None:
        """The sequence is over or was preempted: free all it holds. Unknown ids are ignored."""
        ...

    def work(self) -> tuple[int, ...]:
        """(sequential forwards, KV tokens read) of the last `propose`: the latency model's terms.

        A drafter with a cache of its own adds how many context tokens it had to read up on.
        """
        ...


@runtime_checkable
class ReadsHidden(Protocol):
    """A drafter that wants `DraftContext.hidden`."""

    @property
    def num_hidden_rows(self) -> int:
        """How many of the newest tokens' hidden states the engine must keep for each sequence."""
        ...


@runtime_checkable
class KnowsInHindsight(Protocol):
    """A drafter whose drafts follow from the tokens alone, whoever computed them."""

    def hindsight(self, context: DraftContext, start: int) -> tuple[list[tuple[int, int]], int]:
        """What it would have drafted had it had its turn since the text was `start` tokens long.

        For each step that the text so far decides: (draft tokens, how many of them were right). Then
        the length at which the first step begins that it does not. A drafter that has yet to read
        what came before may say nothing for now: no steps, and `start`.
        """
        ...


def num_right(draft: Sequence[int], token_ids: Sequence[int], start: int) -> int:
    """How many of the draft's first tokens are those that came from `start` on."""
    right = 0
    while right < len(draft) and draft[right] == token_ids[start + right]:
        right += 1
    return right


@runtime_checkable
class HoldsMemory(Protocol):
    """A drafter that has weights or a KV cache of its own."""

    @property
    def num_weight_bytes(self) -> int:
        """Weight memory it adds to the target's."""
        ...

    @property
    def num_cache_bytes(self) -> int:
        """KV memory it holds."""
        ...
