"""The operations in plain torch, to be read and to be compared against. Correct first, slow.

Every faster implementation in this package must agree with these functions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.batch import ForwardBatch


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store each new token's key and value in its slot of one layer's cache, in place.

    key, value: [num_tokens, num_kv_heads, head_dim];
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim];
    slots: [num_tokens] int64, block_id * block_size + offset.
    """
    block_size = key_cache.shape[2]
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    offsets = slots % block_size
    # Two index tensors with a slice between them put the indexed axis first: [T, Hkv, D].
    key_cache[blocks, :, offsets] = key.to(key_cache.dtype)
    value_cache[blocks, :, offsets] = value.to(value_cache.dtype)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
) -> torch.Tensor:
    """Causal attention of a ragged batch over block tables, softmax in float32.

    query: [num_tokens, num_heads, head_dim]; caches as in `write_kv`, the batch's own keys and
    values already written. num_heads is a multiple of num_kv_heads (grouped queries): query head
    h reads KV head h // (num_heads // num_kv_heads). Returns [num_tokens, num_heads, head_dim]
    in the query's dtype.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[1]
    group = num_heads // num_kv_heads
    out = torch.empty_like(query)
    starts = batch.query_start.tolist()
    for s, context_len in enumerate(batch.context_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        num_blocks = -(-context_len // key_cache.shape[2])
        table = batch.block_tables[s, :num_blocks].long()
        # [blocks, Hkv, size, D] -> [Hkv, 1, context, D]
        keys = key_cache[table].transpose(0, 1).reshape(num_kv_heads, 1, -1, head_dim)
        values = value_cache[table].transpose(0, 1).reshape(num_kv_heads, 1, -1, head_dim)
        keys = keys[:, :, :context_len].float()
        values = values[:, :, :context_len].float()
        q = query[rows].float().reshape(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        scores = q @ keys.transpose(-1, -2) * scale  # [Hkv, group, new tokens, context]
        at = torch.arange(context_len, device=query.device)
        seen = at[None, :] <= batch.positions[rows][:, None]  # [new tokens, context]
        if batch.visible is not None:
            seen = torch.where(batch.visible[rows][:, None] == 0, seen, _tree_mask(batch, rows, context_len))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        attended = (weights @ values).permute(2, 0, 1, 3)  # [new tokens, Hkv, group, D]
        out[rows] = attended.flatten(1, 2).to(query.dtype)
    return out


def _tree_mask(batch: ForwardBatch, rows: slice, context_len: int) -> torch.Tensor:
    """[new tokens, context] bool: KV tokens each row of one sequence sees by `visible`."""
    assert batch.visible is not None
    bits = batch.visible[rows]
    first_new = context_len - bits.numel()
    shifts = (torch.arange(context_len, device=bits.device) - first_new).clamp(0, 63)
    marked = (bits[:, None] >> shifts[None, :]) & 1 == 1
    marked[:, :first_new] = True
    return marked


QUANT_BLOCK = 32
"""Input features that share a scale."""


def rounded_to_8_bits(x: torch.Tensor) -> torch.Tensor:
    """Each row's blocks of 32 features on 255 even levels up to the block's largest magnitude.

    [rows, features] -> the same, dequantised.
    """
    padded = F.pad(x.float(), (0, -x.shape[-1] % QUANT_BLOCK))
    blocks = padded.unflatten(-1, (-1, QUANT_BLOCK))  # type: ignore[no-untyped-call]
    scales = blocks.abs().amax(dim=-1, keepdim=True) / 127.0
    levels = torch.where(scales > 0, blocks / scales, 0.0).round()
    rounded: torch.Tensor = (levels * scales).flatten(-2)[..., : x.shape[-1]]
    return rounded


def quantised_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b with activations in 8 bits. x: [rows, in]; weight: [out, in] as dequantised."""
    return F.linear(rounded_to_8_bits(x), weight, bias)


def rotate_and_write(
    heads: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cache: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    write: Callable[..., None] = write_kv,
) -> torch.Tensor:
    """Norm and rotate the query and key heads of a fused product, write keys and values.

    heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim] (query, key, value); angles:
    cosines and signed sines, each [num_tokens, 1, head_dim] float32 (see `engine.layers.rotary`);
    norms: query's and key's weights [head_dim], or None; cache and slots as for `write_kv`.
    Returns the queries, [num_tokens, num_heads, head_dim]; `write` does the writing.
    """
    num_kv_heads, head_dim = cache[0].shape[1], heads.shape[2]
    num_rotated = heads.shape[1] - num_kv_heads
    num_heads = num_rotated - num_kv_heads
    rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
    if norms is not None:
        query = F.rms_norm(rotated[:, :num_heads], (head_dim,), norms[0], eps)
        key = F.rms_norm(rotated[:, num_heads:], (head_dim,), norms[1], eps)
        rotated = torch.cat((query, key), dim=1)
    cos, signed_sin = angles
    rolled = rotated.roll(head_dim // 2, dims=-1)
    rotated = torch.addcmul(rotated * cos, rolled, signed_sin).to(heads.dtype)
    write(rotated[:, num_heads:], value, *cache, slots)
    return rotated[:, :num_heads]


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream x + delta and its norm, both [rows, features]; `delta` None adds nothing."""
    total = x if delta is None else x + delta
    return total, F.rms_norm(total, weight.shape, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of a fused product: [rows, 2 * features] -> [rows, features]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def compact_kv(key: torch.Tensor, value: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Move tokens' keys and values between slots of all layers, in place, as if all at once.

    key, value: [num_layers, num_blocks, num_kv_heads, block_size, head_dim]; source, target:
    [num_sequences, max_moves] int64 slots, source -1 for no move. Of one sequence a target may be
    another move's source; sequences do not share slots.
    """
    block_size = key.shape[3]
    moved = source.flatten() >= 0
    old, new = source.flatten()[moved], target.flatten()[moved]
    for tensor in (key, value):
        tensor[:, new // block_size, :, new % block_size] = tensor[:, old // block_size, :, old % block_size]
