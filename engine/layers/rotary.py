"""Rotary position embedding, computed from positions: no table, so no length limit or memory."""

from __future__ import annotations

import torch

from engine.models.rope import RopeSpec


def rotary_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each rotated pair, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (spec.theta**exponents)
    if spec.scaling is not None:
        divisors = spec.scaling.divisors(spec.theta, head_dim)
        frequencies = frequencies / torch.tensor(divisors, dtype=torch.float32)
    return frequencies


class Rotary:
    """Rotates pairs (i, i + head_dim / 2) of each head (Su et al., arXiv:2104.09864)."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        frequencies = rotary_frequencies(spec, head_dim)
        self._frequencies = torch.cat((frequencies, frequencies)).to(device)  # [head_dim]
        # rotate(x) = x * cos + roll(x, half) * sin, with the first half's sines negated.
        signs = torch.ones(head_dim, dtype=torch.float32)
        signs[: head_dim // 2] = -1.0
        self._signs = signs.to(device)
        self._half = head_dim // 2

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [num_tokens] int64 -> cosines and signed sines, [num_tokens, 1, head_dim] float32.

        The same for every layer: compute once per forward.
        """
        angles = (positions.to(torch.float32)[:, None] * self._frequencies)[:, None, :]
        return angles.cos(), angles.sin() * self._signs

    def rotate(self, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """heads: [num_tokens, num_heads, head_dim] -> rotated in float32, returned in its own dtype."""
        cos, signed_sin = angles
        rolled = heads.roll(self._half, dims=-1)
        return torch.addcmul(heads * cos, rolled, signed_sin).to(heads.dtype)
