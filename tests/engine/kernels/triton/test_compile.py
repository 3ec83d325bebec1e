"""Kernels compile for GPUs that are not here, and the hot ones keep all in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


def compile_all(folder: Path, *arguments: str) -> list[dict[str, object]]:
    """Run the report in a process of its own: here kernels are interpreted."""
    figures = folder / "figures.json"
    command = [
        sys.executable,
        "-m",
        "engine.kernels.triton.compile_report",
        "--json",
        str(figures),
        *arguments,
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels: list[dict[str, object]] = json.loads(figures.read_text())["kernels"]
    return kernels


def test_verify_and_layer_kernels_compile_for_hopper(tmp_path: Path) -> None:
    for part in ("verify w", "rotary and KV write bf16"):
        (usage,) = compile_all(tmp_path, "--architectures", "90", "--only", part)
        assert usage["spill_bytes"] == 0
        assert 0 < usage["registers"] <= 255


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_kernels_compile_without_spills(tmp_path: Path) -> None:
    kernels = compile_all(tmp_path)
    assert {usage["architecture"] for usage in kernels} == {80, 90, 100}
    assert len({usage["name"] for usage in kernels}) > 30
    assert max(usage["shared_bytes"] for usage in kernels) <= 160 * 1024
