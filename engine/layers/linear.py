"""The one projection class. Other weight formats replace it without the model noticing."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Projection(Protocol):
    """y = x W^T + b for rows x: [..., in_features] -> [..., out_features]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        ...


class Linear:
    """A dense projection. weight: [out_features, in_features]; bias: [out_features] or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return F.linear(x, self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
