"""What every launch needs: sizes rounded up, and whether kernels are interpreted."""

from __future__ import annotations

import triton


def is_interpreted() -> bool:
    """True where Triton runs kernels on the CPU, operation by operation, instead of compiling them."""
    return bool(triton.knobs.runtime.interpret)


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number`."""
    return int(triton.next_power_of_2(max(1, number)))
