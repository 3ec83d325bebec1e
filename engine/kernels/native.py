"""The C kernels as Python functions over torch tensors, without copies."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_double, c_int64, c_void_p
from functools import cache
from typing import TypeAlias

import torch

from engine.batch import ForwardBatch

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
MAX_HEAD_DIM = 256
MAX_GROUP = 64


class KvLayer(ctypes.Structure):
    """kv_layer in cpu/attention.h."""

    _fields_ = [
        ("key", c_void_p),
        ("value", c_void_p),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
        ("type", c_int64),
    ]


class RaggedBatch(ctypes.Structure):
    """ragged_batch in cpu/attention.h."""

    _fields_ = [
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("visible", c_void_p),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("num_sequences", c_int64),
        ("num_tokens", c_int64),
    ]


class HeadRows(ctypes.Structure):
    """head_rows in cpu/attention.h."""

    _fields_ = [("data", c_void_p), ("stride", c_int64), ("num_heads", c_int64), ("type", c_int64)]


Library: TypeAlias = ctypes.CDLL


@cache
def load_library() -> Library | None:
    """The compiled kernels, built on first use, or None where they cannot be had.

    Loaded once per process; the handle never changes. torch is imported above, so that its OpenMP
    runtime is there for the library to bind to.
    """
    from engine.kernels.build import build  # here, so that `python -m engine.kernels.build` runs it once

    path = build().library
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # built against another OpenMP runtime than this torch brings
        return None
    declare(library)
    return library


def declare(library: Library) -> None:
    """State the signatures of the C functions."""
    from engine.kernels import (
        native_choose,
        native_decoder,
        native_draft,
    )  # here, since they build on this module

    library.specgate_write_kv.argtypes = [
        POINTER(HeadRows),
        POINTER(HeadRows),
        POINTER(KvLayer),
        POINTER(RaggedBatch),
        c_int64,
    ]
    library.specgate_write_kv.restype = None
    library.specgate_paged_attention.argtypes = [
        POINTER(HeadRows),
        POINTER(HeadRows),
        POINTER(KvLayer),
        POINTER(RaggedBatch),
        c_double,
        c_int64,
    ]
    library.specgate_paged_attention.restype = c_int64
    native_decoder.declare_products(library)
    native_decoder.declare_decoder(library)
    native_draft.declare_draft(library)
    native_choose.declare_choose(library)


def supports(query_dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int = 1, group: int = 1) -> bool:
    """True where the C kernels cover these types and sizes."""
    known = query_dtype in _TYPES and cache_dtype in _TYPES
    return known and head_dim <= MAX_HEAD_DIM and group <= MAX_GROUP


def write_kv(
    library: ctypes.CDLL,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """`reference.write_kv` in C."""
    key, value, slots = _rows_of_heads(key), _rows_of_heads(value), slots.contiguous()
    batch = RaggedBatch(slots=slots.data_ptr(), num_tokens=slots.numel())
    library.specgate_write_kv(
        byref(_head_rows(key)),
        byref(_head_rows(value)),
        byref(kv_layer(key_cache, value_cache)),
        byref(batch),
        torch.get_num_threads(),
    )


def paged_attention(
    library: ctypes.CDLL,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
) -> torch.Tensor:
    """`reference.paged_attention` in C."""
    query = _rows_of_heads(query)
    out = torch.empty(query.shape, dtype=query.dtype)
    if query.shape[0] == 0:
        return out
    ragged, _held = describe_batch(batch)
    failed = library.specgate_paged_attention(
        byref(_head_rows(query)),
        byref(_head_rows(out)),
        byref(kv_layer(key_cache, value_cache)),
        byref(ragged),
        scale,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("paged attention could not get its scratch memory")
    return out


def describe_batch(batch: ForwardBatch) -> tuple[RaggedBatch, tuple[torch.Tensor | None, ...]]:
    """The batch as the kernels read it, and the tensors that must live as long as it is read."""
    positions, slots = batch.positions.contiguous(), batch.slots.contiguous()
    query_start, context_lens = batch.query_start.contiguous(), batch.context_lens.contiguous()
    tables = batch.block_tables if batch.block_tables.stride(-1) == 1 else batch.block_tables.contiguous()
    visible = None if batch.visible is None else batch.visible.contiguous()
    struct = RaggedBatch(
        positions.data_ptr(),
        slots.data_ptr(),
        None if visible is None else visible.data_ptr(),
        query_start.data_ptr(),
        context_lens.data_ptr(),
        tables.data_ptr(),
        tables.stride(0),
        context_lens.numel(),
        positions.numel(),
    )
    return struct, (positions, slots, visible, query_start, context_lens, tables)


def _rows_of_heads(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] whose tokens may be strided (a slice of a fused projection)."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _head_rows(x: torch.Tensor) -> HeadRows:
    return HeadRows(x.data_ptr(), x.stride(0), x.shape[1], _TYPES[x.dtype])


def kv_layer(key_cache: torch.Tensor, value_cache: torch.Tensor) -> KvLayer:
    """One layer's cache as the kernels read it."""
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    return KvLayer(
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        num_kv_heads,
        block_size,
        head_dim,
        _TYPES[key_cache.dtype],
    )
