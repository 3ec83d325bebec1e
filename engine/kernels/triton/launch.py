"""What every launch needs: sizes rounded up, and whether kernels are interpreted."""

from __future__ import annotations

import numpy as np
import torch
import triton


def is_interpreted() -> bool:
    """True where Triton runs kernels on the CPU, operation by operation, instead of compiling them."""
    return bool(triton.knobs.runtime.interpret)


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number`."""
    return int(triton.next_power_of_2(max(1, number)))


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array on the device, without waiting for it: from pinned memory where that matters."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
