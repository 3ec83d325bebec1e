"""After a tree was judged: the accepted nodes' keys and values move together, in all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import power_of_2


@triton.jit(do_not_specialize=["max_moves"])
def compact_kernel(
    key_ptr,  # [layers, blocks, kv heads, block size, HEAD_DIM]
    value_ptr,
    from_ptr,  # [sequences, max_moves] int64 slots; moves past a sequence's last are -1
    to_ptr,
    max_moves,
    stride_layer,
    stride_block,
    stride_kv_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MOVES: tl.constexpr,
):
    """One KV head of one layer of one sequence. All is read before anything is written: a move's
    target may be another's source."""
    sequence = tl.program_id(0)
    layer = (tl.program_id(1) // NUM_KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    move = tl.arange(0, MOVES)
    source = tl.load(from_ptr + sequence * max_moves + move, mask=move < max_moves, other=-1)
    target = tl.load(to_ptr + sequence * max_moves + move, mask=move < max_moves, other=-1)
    is_move = (source >= 0) & (source != target)
    dim = tl.arange(0, DIM)
    mask = is_move[:, None] & (dim < HEAD_DIM)[None, :]
    base = layer * stride_layer + kv_head * stride_kv_head
    source = base + source // BLOCK_SIZE * stride_block + source % BLOCK_SIZE * HEAD_DIM
    target = base + target // BLOCK_SIZE * stride_block + target % BLOCK_SIZE * HEAD_DIM
    keys = tl.load(key_ptr + source[:, None] + dim[None, :], mask=mask, other=0.0)
    values = tl.load(value_ptr + source[:, None] + dim[None, :], mask=mask, other=0.0)
    tl.debug_barrier()
    tl.store(key_ptr + target[:, None] + dim[None, :], keys, mask=mask)
    tl.store(value_ptr + target[:, None] + dim[None, :], values, mask=mask)


def compact_kv(key: torch.Tensor, value: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """`reference.compact_kv`: slots `source` to slots `target`, [sequences, max_moves], -1 for none."""
    num_layers, _, num_kv_heads, block_size, head_dim = key.shape
    num_sequences, max_moves = source.shape
    if num_sequences == 0 or max_moves == 0:
        return
    compact_kernel[(num_sequences, num_layers * num_kv_heads)](
        key,
        value,
        source,
        target,
        max_moves,
        key.stride(0),
        key.stride(1),
        key.stride(2),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        DIM=power_of_2(head_dim),
        MOVES=power_of_2(max_moves),
        num_warps=4,
    )
