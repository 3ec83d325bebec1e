"""Logits against the transformers package, family by family, through real model folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.models.registry import load_model
from engine.models.tiny import TINY_FAMILIES, random_weights, tiny_spec
from engine.models.tiny_files import save_model
from tests.engine.models.support import one_shot_logits, random_ids, write_gguf

TOLERANCE = 1e-3  # required; what is reached is about 5e-6


def reference_logits(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def assert_parity(folder: Path, vocab_size: int, length: int = 200) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = random_ids(length, vocab_size)
    expected = reference_logits(reference, ids)
    found = one_shot_logits(load_model(str(folder)), ids)
    assert expected.std() > 0.5  # the comparison would say little about flat logits
    assert (expected - found).abs().max() < TOLERANCE


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_logits_equal_transformers(family: str, is_tied: bool, tmp_path: Path) -> None:
    spec = replace(tiny_spec(family, num_heads=6, num_kv_heads=2), is_tied=is_tied)
    assert_parity(save_model(tmp_path, spec, seed=3), spec.vocab_size)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 16), (4, 1, 16), (3, 1, 32), (4, 2, 24)]
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_grouping_of_heads(
    family: str, num_heads: int, num_kv_heads: int, head_dim: int, tmp_path: Path
) -> None:
    spec = replace(
        tiny_spec(family, num_heads=num_heads, num_kv_heads=num_kv_heads), head_dim=head_dim, num_layers=3
    )
    assert_parity(save_model(tmp_path, spec, seed=5), spec.vocab_size, length=60)


def test_llama_with_all_biases(tmp_path: Path) -> None:
    spec = replace(tiny_spec("llama"), has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True)
    assert_parity(save_model(tmp_path, spec), spec.vocab_size)


def test_qwen3_with_attention_bias(tmp_path: Path) -> None:
    spec = replace(tiny_spec("qwen3"), has_qkv_bias=True, has_output_bias=True)
    assert_parity(save_model(tmp_path, spec), spec.vocab_size)


def test_a_config_in_the_newer_layout(tmp_path: Path) -> None:
    """transformers 5 writes rope_parameters; what it saves itself must load."""
    folder = save_model(tmp_path / "old", tiny_spec("llama3"), seed=1)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path / "new", max_shard_size="60KB")
    assert (tmp_path / "new" / "model.safetensors.index.json").exists()
    ids = random_ids(150, 128)
    found = one_shot_logits(load_model(str(tmp_path / "new")), ids)
    assert (reference_logits(reference, ids) - found).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen2", "qwen3"])
def test_gguf_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    """transformers reads the same GGUF with its own names and its own un-permuting."""
    spec = tiny_spec(family, num_heads=6, num_kv_heads=2)
    path = write_gguf(tmp_path / "tiny.gguf", spec, random_weights(spec, seed=7))
    config = AutoConfig.for_model(**load_gguf_checkpoint(str(path))["config"])
    config.head_dim = spec.head_dim  # transformers does not read it from Qwen3's GGUF metadata
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)["tensors"]
    outcome = reference.load_state_dict(state, strict=False)
    assert set(outcome.missing_keys) <= {"lm_head.weight"}
    reference.tie_weights()
    ids = random_ids(100, spec.vocab_size)
    found = one_shot_logits(load_model(str(path), dtype="float32"), ids)
    assert (reference_logits(reference, ids) - found).abs().max() < TOLERANCE
