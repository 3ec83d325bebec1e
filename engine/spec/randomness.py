"""Noise that is a function of (seed, position) only, whatever the batch, policy or device.

Philox4x32-10 (Salmon et al., SC'11) with key = seed and counter = (token or draw index,
position, stream). Two streams never share a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RandomKey:
    """The randomness of one sequence. `position` is always the index of the token to be decided
    in the sequence (prompt included)."""

    seed: int
    is_seeded: bool = False  # the caller gave the seed: the keyed rule applies throughout

    def gumbel(self, position: int, vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Standard Gumbel noise for every token id: [vocab_size] float32."""
        raise NotImplementedError

    def uniform(self, position: int, num: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """`num` numbers in [0, 1) for acceptance tests at `position`: [num] float64-safe float32."""
        raise NotImplementedError
