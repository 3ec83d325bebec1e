"""Which token each row of logits decides, in C: `engine.sampling.choose` without copies of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.errors import InvalidLogits
from engine.kernels.native import Library

if TYPE_CHECKING:
    from engine.sampling_state import LogitsRow

_ROW = np.dtype(
    [
        ("logits", np.uint64),
        ("changed", np.uint64),
        ("scores", np.uint64),
        ("num_changed", np.int64),
        ("counter", np.uint64, 5),
        ("min_p", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("temperature", np.float32),
    ],
    align=True,
)
"""choice_row in cpu/choose.h."""

Changes = tuple[np.ndarray, np.ndarray]  # ascending token ids (int64) and their scores (float32)


def declare_choose(library: Library) -> None:
    """State the signature of the C function."""
    library.specgate_choose_rows.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_int64]
    library.specgate_choose_rows.restype = None


def choose_rows(
    library: Library,
    logits: torch.Tensor,
    rows: Sequence[LogitsRow],
    counters: np.ndarray,
    changes: Sequence[Changes | None],
) -> list[int]:
    """A token a row. `logits` [num_rows, vocab] float32 on the CPU, each row in one piece.

    `counters` [len(rows), 5] uint64: of the noise, see `engine.spec.randomness`. `changes`: scores that
    min_tokens, a bias or penalties put in the place of logits. Raises InvalidLogits.
    """
    num_rows, vocab_size = len(rows), logits.shape[1]
    table = np.zeros(num_rows, dtype=_ROW)
    first, stride = logits.data_ptr(), logits.stride(0) * logits.element_size()
    table["logits"] = [first + row.index * stride for row in rows]
    table["counter"] = counters
    for name in ("min_p", "top_p"):
        table[name] = [getattr(row.state.params, name) for row in rows]
    top_k = [row.state.params.top_k for row in rows]
    table["top_k"] = [k if k < vocab_size else 0 for k in top_k]  # all of it is no filter
    table["temperature"] = [
        0.0 if row.state.params.is_greedy else row.state.params.temperature for row in rows
    ]
    for line, change in zip(table, changes, strict=True):
        if change is not None:
            token_ids, scores = change
            line["changed"], line["scores"] = token_ids.ctypes.data, scores.ctypes.data
            line["num_changed"] = len(token_ids)
    tokens = np.empty(num_rows, dtype=np.int64)
    library.specgate_choose_rows(
        table.ctypes.data, num_rows, vocab_size, tokens.ctypes.data, torch.get_num_threads()
    )
    found: list[int] = tokens.tolist()
    if found and min(found) < 0:
        if -2 in found:
            raise MemoryError("sampling could not get its scratch memory")
        raise InvalidLogits(
            "the target's logits hold NaN or infinity, or every token is masked; "
            "check the model's weights and dtype, and the request's logit_bias"
        )
    return found
