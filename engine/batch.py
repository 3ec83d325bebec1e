"""One step's tensors: what the model forward needs and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.kv.block_manager import BlockTable


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A ragged batch over `num_sequences` sequences with `num_tokens` new tokens in all.

    The new tokens of sequence s are rows query_start[s]:query_start[s+1]; they are the last ones
    of its `context_lens[s]` KV tokens (the new tokens' own K/V is written before attention reads).
    Token at position p of sequence s lives in block `block_tables[s, p // block_size]` at offset
    `p % block_size`. Attention is causal by position.
    """

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slots: torch.Tensor  # [num_tokens] int64, block_id * block_size + offset
    query_start: torch.Tensor  # [num_sequences + 1] int32
    context_lens: torch.Tensor  # [num_sequences] int32, new tokens included
    block_tables: torch.Tensor  # [num_sequences, max_blocks] int32, padded with 0
    logits_rows: torch.Tensor  # [num_rows] int64, rows of the forward whose logits are wanted
    # For draft trees: [num_tokens] int64 or None. 0 means causal by position. Otherwise the token sees
    # the sequence's KV tokens before this step and, of its new tokens, those whose bit is set (bit i:
    # the i-th; its own included); new token i is KV token context_len - num_new + i, whatever its position.
    visible: torch.Tensor | None = None
    # Upper bounds that kernels choose their shapes by, so that they need not look at the device; 0: unknown.
    max_new_tokens: int = 0  # of one sequence
    max_context: int = 0  # largest of context_lens


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One sequence's part of a batch, in plain numbers: new tokens, where they start, its blocks.

    Logits are wanted for the last `num_logits` of its new tokens.
    """

    token_ids: Sequence[int]
    start: int  # position of the first new token, which is also the number of tokens cached before
    block_table: BlockTable[int]
    num_logits: int


def build_batch(rows: Sequence[BatchRow], block_size: int, device: torch.device) -> ForwardBatch:
    """The tensors of one step. Work over sequences is done on whole arrays."""
    lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    num_logits = np.array([row.num_logits for row in rows], dtype=np.int64)
    query_start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])
    owners = np.repeat(np.arange(len(rows)), lengths)  # [num_tokens] the sequence of each token
    positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, lengths)
    tables = pad_block_tables([row.block_table for row in rows])
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    # The last num_logits rows of each sequence: count up to its end from num_logits before it.
    ends = np.cumsum(num_logits)
    logits_rows = np.arange(num_logits.sum()) + np.repeat(query_start[1:] - ends, num_logits)
    token_ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, query_start[-1])

    words = (token_ids, positions, slots, logits_rows)
    numbers = (query_start, starts + lengths, tables)
    token_ids_, positions_, slots_, logits_rows_ = _upload(words, np.int64, device)
    query_start_, context_lens_, tables_ = _upload(numbers, np.int32, device)
    return ForwardBatch(
        token_ids=token_ids_,
        positions=positions_,
        slots=slots_,
        query_start=query_start_,
        context_lens=context_lens_,
        block_tables=tables_,
        logits_rows=logits_rows_,
        max_new_tokens=int(lengths.max(initial=0)),
        max_context=int((starts + lengths).max(initial=0)),
    )


def pad_block_tables(tables: Sequence[BlockTable[int]]) -> np.ndarray:
    """Block tables as one matrix, padded with 0: [num_sequences, max_blocks] int32."""
    lengths = np.array([len(table) for table in tables])
    padded = np.zeros((len(tables), lengths.max()), dtype=np.int32)
    flat = np.frombuffer(b"".join([table.tobytes() for table in tables]), dtype=np.int32)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = flat
    return padded


def _upload(
    arrays: Sequence[np.ndarray], dtype: type[np.generic], device: torch.device
) -> list[torch.Tensor]:
    """The arrays as tensors of `dtype`: on a GPU views of one buffer, sent in one transfer."""
    if device.type == "cpu":
        return [torch.from_numpy(array.astype(dtype, copy=False)) for array in arrays]
    return upload_together(arrays, dtype, device)


def upload_together(
    arrays: Sequence[np.ndarray], dtype: type[np.generic], device: torch.device
) -> list[torch.Tensor]:
    """The arrays in one transfer that nobody waits for, each in its own shape.

    Each begins at a multiple of 16 bytes: kernels are compiled anew for pointers that do not.
    """
    step = 16 // np.dtype(dtype).itemsize
    rooms = [-(-array.size // step) * step for array in arrays]
    flat = np.zeros(sum(rooms), dtype=dtype)
    starts = np.cumsum([0, *rooms])
    for start, array in zip(starts, arrays, strict=False):
        flat[start : start + array.size] = array.reshape(-1)
    sent = torch.from_numpy(flat)
    if device.type == "cuda":
        sent = sent.pin_memory().to(device, non_blocking=True)
    parts = [sent[start : start + array.size] for start, array in zip(starts.tolist(), arrays, strict=False)]
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
