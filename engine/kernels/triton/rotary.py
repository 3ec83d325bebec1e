"""Head norms, rotary embedding and KV write in one kernel, over the fused q, k, v product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import power_of_2


@triton.jit
def _head_norm(x1, x2, weight_ptr, half, is_half, eps, HALF_DIM: tl.constexpr, dtype: tl.constexpr):
    """RMS norm over each head's two halves, rounded to the model's type as torch does."""
    mean = (tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / (2 * HALF_DIM)
    factor = tl.rsqrt(mean + eps)[:, None]
    w1 = tl.load(weight_ptr + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(weight_ptr + HALF_DIM + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
    return (x1 * factor * w1).to(dtype).to(tl.float32), (x2 * factor * w2).to(dtype).to(tl.float32)


@triton.jit
def rotate_and_write_kernel(
    fused_ptr,  # [tokens, heads + 2 kv heads, 2 * HALF_DIM]; queries are rotated in place
    cos_ptr,  # [tokens, 2 * HALF_DIM] float32
    sin_ptr,  # the same, signed: the first half negated
    query_norm_ptr,
    key_norm_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_ptr,
    eps,
    stride_token,
    stride_block,
    stride_kv_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF_DIM: tl.constexpr,
    HALF: tl.constexpr,  # HALF_DIM rounded up to a power of 2
    TILE_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    half = tl.arange(0, HALF)
    is_half = half < HALF_DIM
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_half[None, :]
    place = fused_ptr + token.to(tl.int64) * stride_token + head[:, None] * (2 * HALF_DIM) + half[None, :]
    dtype: tl.constexpr = fused_ptr.dtype.element_ty
    x1 = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(place + HALF_DIM, mask=mask, other=0.0).to(tl.float32)
    y1, y2 = x1, x2
    if HAS_NORM:
        q1, q2 = _head_norm(x1, x2, query_norm_ptr, half, is_half, eps, HALF_DIM, dtype)
        k1, k2 = _head_norm(x1, x2, key_norm_ptr, half, is_half, eps, HALF_DIM, dtype)
        y1 = tl.where(is_query[:, None], q1, k1)
        y2 = tl.where(is_query[:, None], q2, k2)
    angle = token * (2 * HALF_DIM) + half
    cos1 = tl.load(cos_ptr + angle, mask=is_half, other=0.0)[None, :]
    cos2 = tl.load(cos_ptr + HALF_DIM + angle, mask=is_half, other=0.0)[None, :]
    sin1 = tl.load(sin_ptr + angle, mask=is_half, other=0.0)[None, :]
    sin2 = tl.load(sin_ptr + HALF_DIM + angle, mask=is_half, other=0.0)[None, :]
    z1 = y1 * cos1 + y2 * sin1
    z2 = y2 * cos2 + y1 * sin2
    tl.store(place, z1.to(dtype), mask=mask & is_query[:, None])
    tl.store(place + HALF_DIM, z2.to(dtype), mask=mask & is_query[:, None])

    slot = tl.load(slot_ptr + token)
    kv_head = tl.where(is_value, head - NUM_HEADS - NUM_KV_HEADS, head - NUM_HEADS).to(tl.int64)
    offset = slot // BLOCK_SIZE * stride_block + kv_head * stride_kv_head + slot % BLOCK_SIZE * (2 * HALF_DIM)
    offset = offset[:, None] + half[None, :]
    cache_dtype: tl.constexpr = key_cache_ptr.dtype.element_ty
    key_mask = mask & is_key[:, None]
    tl.store(key_cache_ptr + offset, z1.to(dtype).to(cache_dtype), mask=key_mask)
    tl.store(key_cache_ptr + offset + HALF_DIM, z2.to(dtype).to(cache_dtype), mask=key_mask)
    value_mask = mask & is_value[:, None]
    tl.store(value_cache_ptr + offset, x1.to(cache_dtype), mask=value_mask)
    tl.store(value_cache_ptr + offset + HALF_DIM, x2.to(cache_dtype), mask=value_mask)


def rotate_and_write(
    heads: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cache: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
) -> torch.Tensor:
    """`reference.rotate_and_write`; the queries are rotated in place and returned as a view."""
    num_tokens, num_fused, head_dim = heads.shape
    key_cache, value_cache = cache
    num_kv_heads, block_size = key_cache.shape[1:3]
    num_heads = num_fused - 2 * num_kv_heads
    tile_heads = min(8, power_of_2(num_fused))
    query_norm, key_norm = norms if norms is not None else (heads, heads)
    rotate_and_write_kernel[(num_tokens, triton.cdiv(num_fused, tile_heads))](
        heads,
        angles[0],
        angles[1],
        query_norm,
        key_norm,
        key_cache,
        value_cache,
        slots,
        eps,
        heads.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HALF_DIM=head_dim // 2,
        HALF=power_of_2(head_dim // 2),
        TILE_HEADS=tile_heads,
        HAS_NORM=norms is not None,
        num_warps=4,
    )
    return heads[:, :num_heads]
