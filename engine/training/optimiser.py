"""How a head's weights are moved: Muon for the matrices, AdamW for the norms; and their running mean.

Muon (Jordan et al. 2024, `torch.optim.Muon`) makes each matrix's step orthogonal. Its rate is scaled
to AdamW's step size (Moonlight, arXiv:2502.16982), so that one rate serves both.
"""

from __future__ import annotations

import copy
from typing import Any, Generic, TypeVar

import torch
from torch import nn

_Module = TypeVar("_Module", bound=nn.Module)


class Optimiser:
    """Two optimisers that are stepped, saved and loaded as one."""

    def __init__(
        self, module: nn.Module, *, learning_rate: float, weight_decay: float, is_muon: bool
    ) -> None:
        """`is_muon` False: AdamW for all."""
        self._rate = learning_rate
        matrices = [p for p in module.parameters() if p.ndim == 2]
        others = [p for p in module.parameters() if p.ndim != 2]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                others if is_muon else [*matrices, *others],
                lr=learning_rate,
                betas=(0.9, 0.95),
                weight_decay=weight_decay,
            )
        ]
        if is_muon:
            muon = torch.optim.Muon(
                matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            self._parts.append(muon)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for part in self._parts:
            part.zero_grad()

    def step(self, rate: float) -> None:
        """Move the weights, at `rate` of the learning rate."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self._rate * rate
            part.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """For `load_state_dict`."""
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, saved: list[dict[str, Any]]) -> None:
        """Go on from a `state_dict` of the same optimisers."""
        for part, state in zip(self._parts, saved, strict=True):
            part.load_state_dict(state)


class RunningMean(Generic[_Module]):
    """An exponential moving average of a module's weights: better than any of them while the rate is high."""

    def __init__(self, module: _Module, decay: float) -> None:
        """`decay` of the mean stays at each step; less in the first steps, when it holds little."""
        self.module = copy.deepcopy(module)
        self._decay = decay
        self._num_steps = 0

    @torch.no_grad()
    def update(self, module: _Module) -> None:
        """Take one step's weights in."""
        self._num_steps += 1
        decay = min(self._decay, self._num_steps / (self._num_steps + 10.0))
        for mean, value in zip(self.module.parameters(), module.parameters(), strict=True):
            mean.lerp_(value, 1.0 - decay)

    def state_dict(self) -> dict[str, Any]:
        """For `load_state_dict`."""
        return {"num_steps": self._num_steps, "module": self.module.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._num_steps = saved["num_steps"]
        self.module.load_state_dict(saved["module"])
