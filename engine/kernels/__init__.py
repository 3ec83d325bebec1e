"""Hot operations of the target forward, and the one place that chooses an implementation.

`engine.kernels.reference` says what each operation means. Callers use the functions here and
never name an implementation; `kernels_in_use` tells them afterwards, for the step records.
"""

from __future__ import annotations

import torch

from engine.batch import ForwardBatch
from engine.kernels import native, reference, vectorised

__all__ = ["kernels_in_use", "paged_attention", "write_kv"]


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store new keys and values in one layer's cache; see `reference.write_kv`."""
    library = native.load_library() if key.device.type == "cpu" else None
    if library is not None and native.supports(key.dtype, key_cache.dtype):
        native.write_kv(library, key, value, key_cache, value_cache, slots)
    else:
        reference.write_kv(key, value, key_cache, value_cache, slots)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
) -> torch.Tensor:
    """Ragged causal attention over block tables; see `reference.paged_attention`."""
    if query.device.type != "cpu":
        return reference.paged_attention(query, key_cache, value_cache, batch, scale)
    library = native.load_library()
    group = query.shape[1] // key_cache.shape[1]
    if library is not None and native.supports(query.dtype, key_cache.dtype, query.shape[2], group):
        return native.paged_attention(library, query, key_cache, value_cache, batch, scale)
    return vectorised.paged_attention(query, key_cache, value_cache, batch, scale)


def kernels_in_use(device: torch.device, dtype: torch.dtype) -> str:
    """Names of the implementations that run for this device and KV dtype, for step records."""
    if device.type != "cpu":
        return "attention=reference kv_write=reference"
    if native.load_library() is not None and native.supports(dtype, dtype):
        return "attention=c kv_write=c"
    return "attention=torch kv_write=torch"
