"""Where one sequence stands in its grammar, and which tokens may follow. No torch.

The grammar is walked along the draft: a row of logits behind draft tokens is masked by what may
stand there. So a draft token that the grammar forbids has probability zero in the row that
decides about it and is refused like any other, by every rule of `engine.spec.verify`; the target's
distribution is the masked one with or without drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from engine.errors import InvalidLogits

PackedMask = np.ndarray
"""[bytes] uint8: token t may stand where bit t % 8 (lowest first) of byte t // 8 is set."""


class Matcher(Protocol):
    """What is needed of a compiled grammar; `llguidance.LLMatcher` fits. It never raises: it is
    in error for good instead."""

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Take as many of the tokens as the grammar allows; how many that were."""
        ...

    def rollback(self, num_tokens: int) -> bool:
        """Give back the last tokens taken."""
        ...

    def compute_bitmask(self) -> bytes:
        """The tokens that may come next, one bit each, lowest first."""
        ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...


class GrammarState:
    """One sequence's place in its grammar: the output so far, and some way down its draft."""

    def __init__(self, matcher: Matcher, end_ids: frozenset[int]) -> None:
        """`matcher` stands at the grammar's start and is this sequence's own; `end_ids` end a sequence."""
        self._matcher = matcher
        self._end_ids = end_ids
        self._num_settled = 0  # output tokens taken for good
        self._taken: list[int] = []  # tokens taken after those

    def allowed(
        self, output_token_ids: Sequence[int], path: Sequence[int], without: Iterable[int] = ()
    ) -> PackedMask | None:
        """The tokens that may follow the output and then `path`, the draft tokens before the row.

        None where that does not matter, since the row can decide nothing: behind a token that is
        refused, or that ends the sequence. Tokens in `without` are left out unless no other is
        left. Raises `InvalidLogits` if the grammar cannot be followed within its limits.
        """
        if not self._go_to(output_token_ids, path):
            return None
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            why = self._matcher.get_error().partition("\n")[0]
            raise InvalidLogits(f"the format is too complex to be kept any further: {why}")
        unwanted = list(without)
        if unwanted:
            fewer = mask.copy()
            for token in unwanted:
                fewer[token // 8] &= ~(1 << token % 8) & 0xFF
            mask = fewer if fewer.any() else mask
        return mask

    def _go_to(self, output_token_ids: Sequence[int], path: Sequence[int]) -> bool:
        """Move the matcher behind `path`; False if that place is not within the grammar."""
        fresh = output_token_ids[self._num_settled :]
        wanted = [*fresh, *path]
        num_common = 0
        for taken, token in zip(self._taken, wanted, strict=False):
            if taken != token:
                break
            num_common += 1
        if num_common < len(self._taken):
            self._matcher.rollback(len(self._taken) - num_common)
            del self._taken[num_common:]
        rest = wanted[num_common:]
        for place, token in enumerate(rest):
            if token in self._end_ids:  # nothing follows an end
                del rest[place:]
                break
        if rest:
            num_taken = self._matcher.try_consume_tokens(rest)
            self._taken += rest[:num_taken]
        is_there = len(self._taken) == len(wanted)
        num_settled = min(len(fresh), len(self._taken))
        del self._taken[:num_settled]
        self._num_settled += num_settled
        return is_there


def unpacked(masks: Sequence[PackedMask], vocab_size: int) -> np.ndarray:
    """The masks as [len(masks), vocab_size] bool. Tokens beyond a mask may not stand."""
    bits = np.unpackbits(np.stack(masks), axis=1, bitorder="little")[:, :vocab_size]
    if bits.shape[1] < vocab_size:
        bits = np.pad(bits, ((0, 0), (0, vocab_size - bits.shape[1])))
    return bits.view(np.bool_)
