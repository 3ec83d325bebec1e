"""The last hidden states of one sequence, kept for drafters that read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Span = tuple[int, int, int]
"""One sequence's part of a forward: position of its first row, its rows, and how many of them stay."""


class HiddenTail:
    """The target's hidden states (after its final norm) of the newest tokens that were computed.

    Rows belong to consecutive positions `first` to `end` - 1 of tokens that are part of the
    sequence. At least `capacity` of them are kept, once there were as many; what came from the
    prefix cache was not computed and is missing.
    """

    def __init__(self, capacity: int) -> None:
        self.end = 0
        self._capacity = capacity
        self._rows: torch.Tensor | None = None  # [2 * capacity, hidden], the newest row at _used - 1
        self._used = 0

    @property
    def first(self) -> int:
        """Position of the oldest row."""
        return self.end - self._used

    @property
    def newest(self) -> torch.Tensor | None:
        """The row of position `end` - 1, [hidden]."""
        return None if self._rows is None or not self._used else self._rows[self._used - 1]

    def clear(self) -> None:
        """Forget all rows, and the memory with them."""
        self.end = self._used = 0
        self._rows = None

    def append(self, start: int, rows: torch.Tensor) -> None:
        """Rows of the tokens from position `start` on, [num_tokens, hidden]; a gap drops those before."""
        num = rows.shape[0]
        if num == 0:
            return
        if start != self.end:
            self._used = 0
        if self._rows is None:
            self._rows = torch.empty(
                (2 * self._capacity, rows.shape[1]), dtype=rows.dtype, device=rows.device
            )
        rows = rows[-2 * self._capacity :]
        if self._used + len(rows) > 2 * self._capacity:
            keep = min(max(self._capacity - len(rows), 0), self._used)
            self._rows[:keep] = self._rows[self._used - keep : self._used].clone()
            self._used = keep
        self._rows[self._used : self._used + len(rows)] = rows
        self._used += len(rows)
        self.end = start + num

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Rows of positions `first` to `end` - 1, all of which must be there: [end - first, hidden]."""
        if self._rows is None or not self.first <= first <= end <= self.end:
            raise IndexError(f"rows {first} to {end} were asked for; {self.first} to {self.end} are there")
        return self._rows[first - self.first : end - self.first]


def tail_bytes(capacity: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Memory of one tail, in bytes: all of it is taken with the first row."""
    return 2 * capacity * hidden_size * dtype.itemsize


def keep_hidden(tails: Sequence[HiddenTail | None], spans: Sequence[Span], hidden: torch.Tensor) -> None:
    """Add one forward's states, [num_tokens, hidden], to the tails of the sequences it ran over.

    Drafts that were refused are not part of a sequence, so their rows are left out.
    """
    row = 0
    for tail, (start, num_rows, num_kept) in zip(tails, spans, strict=True):
        if tail is not None and num_kept > 0:
            tail.append(start, hidden[row : row + num_kept])
        row += num_rows
