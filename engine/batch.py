"""One step's tensors: what the model forward needs and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
