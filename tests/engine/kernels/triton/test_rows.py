"""Norms, rotary with KV write, SiLU and compaction in Triton against the readable reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from engine.kernels import reference
from engine.kernels.triton import compact, rotary, rows
from engine.kernels.triton.launch import is_interpreted

CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2.4e-2, "atol": 2e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize(("num_rows", "num_features"), [(1, 576), (5, 64), (3, 2048), (2, 4100)])
@pytest.mark.parametrize("has_delta", [False, True])
def test_add_rms_norm(
    dtype: torch.dtype, num_rows: int, num_features: int, has_delta: bool, device: torch.device
) -> None:
    torch.manual_seed(1)
    x, delta = (3 * torch.randn(2, num_rows, num_features)).to(device, dtype)
    weight = torch.randn(num_features).to(device, dtype)
    total, normed = reference.add_rms_norm(x, delta if has_delta else None, weight, 1e-5)
    got_total, got = rows.add_rms_norm(x.clone(), delta if has_delta else None, weight, 1e-5)
    # The interpreter cuts bfloat16 off instead of rounding it.
    is_rounded = dtype != torch.bfloat16 or not is_interpreted()
    torch.testing.assert_close(got_total, total, **({"rtol": 0, "atol": 0} if is_rounded else CLOSE[dtype]))
    torch.testing.assert_close(got, normed, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize(("num_rows", "num_features"), [(1, 8), (4, 1536), (3, 1030)])
def test_silu_mul(dtype: torch.dtype, num_rows: int, num_features: int, device: torch.device) -> None:
    torch.manual_seed(2)
    gate_up = (4 * torch.randn(num_rows, 2 * num_features)).to(device, dtype)
    torch.testing.assert_close(rows.silu_mul(gate_up), reference.silu_mul(gate_up), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 24), (14, 2, 80)])
def test_rotate_and_write(
    dtype: torch.dtype,
    has_norms: bool,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
) -> None:
    torch.manual_seed(3)
    num_tokens, block_size = 7, 8
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(device, dtype)
    angle = torch.rand(num_tokens, 1, head_dim, device=device) * 100
    signs = torch.ones(head_dim, device=device)
    signs[: head_dim // 2] = -1
    angles = (angle.cos(), angle.sin() * signs)
    norms = tuple(torch.randn(2, head_dim).to(device, dtype)) if has_norms else None
    slots = torch.randperm(5 * block_size)[:num_tokens].to(device)
    shape = (5, num_kv_heads, block_size, head_dim)
    expected_cache = tuple(torch.zeros(2, *shape, device=device, dtype=dtype))
    cache = tuple(torch.zeros(2, *shape, device=device, dtype=dtype))
    expected = reference.rotate_and_write(heads, angles, norms, 1e-6, expected_cache, slots)
    got = rotary.rotate_and_write(heads.clone(), angles, norms, 1e-6, cache, slots)
    torch.testing.assert_close(got, expected, **CLOSE[dtype])
    torch.testing.assert_close(cache[0], expected_cache[0], **CLOSE[dtype])
    assert torch.equal(cache[1], expected_cache[1])


def test_compact_kv_moves_all_layers_and_chains_of_moves(device: torch.device) -> None:
    torch.manual_seed(4)
    key, value = torch.randn(2, 3, 6, 2, 4, 24, device=device)
    # In sequence 0 slot 5 is read by one move and written by another; sequence 1 moves nothing.
    source = torch.tensor([[5, 7, 9], [-1, -1, -1], [20, 21, -1]], device=device)
    target = torch.tensor([[4, 5, 6], [0, 0, 0], [20, 19, 0]], device=device)
    expected_key, expected_value = key.clone(), value.clone()
    reference.compact_kv(expected_key, expected_value, source, target)
    compact.compact_kv(key, value, source, target)
    assert torch.equal(key, expected_key)
    assert torch.equal(value, expected_value)
    assert not torch.equal(key[:, 1, :, 0], key[:, 1, :, 1])


def test_compact_kv_of_nothing(device: torch.device) -> None:
    key, value = torch.randn(2, 1, 2, 1, 4, 8, device=device)
    before = key.clone()
    nothing = torch.zeros((0, 0), dtype=torch.int64, device=device)
    compact.compact_kv(key, value, nothing, nothing)
    assert torch.equal(key, before)
