"""min_tokens, bias and penalties on the few logits they touch, in place and undone afterwards.

No copy of the logits is made: what stood there is kept, as many numbers as were touched. Penalties
advance along a draft: each row counts the draft tokens between the root and itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.scan import ROW_INTS, SEQUENCE_INTS, SETTINGS

ENTRY_INTS = tl.constexpr(3)
"""Token, count among the output tokens, bits: 1 forbidden by min_tokens, 2 known from prompt or output."""


@triton.jit
def adjust_kernel(
    touched_ptr,  # [rows touched, 2] int32: row, where its numbers are kept
    sequence_ptr,
    row_ptr,
    setting_ptr,
    entry_ptr,
    bias_ptr,  # [entries] float64
    logits_ptr,
    kept_ptr,
    stride_row,
    TILE: tl.constexpr,
):
    row = tl.load(touched_ptr + 2 * tl.program_id(0))
    kept = tl.load(touched_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)
    index = tl.load(row_ptr + row * ROW_INTS)
    sequence = sequence_ptr + index * SEQUENCE_INTS
    setting = setting_ptr + index * SETTINGS
    first = tl.load(sequence + 10)
    end = tl.load(sequence + 11)
    entry = first + tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = entry < end
    token = tl.load(entry_ptr + entry * ENTRY_INTS, mask=mask, other=0)
    count = tl.load(entry_ptr + entry * ENTRY_INTS + 1, mask=mask, other=0)
    bits = tl.load(entry_ptr + entry * ENTRY_INTS + 2, mask=mask, other=0)
    first_row = tl.load(sequence)
    node = row - first_row - 1
    while node >= 0:
        node_row = row_ptr + (first_row + 1 + node) * ROW_INTS
        count += (token == tl.load(node_row + 1)).to(tl.int32)
        node = tl.load(node_row + 2)
    place = logits_ptr + row.to(tl.int64) * stride_row + token
    score = tl.load(place, mask=mask, other=0.0)
    tl.store(kept_ptr + kept + entry - first, score, mask=mask)
    is_short = tl.load(sequence + 8) + tl.load(row_ptr + row * ROW_INTS + 3) < tl.load(sequence + 9)
    score = tl.where(is_short & ((bits & 1) != 0), float("-inf"), score)
    score += tl.load(bias_ptr + entry, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(setting + 3).to(tl.float32)
    punished = tl.where(score > 0.0, score / factor, score * factor)
    score = tl.where(((bits & 2) != 0) | (count > 0), punished, score)
    loss = tl.load(setting + 4) * count + tl.load(setting + 5) * (count > 0)
    tl.store(place, score - loss.to(tl.float32), mask=mask)


@triton.jit
def restore_kernel(
    touched_ptr, sequence_ptr, row_ptr, entry_ptr, logits_ptr, kept_ptr, stride_row, TILE: tl.constexpr
):
    row = tl.load(touched_ptr + 2 * tl.program_id(0))
    kept = tl.load(touched_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)
    sequence = sequence_ptr + tl.load(row_ptr + row * ROW_INTS) * SEQUENCE_INTS
    first = tl.load(sequence + 10)
    entry = first + tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = entry < tl.load(sequence + 11)
    token = tl.load(entry_ptr + entry * ENTRY_INTS, mask=mask, other=0)
    score = tl.load(kept_ptr + kept + entry - first, mask=mask, other=0.0)
    tl.store(logits_ptr + row.to(tl.int64) * stride_row + token, score, mask=mask)
