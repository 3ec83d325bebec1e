"""The CPU operations in whole-array torch, for machines without a C compiler.

Correct and free of Python loops over sequences, but it gathers each sequence's keys and values,
padded to the longest context of the batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from engine.batch import ForwardBatch


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
) -> torch.Tensor:
    """`reference.paged_attention` for all sequences at once."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    new_lens = batch.query_start.diff().long()
    max_new, max_context = int(new_lens.max()), int(batch.context_lens.max())
    tables = batch.block_tables[:, : -(-max_context // block_size)].long()
    # [S, blocks, Hkv, size, D] -> [S, Hkv, context, D]
    keys = key_cache[tables].transpose(1, 2).flatten(2, 3)[:, :, :max_context].to(query.dtype)
    values = value_cache[tables].transpose(1, 2).flatten(2, 3)[:, :, :max_context].to(query.dtype)

    owner = torch.repeat_interleave(torch.arange(len(new_lens), device=query.device), new_lens)
    if len(owner) < num_tokens:  # tokens past the last sequence's are padding: whatever comes out
        out = query.new_zeros(query.shape)
        out[: len(owner)] = paged_attention(
            query[: len(owner)], key_cache, value_cache, _first_tokens(batch, len(owner)), scale
        )
        return out
    row = torch.arange(num_tokens, device=query.device) - batch.query_start[:-1].long()[owner]
    at = torch.arange(max_context, device=query.device)
    seen = at <= batch.positions[:, None]  # [tokens, context]
    if batch.visible is not None:
        first_new = (batch.context_lens.long() - new_lens)[owner][:, None]
        marked = (batch.visible[:, None] >> (at - first_new).clamp(0, 63)) & 1 == 1
        marked = (marked | (at < first_new)) & (at < first_new + new_lens[owner][:, None])
        seen = torch.where(batch.visible[:, None] == 0, seen, marked)

    padded = query.new_zeros(len(new_lens), max_new, num_heads, head_dim)
    padded[owner, row] = query
    mask = torch.ones(len(new_lens), 1, max_new, max_context, dtype=torch.bool, device=query.device)
    mask[owner, 0, row] = seen  # padding rows see everything and are thrown away
    out = F.scaled_dot_product_attention(
        padded.transpose(1, 2),
        keys,
        values,
        attn_mask=mask,
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
    )
    return out.transpose(1, 2)[owner, row]


def _first_tokens(batch: ForwardBatch, num_tokens: int) -> ForwardBatch:
    """The batch without the tokens from `num_tokens` on."""
    visible = None if batch.visible is None else batch.visible[:num_tokens]
    return replace(batch, positions=batch.positions[:num_tokens], visible=visible)
