"""Rotary position settings. No torch.

Every supported scaling divides each rotary frequency by a constant, so a scaling is a tuple of
divisors, one per pair of dimensions: `frequency[i] = theta ** (-2 i / head_dim) / divisor[i]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class RopeScaling(Protocol):
    """A way to stretch the context."""

    def divisors(self, theta: float, head_dim: int) -> tuple[float, ...]:
        """One divisor per rotary frequency, fastest first: head_dim / 2 of them."""
        ...


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over a whole head."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions shrunk by `factor` (Chen et al., arXiv:2306.15595)."""

    factor: float

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"factor is {self.factor}; it must be above 0")

    def divisors(self, theta: float, head_dim: int) -> tuple[float, ...]:
        """The factor, for every frequency."""
        return (self.factor,) * (head_dim // 2)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling, by the names of config.json (Llama 3.1 model card).

    Slow frequencies are divided by `factor`, fast ones kept, with a ramp between. "Slow" is
    judged by the rotations within the original context: below `low_freq_factor` slow, above
    `high_freq_factor` fast.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int  # tokens

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"factor is {self.factor}; it must be above 0")
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError("low_freq_factor must be below high_freq_factor")

    def divisors(self, theta: float, head_dim: int) -> tuple[float, ...]:
        """Between 1 (fast) and the factor (slow)."""
        span = self.high_freq_factor - self.low_freq_factor
        divisors = []
        for pair in range(head_dim // 2):
            wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
            rotations = self.original_max_position_embeddings / wavelength
            keep = min(max((rotations - self.low_freq_factor) / span, 0.0), 1.0)
            divisors.append(1.0 / ((1.0 - keep) / self.factor + keep))
        return tuple(divisors)


@dataclass(frozen=True, slots=True)
class StoredDivisors:
    """Divisors that the model file states outright (GGUF's rope_freqs: Llama 3's scaling)."""

    values: tuple[float, ...]  # [head_dim / 2]

    def divisors(self, theta: float, head_dim: int) -> tuple[float, ...]:
        """The stored values."""
        return self.values
