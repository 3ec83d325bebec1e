"""Rotary embedding: what it must keep, and the scalings against transformers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.layers.rotary import Rotary
from engine.models.rope import LinearScaling, Llama3Scaling, RopeSpec

HEAD_DIM = 32
CPU = torch.device("cpu")


def rotate(rotary: Rotary, heads: torch.Tensor, *positions: int) -> torch.Tensor:
    return rotary.rotate(heads, rotary.angles(torch.tensor(positions)))


@settings(max_examples=30, deadline=None)
@given(first=st.integers(0, 2000), gap=st.integers(0, 500), shift=st.integers(0, 2000))
def test_scores_depend_on_distance_alone(first: int, gap: int, shift: int) -> None:
    rotary = Rotary(RopeSpec(), HEAD_DIM, CPU)
    query, key = torch.randn(2, 1, 1, HEAD_DIM, generator=torch.Generator().manual_seed(first))
    near = (rotate(rotary, query, first + gap) * rotate(rotary, key, first)).sum()
    far = (rotate(rotary, query, first + gap + shift) * rotate(rotary, key, first + shift)).sum()
    assert math.isclose(near, far, abs_tol=5e-3)
    assert math.isclose(rotate(rotary, query, first).norm(), query.norm(), rel_tol=1e-5)


def test_linear_scaling_is_shrunk_positions() -> None:
    heads = torch.randn(3, 2, HEAD_DIM)
    scaled = rotate(Rotary(RopeSpec(scaling=LinearScaling(4.0)), HEAD_DIM, CPU), heads, 0, 40, 400)
    plain = rotate(Rotary(RopeSpec(), HEAD_DIM, CPU), heads, 0, 10, 100)
    torch.testing.assert_close(scaled, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("factor", "theta"), [(8.0, 500000.0), (32.0, 500000.0), (2.0, 10000.0)])
def test_llama3_scaling_equals_transformers(factor: float, theta: float) -> None:
    scaling = Llama3Scaling(factor, 1.0, 4.0, 8192)
    config = LlamaConfig(
        hidden_size=64 * 4,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_theta=theta,
        rope_scaling={
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    positions = torch.tensor([0, 1, 7, 100, 5000])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    own_cos, own_sin = Rotary(RopeSpec(theta, scaling), 64, CPU).angles(positions)
    torch.testing.assert_close(own_cos[:, 0], cos[0], atol=2e-3, rtol=0)
    torch.testing.assert_close(own_sin[:, 0, 32:], sin[0, :, 32:], atol=2e-3, rtol=0)
    torch.testing.assert_close(own_sin[:, 0, :32], -sin[0, :, :32], atol=2e-3, rtol=0)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan])
def test_impossible_scalings_are_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        LinearScaling(factor)
    with pytest.raises(ValueError, match="must be above 0"):
        Llama3Scaling(factor, 1.0, 4.0, 8192)
    with pytest.raises(ValueError, match="must be below high_freq_factor"):
        Llama3Scaling(8.0, 4.0, 4.0, 8192)
