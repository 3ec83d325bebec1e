"""Building the C kernels: once per source and machine, and never an error where it cannot be done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import ModelSourceError
from engine.kernels import build, kernels_in_use, native
from engine.models.quantised import build_quantised
from engine.models.tiny import tiny_spec
from engine.models.weights import DictWeights


def test_without_a_compiler_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    result = build.build(tmp_path / "cache")
    assert result.library is None
    assert "install gcc" in result.reason


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'cannot compile today' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    result = build.build(tmp_path / "cache")
    assert result.library is None
    assert "cannot compile today" in result.reason
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    if build.find_compiler() is None:
        pytest.skip("no C compiler on this machine")
    (tmp_path / "file").touch()
    result = build.build(tmp_path / "file" / "cache")
    assert result.library is None
    assert "could not be built" in result.reason


def test_without_the_library_torch_stands_in_and_int8_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "load_library", lambda: None)
    assert kernels_in_use(torch.device("cpu"), torch.float32) == "attention=torch kv_write=torch"
    with pytest.raises(ModelSourceError, match=r"python -m engine\.kernels\.build"):
        build_quantised(tiny_spec(), DictWeights({}))
