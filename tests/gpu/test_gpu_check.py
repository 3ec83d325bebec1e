"""`make gpu-check`: the script itself works, though there is no GPU to tell anything of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_smoke_runs_every_section(tmp_path: Path) -> None:
    done = run("--cpu-smoke", "--json", str(tmp_path / "figures.json"), "--minutes", "30")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["faults"] == []
    assert len(figures["sections"]) == 8
    assert all(section["rows"] for section in figures["sections"].values())
    assert "no faults" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "figures.json"))
    assert done.returncode == 3
    assert "no CUDA GPU" in done.stderr
    assert not (tmp_path / "figures.json").exists()


@pytest.mark.gpu
def test_all_is_well_on_this_gpu(tmp_path: Path) -> None:
    done = run(
        "--json", str(tmp_path / "figures.json"), "--minutes", "3", "--only", "parity", "verify parity"
    )
    assert done.returncode == 0, done.stdout[-3000:]
