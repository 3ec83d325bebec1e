"""Rotary position settings. No torch.

Every supported scaling divides each rotary frequency by a constant, so a scaling is a tuple of
divisors, one per pair of dimensions: `frequency[i] = theta ** (-2 i / head_dim) / divisor[i]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over a whole head. `scaling` names where `divisors` come from."""

    theta: float = 10000.0
    scaling: str = "none"  # none, linear, llama3
    divisors: tuple[float, ...] | None = None  # [head_dim / 2]; None means all are 1


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling, by the names of config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def linear_divisors(factor: float, head_dim: int) -> tuple[float, ...]:
    """Positions shrunk by `factor` (Chen et al., arXiv:2306.15595)."""
    return (factor,) * (head_dim // 2)


def llama3_divisors(scaling: Llama3Scaling, theta: float, head_dim: int) -> tuple[float, ...]:
    """Slow frequencies divided by `factor`, fast ones kept, a smooth ramp between.

    "Slow" is judged by the number of rotations over the original context: below
    `low_freq_factor` rotations slow, above `high_freq_factor` fast (Llama 3.1 model card).
    """
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        rotations = scaling.original_max_position_embeddings / wavelength
        span = scaling.high_freq_factor - scaling.low_freq_factor
        keep = min(max((rotations - scaling.low_freq_factor) / span, 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - keep) / scaling.factor + keep))
    return tuple(divisors)
