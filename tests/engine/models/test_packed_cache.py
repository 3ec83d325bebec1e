"""Packed weights on disk: a second start computes the same and packs nothing; a bad file is set aside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine.kernels import native
from engine.models.packed_cache import open_packed_cache
from engine.models.quantised import QuantisedLM, build_quantised
from engine.models.tiny import random_weights, tiny_spec
from engine.models.weights import DictWeights

LIBRARY = native.load_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no C compiler on this machine")


class CountedWeights(DictWeights):
    """Says which tensors were asked for."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.loaded: list[str] = []

    def load(self, name: str) -> torch.Tensor:
        self.loaded.append(name)
        return super().load(name)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(256)) * 400)
    return path


def build(model_file: Path, folder: Path, family: str = "qwen2") -> tuple[QuantisedLM, list[str], bool]:
    """The model, the tensors that were read for it, and whether the cache had it."""
    assert LIBRARY is not None
    spec = tiny_spec(family, num_heads=4)
    weights = CountedWeights(random_weights(spec, seed=3))
    cache = open_packed_cache(model_file, LIBRARY, folder)
    model = build_quantised(spec, weights, cache=cache)
    return model, weights.loaded, cache.is_hit


def all_weights(model: QuantisedLM) -> list[torch.Tensor]:
    names = ("qkv", "output", "gate", "up", "down")
    layers = [getattr(layer, name) for layer in model.layers for name in names]
    return [product.weight() for product in (model.embedding, model.head, *layers)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_second_start_has_the_same_weights_and_reads_no_matrix(
    family: str, model_file: Path, tmp_path: Path
) -> None:
    first, read_first, was_hit = build(model_file, tmp_path / "cache", family)
    second, read_second, is_hit = build(model_file, tmp_path / "cache", family)
    assert (was_hit, is_hit) == (False, True)
    assert any("q_proj.weight" in name for name in read_first)
    assert not any("proj.weight" in name or "embed" in name for name in read_second)
    for a, b in zip(all_weights(first), all_weights(second), strict=True):
        assert torch.equal(a, b)
    x = torch.randn(3, first.spec.hidden_size)
    assert torch.equal(first.layers[0].qkv(x), second.layers[0].qkv(x))  # biases too
    assert first.num_bytes == second.num_bytes


@pytest.mark.parametrize("fault", ["flipped", "short", "empty", "foreign", "header", "place"])
def test_a_broken_file_is_set_aside_and_made_again(
    fault: str, model_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    good, _, _ = build(model_file, folder)
    (kept,) = folder.glob("*.packed")
    content = bytearray(kept.read_bytes())
    content[-100] ^= 255
    broken = {
        "flipped": bytes(content),
        "short": kept.read_bytes()[:-64],
        "empty": b"",
        "foreign": b"something else entirely",
        "header": b"SGPACK02" + (5).to_bytes(8, "little") + b"{}{}{",
        "place": kept.read_bytes().replace(b'"offset": 0,', b'"offset": 9,', 1),
    }[fault]
    assert broken != kept.read_bytes()
    kept.write_bytes(broken)
    again, read, is_hit = build(model_file, folder)
    assert not is_hit
    assert read
    assert "made again" in caplog.text
    assert len(list(folder.glob("*.broken"))) == 1
    for a, b in zip(all_weights(good), all_weights(again), strict=True):
        assert torch.equal(a, b)
    assert build(model_file, folder)[2]


def test_a_changed_model_file_is_packed_anew_and_the_old_file_goes(model_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    build(model_file, folder)
    (old,) = folder.glob("*.packed")
    stat = model_file.stat()
    content = bytearray(model_file.read_bytes())
    content[5000] ^= 1
    model_file.write_bytes(content)
    os.utime(model_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # size and time stay as they were
    assert not build(model_file, folder)[2]
    (new,) = folder.glob("*.packed")
    assert new != old


def test_a_folder_that_cannot_be_written_costs_only_the_cache(
    model_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("a file where the folder should be")
    model, _, is_hit = build(model_file, blocked)
    assert not is_hit
    assert model.num_bytes > 0
    assert "could not be kept" in caplog.text
