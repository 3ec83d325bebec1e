"""Philox words in C, for noise over a whole vocabulary."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import numpy as np
import torch

from engine.kernels.native import load_library


def philox_rows(rows: np.ndarray, num_blocks: int) -> torch.Tensor | None:
    """Words of blocks 0..num_blocks-1 for each row of counters and keys ([num_rows, 5] uint64, see
    `engine.spec.randomness`): [num_rows, num_blocks, 4] float32, or None without the C kernels."""
    library = load_library()
    if library is None:
        return None
    rows = np.ascontiguousarray(rows)
    out = torch.empty((len(rows), num_blocks, 4))
    library.specgate_philox_rows(
        c_void_p(rows.ctypes.data),
        c_int64(len(rows)),
        c_int64(num_blocks),
        c_void_p(out.data_ptr()),
        c_int64(torch.get_num_threads()),
    )
    return out
