"""Which tokens a sequence holds and how often it said them, kept up as it grows: for penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

_SPARE = 64


class TokenHistory:
    """The distinct tokens of prompt and output with their number of times in the output.

    Each token is counted once, so a step costs O(new tokens + distinct tokens), not O(context).
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = np.unique(np.array(prompt_token_ids, dtype=np.int64))
        self._num_distinct = len(distinct)
        self._slots = {token: slot for slot, token in enumerate(distinct.tolist())}
        self._token_ids = np.concatenate([distinct, np.zeros(_SPARE, dtype=np.int64)])
        self._counts = np.zeros(len(self._token_ids), dtype=np.int64)
        self._num_output = 0

    def update(self, output_token_ids: Sequence[int]) -> None:
        """Count the output tokens that are new. `output_token_ids` must have only grown."""
        for token in output_token_ids[self._num_output :]:
            slot = self._slots.get(token)
            if slot is None:
                slot = self._slots[token] = self._num_distinct
                self._num_distinct += 1
                if slot == len(self._token_ids):
                    room = np.zeros(len(self._token_ids), dtype=np.int64)
                    self._token_ids = np.concatenate([self._token_ids, room])
                    self._counts = np.concatenate([self._counts, room])
                self._token_ids[slot] = token
            self._counts[slot] += 1
        self._num_output = len(output_token_ids)

    def with_path(self, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Distinct tokens and their output counts, [num_distinct] int64 each, as if the draft
        tokens of `path` had been said."""
        extra = Counter(path)
        fresh = [token for token in extra if token not in self._slots]
        token_ids = np.append(self._token_ids[: self._num_distinct], np.array(fresh, dtype=np.int64))
        counts = np.append(self._counts[: self._num_distinct], np.zeros(len(fresh), dtype=np.int64))
        for token, count in extra.items():
            slot = self._slots.get(token)
            counts[self._num_distinct + fresh.index(token) if slot is None else slot] += count
        return token_ids, counts
