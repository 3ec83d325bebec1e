"""Prompt-lookup drafting: what followed the last time the text read like this?

The longest suffix of the sequence, between `prompt_lookup_min` and `prompt_lookup_max` tokens,
that occurred earlier proposes its continuation; of equally long matches the newest wins
(Saxena, "Prompt Lookup Decoding", 2023). Every n-gram is indexed once, when the token after it is
known, so a step costs O(new tokens) and not O(context).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.config import NgramConfig
from engine.spec.drafter import DraftContext, num_right
from engine.spec.tree import EMPTY_TREE, DraftTree

_HASH_BASE = 0x9E3779B97F4A7C15  # odd, hence invertible modulo 2**64
_HASH_MASK = 2**64 - 1
_BULK_TOKENS = 64
"""From this many new tokens on (a prompt), hashing with numpy beats hashing one by one."""


class NgramIndex:
    """Newest end of every n-gram of one growing sequence, for n in [min_n, max_n].

    Keys are 64-bit polynomial hashes; a hit is checked against the tokens, so a collision costs a
    draft at worst.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n = min_n
        self.max_n = max_n
        self.num_indexed = 0  # n-grams ending before this index are known
        self._newest: list[dict[int, int]] = [{} for _ in range(max_n + 1)]

    def extend(self, token_ids: Sequence[int], length: int | None = None) -> None:
        """Index n-grams that end before the last token (of the first `length`): those have a continuation."""
        end = (len(token_ids) if length is None else length) - 1
        if end - self.num_indexed >= _BULK_TOKENS:
            self._extend_in_bulk(token_ids, end)
        else:
            for last in range(self.num_indexed, end):
                self._add(token_ids, last)
        self.num_indexed = max(self.num_indexed, end)

    def _add(self, token_ids: Sequence[int], last: int) -> None:
        for n, key in enumerate(_suffix_hashes(token_ids, last, self.max_n), start=1):
            if n >= self.min_n:
                self._newest[n][key] = last

    def _extend_in_bulk(self, token_ids: Sequence[int], end: int) -> None:
        start = max(0, self.num_indexed - self.max_n + 1)
        tokens = np.array(token_ids[start:end], dtype=np.uint64) + np.uint64(1)
        keys = np.zeros_like(tokens)
        weight = 1
        for n in range(1, self.max_n + 1):
            # keys[i] covers the n tokens that end at start + i: the new, oldest one weighs most.
            keys[n - 1 :] += tokens[: len(tokens) - n + 1] * np.uint64(weight)
            weight = weight * _HASH_BASE & _HASH_MASK
            first = max(self.num_indexed, start + n - 1)
            if n >= self.min_n and first < end:
                self._newest[n].update(zip(keys[first - start :].tolist(), range(first, end), strict=True))

    def find(self, token_ids: Sequence[int], length: int | None = None) -> int | None:
        """Where the newest earlier occurrence of the longest known suffix (of the first `length` tokens)
        continues, if anywhere."""
        last = (len(token_ids) if length is None else length) - 1
        hashes = _suffix_hashes(token_ids, last, self.max_n)
        for n in range(len(hashes), self.min_n - 1, -1):
            end = self._newest[n].get(hashes[n - 1])
            if end is not None and token_ids[end - n + 1 : end + 1] == token_ids[last - n + 1 : last + 1]:
                return end + 1
        return None


def _suffix_hashes(token_ids: Sequence[int], last: int, max_n: int) -> list[int]:
    """Hashes of the 1, 2, ..., max_n tokens that end at index `last` (fewer near the start)."""
    hashes = []
    key, weight = 0, 1
    for i in range(last, max(-1, last - max_n), -1):
        key = key + (token_ids[i] + 1) * weight & _HASH_MASK
        weight = weight * _HASH_BASE & _HASH_MASK
        hashes.append(key)
    return hashes


class NgramDrafter:
    """Chains copied from the sequence's own past. Needs no model, reads no KV."""

    name = "ngram"

    def __init__(self, config: NgramConfig | None = None) -> None:
        config = config or NgramConfig()
        if not 1 <= config.prompt_lookup_min <= config.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {config.prompt_lookup_min} and prompt_lookup_max "
                f"{config.prompt_lookup_max} must satisfy 1 <= min <= max"
            )
        self._config = config
        self._indexes: dict[str, NgramIndex] = {}

    @property
    def num_speculative_tokens(self) -> int:
        return self._config.num_speculative_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences for which something is held."""
        return len(self._indexes)

    def begin(self, seq_id: str, token_ids: Sequence[int]) -> None:
        """Start afresh; the prompt is indexed with the first draft, and never if none comes."""
        self._indexes.pop(seq_id, None)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """One chain per context, empty where nothing matches."""
        return [self._propose_one(context) for context in contexts]

    def _propose_one(self, context: DraftContext) -> DraftTree:
        tokens = context.token_ids
        if context.max_draft_tokens <= 0 or len(tokens) == 0:
            return EMPTY_TREE
        index = self._index_of(context.seq_id, len(tokens))
        index.extend(tokens)
        start = index.find(tokens)
        if start is None:
            return EMPTY_TREE
        return DraftTree.chain(tuple(tokens[start : start + context.max_draft_tokens]))

    def _index_of(self, seq_id: str, length: int) -> NgramIndex:
        """That of a text of so many tokens; a new one if the one there is knows of more."""
        index = self._indexes.get(seq_id)
        if index is None or index.num_indexed > length:
            index = NgramIndex(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
            self._indexes[seq_id] = index
        return index

    def hindsight(self, context: DraftContext, start: int) -> tuple[list[tuple[int, int]], int]:
        """See `KnowsInHindsight.hindsight`."""
        token_ids, max_draft_tokens = context.token_ids, context.max_draft_tokens
        index = self._index_of(context.seq_id, start)
        steps: list[tuple[int, int]] = []
        at = start
        while at + max_draft_tokens < len(token_ids):  # whatever is drafted, and the token after it
            index.extend(token_ids, at)
            found = index.find(token_ids, at)
            draft = () if found is None else token_ids[found : min(found + max_draft_tokens, at)]
            right = num_right(draft, token_ids, at)
            steps.append((len(draft), right))
            at += right + 1
        return steps, at

    def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """Nothing to do: the next draft indexes what is new in its context."""

    def end(self, seq_id: str) -> None:
        """Forget the sequence."""
        self._indexes.pop(seq_id, None)

    def work(self) -> tuple[int, int]:
        """No forwards, no KV."""
        return 0, 0
