"""What a layer does to whole rows between its products: residual and norm, SiLU and gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import power_of_2

_SILU_TILE = 1024


@triton.jit
def add_norm_kernel(
    x_ptr,  # [rows, num_features], replaced by x + delta where HAS_DELTA
    delta_ptr,
    weight_ptr,
    out_ptr,
    eps,
    num_features,
    FEATURES: tl.constexpr,  # num_features rounded up to a power of 2
    HAS_DELTA: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, FEATURES)
    mask = feature < num_features
    place = row * num_features + feature
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + place, mask=mask, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + place, mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(dtype)
        tl.store(x_ptr + place, x, mask=mask)
    x = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / num_features + eps)
    weight = tl.load(weight_ptr + feature, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (x * factor * weight).to(out_ptr.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.add_rms_norm`; the sum takes the place of `x`."""
    num_rows, num_features = x.shape
    out = torch.empty_like(x)
    features = power_of_2(num_features)
    add_norm_kernel[(num_rows,)](
        x,
        delta if delta is not None else x,
        weight,
        out,
        eps,
        num_features,
        FEATURES=features,
        HAS_DELTA=delta is not None,
        num_warps=max(1, min(16, features // 512)),
    )
    return x, out


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, num_features, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = feature < num_features
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * 2 * num_features + feature, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * num_features + num_features + feature, mask=mask, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * num_features + feature, (silu * up.to(tl.float32)).to(dtype), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`reference.silu_mul`: [rows, 2 * features] -> [rows, features]."""
    num_rows, twice = gate_up.shape
    out = gate_up.new_empty((num_rows, twice // 2))
    grid = (num_rows, triton.cdiv(twice // 2, _SILU_TILE))
    silu_mul_kernel[grid](gate_up, out, twice // 2, TILE=_SILU_TILE, num_warps=4)
    return out
