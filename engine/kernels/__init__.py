"""Hot operations of the target forward, and the one place that chooses an implementation.

`engine.kernels.reference` says what each operation means. Callers use the functions here and
never name an implementation; `kernels_in_use` tells them afterwards, for the step records.

On a CUDA device these are Triton kernels where Triton is installed, on the CPU compiled C where
there is a compiler, and else whole-array torch. The environment variable SPECGATE_KERNELS may say
otherwise: `torch` for neither, `triton` for Triton on the CPU too (under its interpreter, for tests).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.kernels import native, native_choose, reference, vectorised

if TYPE_CHECKING:
    from engine.sampling_state import LogitsRow
    from engine.spec.walk import Walk
    from engine.types import AcceptRule

__all__ = [
    "add_rms_norm",
    "choose_rows",
    "compact_kv",
    "fused_verify",
    "has_choose_rows",
    "kernels_in_use",
    "paged_attention",
    "rotate_and_write",
    "sampling_in_use",
    "silu_mul",
    "uses_triton",
    "write_kv",
]

CHOICE_VARIABLE = "SPECGATE_KERNELS"
_CHOICES = ("auto", "torch", "triton")


def uses_triton(device: torch.device) -> bool:
    """True where the operations here run as Triton kernels. ValueError for an unknown SPECGATE_KERNELS."""
    choice = os.environ.get(CHOICE_VARIABLE, "auto")
    if choice not in _CHOICES:
        raise ValueError(f"{CHOICE_VARIABLE} is {choice!r}; use one of {', '.join(_CHOICES)}")
    is_wanted = device.type == "cuda" if choice == "auto" else choice == "triton"
    return is_wanted and find_spec("triton") is not None


def _uses_c() -> bool:
    return os.environ.get(CHOICE_VARIABLE, "auto") == "auto"


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store new keys and values in one layer's cache; see `reference.write_kv`."""
    library = native.load_library() if key.device.type == "cpu" and _uses_c() else None
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
    if uses_triton(query.device):
        from engine.kernels.triton import attention

        return attention.paged_attention(query, key_cache, value_cache, batch, scale)
    library = native.load_library() if query.device.type == "cpu" and _uses_c() else None
    group = query.shape[1] // key_cache.shape[1]
    if library is not None and native.supports(query.dtype, key_cache.dtype, query.shape[2], group):
        return native.paged_attention(library, query, key_cache, value_cache, batch, scale)
    return vectorised.paged_attention(query, key_cache, value_cache, batch, scale)


def rotate_and_write(
    heads: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cache: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
) -> torch.Tensor:
    """Head norms, rotary embedding and KV write; see `reference.rotate_and_write`. May change `heads`."""
    if uses_triton(heads.device):
        from engine.kernels.triton import rotary

        return rotary.rotate_and_write(heads, angles, norms, eps, cache, slots)
    return reference.rotate_and_write(heads, angles, norms, eps, cache, slots, write=write_kv)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual stream and its norm; see `reference.add_rms_norm`. May change `x`."""
    if uses_triton(x.device):
        from engine.kernels.triton import rows

        return rows.add_rms_norm(x, delta, weight, eps)
    return reference.add_rms_norm(x, delta, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; see `reference.silu_mul`."""
    if uses_triton(gate_up.device):
        from engine.kernels.triton import rows

        return rows.silu_mul(gate_up)
    return reference.silu_mul(gate_up)


def compact_kv(key: torch.Tensor, value: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Move tokens between slots of all layers; see `reference.compact_kv`."""
    if uses_triton(key.device):
        from engine.kernels.triton import compact

        compact.compact_kv(key, value, source, target)
    else:
        reference.compact_kv(key, value, source, target)


def fused_verify(
    device: torch.device,
) -> Callable[[Sequence[Walk], Sequence[AcceptRule], torch.Tensor], None] | None:
    """The acceptance of whole batches in a few kernels, where there is one; see `engine.spec.verify`."""
    if not uses_triton(device):
        return None
    from engine.kernels.triton import verify

    return verify.decide


def sampling_in_use(device: torch.device) -> str:
    """Which implementation decides rows of float32 logits on this device, for step records."""
    if uses_triton(device):
        return "triton"
    return "c" if device.type == "cpu" and _uses_c() and native.load_library() is not None else "torch"


def has_choose_rows(logits: torch.Tensor) -> bool:
    """True where `choose_rows` can read these logits."""
    return sampling_in_use(logits.device) == "c" and logits.dtype == torch.float32 and logits.stride(1) == 1


def choose_rows(
    logits: torch.Tensor,
    rows: Sequence[LogitsRow],
    counters: np.ndarray,
    changes: Sequence[tuple[np.ndarray, np.ndarray] | None],
) -> list[int]:
    """The token each row decides by itself, no grammar among them; see `native_choose.choose_rows`."""
    library = native.load_library()
    assert library is not None
    return native_choose.choose_rows(library, logits, rows, counters, changes)


def kernels_in_use(device: torch.device, dtype: torch.dtype) -> str:
    """Names of the implementations that run for this device and KV dtype, for step records."""
    if uses_triton(device):
        return "attention=triton kv_write=triton verify=triton"
    may_use_c = device.type == "cpu" and _uses_c() and native.load_library() is not None
    if may_use_c and native.supports(dtype, dtype):
        return f"attention=c kv_write=c sampling={sampling_in_use(device)}"
    return "attention=torch kv_write=torch"
