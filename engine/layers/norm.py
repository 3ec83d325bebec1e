"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels import add_rms_norm


class RMSNorm:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich, arXiv:1910.07467)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight  # [features]
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., features] -> the same shape and dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def after_adding(
        self, x: torch.Tensor, delta: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream x + delta ([rows, features]; None adds nothing) and its norm.

        May change `x`."""
        return add_rms_norm(x, delta, self.weight, self.eps)

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return self.weight.nbytes
