"""Paged attention over a ragged batch: prompt chunks, decodes and tree windows in one launch.

The query heads that share a KV head are stacked with the tokens of a tile, so that each key and
value is read once for all of them. Long contexts are cut into pieces of fixed length that programs
work on side by side (the pieces depend on no other sequence, so neither do the sums), and a second
kernel joins them. Online softmax as in Milakov and Gimelshein, arXiv:1805.02867; tiles as in
FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.batch import ForwardBatch
from engine.kernels.triton.launch import is_interpreted, power_of_2

SPLIT_TOKENS = 1024
"""KV tokens that one program reads, where a context is cut up."""
MAX_SPLITS = 32
MAX_SPLIT_QUERY = 64
"""Up to this many new tokens a sequence the context is cut; beyond it tiles are many anyway."""

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _last_at_most(start_ptr, number, num_sequences, TILE: tl.constexpr):
    """The last sequence s with start[s] // TILE + s * (TILE > 1) <= number, by bisection."""
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        first = tl.load(start_ptr + middle) // TILE
        if TILE > 1:
            first += middle
        if first <= number:
            low = middle + 1
        else:
            high = middle
    return tl.maximum(low - 1, 0)


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """total + a b in float32. The interpreter cannot multiply bfloat16; widening changes no product."""
    if IS_INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "split_tokens", "stride_table"])
def attention_kernel(
    out_ptr,  # [tokens, heads, HEAD_DIM]
    part_ptr,  # [tokens, heads, NUM_SPLITS, HEAD_DIM] float32, where NUM_SPLITS > 1
    stat_ptr,  # [2, tokens, heads, NUM_SPLITS] float32: maxima (base 2), sums
    query_ptr,
    key_ptr,  # [blocks, kv heads, BLOCK_SIZE, HEAD_DIM], as value_ptr
    value_ptr,
    table_ptr,
    context_ptr,
    start_ptr,
    position_ptr,
    visible_ptr,
    scale,
    num_sequences,
    num_tokens,
    split_tokens,
    stride_query_token,
    stride_query_head,
    stride_table,
    stride_block,
    stride_kv_head,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM rounded up to a power of 2
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_TREE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = _last_at_most(start_ptr, tile, num_sequences, TILE_TOKENS)
    start = tl.load(start_ptr + sequence)
    num_new = tl.load(start_ptr + sequence + 1) - start
    first = (tile - (start // TILE_TOKENS + sequence)) * TILE_TOKENS if TILE_TOKENS > 1 else tile - start
    context = tl.load(context_ptr + sequence)
    if first >= num_new:
        return
    if split * split_tokens >= context:
        return

    row = tl.arange(0, TILE_ROWS)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (token < num_new) & (row < TILE_TOKENS * GROUP)
    token = start + token
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    query = tl.load(
        query_ptr
        + token[:, None].to(tl.int64) * stride_query_token
        + head[:, None] * stride_query_head
        + dim[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    query = query.to(key_ptr.dtype.element_ty)
    position = tl.load(position_ptr + token, mask=is_row, other=0).to(tl.int32)
    row_end = tl.where(is_row, position + 1, 0)
    if HAS_TREE:
        visible = tl.load(visible_ptr + token, mask=is_row, other=0)
        row_end = tl.where(is_row & (visible != 0), context, row_end)
    first_new = context - num_new
    low = split * split_tokens
    high = tl.minimum(tl.minimum(tl.max(row_end, axis=0), context), low + split_tokens)

    best = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([TILE_ROWS], dtype=tl.float32)
    attended = tl.zeros([TILE_ROWS, DIM], dtype=tl.float32)
    factor = scale * LOG2_E
    for begin in range(low, high, TILE_KEYS):
        at = begin + tl.arange(0, TILE_KEYS)
        is_key = at < high
        block = tl.load(table_ptr + sequence * stride_table + at // BLOCK_SIZE, mask=is_key, other=0).to(
            tl.int64
        )
        offset = block * stride_block + kv_head * stride_kv_head + (at % BLOCK_SIZE) * HEAD_DIM
        keys = tl.load(
            key_ptr + offset[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0
        )
        none = tl.zeros([TILE_ROWS, TILE_KEYS], dtype=tl.float32)
        scores = _dot(query, keys, none, PRECISION, IS_INTERPRETED) * factor
        seen = at[None, :] < row_end[:, None]
        if HAS_TREE:
            bit = at - first_new
            marked = ((visible[:, None] >> tl.minimum(tl.maximum(bit, 0), 63)[None, :].to(tl.int64)) & 1) == 1
            seen = seen & ((visible[:, None] == 0) | (bit[None, :] < 0) | marked)
        scores = tl.where(seen & is_key[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        pivot = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row that has seen nothing yet
        weights = tl.exp2(scores - pivot[:, None])
        decay = tl.exp2(best - pivot)
        values = tl.load(
            value_ptr + offset[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0
        )
        total = total * decay + tl.sum(weights, axis=1)
        attended = attended * decay[:, None]
        attended = _dot(weights.to(values.dtype), values, attended, PRECISION, IS_INTERPRETED)
        best = new_best

    place = token.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
    mask = is_row[:, None] & is_dim[None, :]
    if NUM_SPLITS == 1:
        attended = attended / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(
            out_ptr + place[:, None] * HEAD_DIM + dim[None, :],
            attended.to(out_ptr.dtype.element_ty),
            mask=mask,
        )
    else:
        place = place * NUM_SPLITS + split
        num_stats = num_tokens.to(tl.int64) * (NUM_KV_HEADS * GROUP * NUM_SPLITS)
        tl.store(part_ptr + place[:, None] * HEAD_DIM + dim[None, :], attended, mask=mask)
        tl.store(stat_ptr + place, best, mask=is_row)
        tl.store(stat_ptr + num_stats + place, total, mask=is_row)


@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "split_tokens"])
def join_kernel(
    out_ptr,
    part_ptr,
    stat_ptr,
    context_ptr,
    start_ptr,
    num_sequences,
    num_tokens,
    split_tokens,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,  # NUM_SPLITS rounded up to a power of 2
):
    """One head of one token: the pieces of its context weighed by their sums."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    sequence = _last_at_most(start_ptr, token, num_sequences, 1)
    context = tl.load(context_ptr + sequence)
    split = tl.arange(0, SPLITS)
    is_split = (split < NUM_SPLITS) & (split * split_tokens < context)
    dim = tl.arange(0, DIM)
    place = (token.to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS + split
    num_stats = num_tokens.to(tl.int64) * (NUM_HEADS * NUM_SPLITS)
    best = tl.load(stat_ptr + place, mask=is_split, other=float("-inf"))
    total = tl.load(stat_ptr + num_stats + place, mask=is_split, other=0.0)
    top = tl.max(best, axis=0)
    weight = tl.exp2(best - tl.where(top == float("-inf"), 0.0, top))
    whole = tl.sum(weight * total, axis=0)
    mask = is_split[:, None] & (dim < HEAD_DIM)[None, :]
    part = tl.load(part_ptr + place[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    result = tl.sum(part * weight[:, None], axis=0) / tl.where(whole > 0.0, whole, 1.0)
    out = out_ptr + (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
) -> torch.Tensor:
    """`reference.paged_attention`, without a look at any value on the device.

    The last dimension of `query` must be contiguous, and the caches wholly; sizes come from
    `batch.max_new_tokens` and `batch.max_context` where the batch knows them, else from shapes.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    num_sequences = batch.context_lens.shape[0]
    max_new = batch.max_new_tokens or num_tokens
    max_context = batch.max_context or batch.block_tables.shape[1] * block_size
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    tile_rows, tile_keys, num_warps, num_stages = tile_shape(
        max_new * group, group, head_dim, key_cache.dtype
    )
    tile_tokens = tile_rows // group
    num_splits, split_tokens = split_shape(max_new, max_context)
    part = stat = out
    if num_splits > 1:
        part = query.new_empty((num_tokens, num_heads, num_splits, head_dim), dtype=torch.float32)
        stat = query.new_empty((2, num_tokens, num_heads, num_splits), dtype=torch.float32)
    num_tiles = num_tokens // tile_tokens + num_sequences if tile_tokens > 1 else num_tokens
    dims = {"HEAD_DIM": head_dim, "DIM": max(16, power_of_2(head_dim))}
    attention_kernel[(num_tiles, num_kv_heads, num_splits)](
        out,
        part,
        stat,
        query,
        key_cache,
        value_cache,
        batch.block_tables,
        batch.context_lens,
        batch.query_start,
        batch.positions,
        batch.visible if batch.visible is not None else batch.positions,
        scale,
        num_sequences,
        num_tokens,
        split_tokens,
        query.stride(0),
        query.stride(1),
        batch.block_tables.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        TILE_ROWS=tile_rows,
        TILE_KEYS=tile_keys,
        HAS_TREE=batch.visible is not None,
        NUM_SPLITS=num_splits,
        PRECISION="ieee" if key_cache.dtype == torch.float32 else "tf32",
        IS_INTERPRETED=is_interpreted(),
        num_warps=num_warps,
        num_stages=num_stages,
        **dims,
    )
    if num_splits > 1:
        join_kernel[(num_tokens, num_heads)](
            out,
            part,
            stat,
            batch.context_lens,
            batch.query_start,
            num_sequences,
            num_tokens,
            split_tokens,
            NUM_HEADS=num_heads,
            NUM_SPLITS=num_splits,
            SPLITS=power_of_2(num_splits),
            num_warps=4,
            **dims,
        )
    return out


def tile_shape(num_rows: int, group: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows and keys of a tile, warps and pipeline stages for sequences of `num_rows` query rows.

    Tensor cores want 16 rows at least. Wide tiles for prompt chunks; float32 takes twice the room.
    """
    rows = max(16, power_of_2(group), min(64, power_of_2(num_rows)))
    is_wide = dtype == torch.float32 or head_dim > 128
    keys = 32 if is_wide else 64
    return rows, keys, 8 if rows * head_dim >= 64 * 128 else 4, 2 if is_wide else 3


def split_shape(max_new: int, max_context: int) -> tuple[int, int]:
    """Pieces that a context is cut into, and tokens in each; a function of the longest alone."""
    if max_new > MAX_SPLIT_QUERY:
        return 1, max(1, max_context)
    tokens = SPLIT_TOKENS
    while -(-max_context // tokens) > MAX_SPLITS:
        tokens *= 2
    return max(1, -(-max_context // tokens)), tokens
