"""The KV tensors, in blocks. Which block belongs to whom is `block_manager`'s business."""

from __future__ import annotations

import torch


class PagedCache:
    """Keys and values of all layers: `key[l]`, `value[l]` are
    [num_blocks, num_kv_heads, block_size, head_dim], so that a kernel reads one head's block as
    one contiguous piece.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        self.key = torch.zeros(shape, dtype=dtype, device=device)
        self.value = torch.zeros(shape, dtype=dtype, device=device)
        self.num_blocks = num_blocks
        self.block_size = block_size

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return 2 * self.key.numel() * self.key.element_size()
