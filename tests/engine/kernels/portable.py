"""The C kernels as other machines get them, built here."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import pytest

from engine.kernels import build, native

# Without AVX2 vectors have 4 lanes, with it 8, with AVX-512 16: the last is here without its instructions.
MACHINES = {
    "any": (),
    "avx2": ("-march=x86-64-v3",),
    "16 lanes": ("-DSPECGATE_LANES=16", "-O1"),  # in pieces, they take long to optimise
}


@cache
def library_for(machine: str, folder: Path) -> ctypes.CDLL:
    """All kernels compiled for a machine of MACHINES."""
    if machine == "avx2" and "avx2" not in build.cpu_capabilities():
        pytest.skip("this CPU has no AVX2")
    target = folder / f"{machine.replace(' ', '_')}.so"
    if not target.exists():
        build.compile_library(
            build.find_compiler() or "cc",
            sorted(build.SOURCE_FOLDER.glob("*.c")),
            target,
            cpu_flags=MACHINES[machine],
        )
    library = ctypes.CDLL(str(target))
    native.declare(library)
    return library
