"""Tiny models: seeded, of every family, and the same from memory as from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.models.registry import load_model
from engine.models.source import resolve
from engine.models.spec import load_spec
from engine.models.tiny import TINY_FAMILIES, random_model, tiny_model, tiny_spec
from engine.models.tiny_files import hf_config, save_tiny_model, tiny_tokenizer
from tests.engine.models.support import one_shot_logits, random_ids


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_same_seed_same_model(family: str) -> None:
    ids = random_ids(24, 128)
    first, again, other = (one_shot_logits(tiny_model(family, seed), ids) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, atol=0.1)
    assert 0.5 < first.std() < 2.0  # neither flat nor certain: greedy and sampling both have work


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_saved_model_is_the_model_in_memory(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", family, seed=5, num_layers=3, max_model_len=96)
    loaded = load_model(str(folder))
    spec = tiny_spec(family, vocab_size=loaded.spec.vocab_size, num_layers=3, max_model_len=96)
    ids = random_ids(30, spec.vocab_size)
    assert loaded.spec.max_model_len == 96
    assert loaded.spec.eos_token_ids == {2}
    assert torch.equal(one_shot_logits(loaded, ids), one_shot_logits(random_model(spec, seed=5), ids))


def test_every_token_of_a_saved_model_can_be_written(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    tokenizer = tiny_tokenizer()
    spec = load_spec(resolve(str(folder)))
    assert tokenizer.get_vocab_size() == spec.vocab_size
    assert all(tokenizer.id_to_token(token) is not None for token in range(spec.vocab_size))
    assert hf_config(spec)["vocab_size"] == spec.vocab_size


def test_sizes_can_be_chosen() -> None:
    model = tiny_model(
        "qwen3", vocab_size=40, num_layers=5, max_model_len=77, eos_token_ids=frozenset({3, 4})
    )
    assert (model.spec.vocab_size, model.spec.num_layers, model.spec.max_model_len) == (40, 5, 77)
    assert model.spec.eos_token_ids == {3, 4}
    with pytest.raises(ValueError, match="must be one of llama, llama3"):
        tiny_model("gpt2")
