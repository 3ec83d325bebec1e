"""However a text is cut into forwards and spread over blocks, the logits are those of one forward."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.batch import ForwardBatch
from engine.models.llama import CausalLM
from engine.models.tiny import TINY_FAMILIES, tiny_model
from tests.engine.models.support import make_batch, one_shot_logits, random_ids

BLOCK_SIZE = 8


def run(model: CausalLM, batch: ForwardBatch, cache: object) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(model.forward(batch, cache))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_chunks_then_single_tokens_equal_one_forward(family: str) -> None:
    model = tiny_model(family, seed=1)
    ids = random_ids(60, model.spec.vocab_size)
    expected = one_shot_logits(model, ids)
    cache = model.new_cache(20, BLOCK_SIZE)
    table = [17, 3, 11, 5, 2, 19, 7, 13]
    cuts = [0, 7, 8, 30, 41, *range(42, 61)]
    rows = [
        run(model, make_batch([(ids[start:end], start)], [table], BLOCK_SIZE), cache)
        for start, end in itertools.pairwise(cuts)
    ]
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sequences_in_one_batch_do_not_see_each_other(family: str) -> None:
    """A prompt chunk, a plain decode and a verify window together in one forward."""
    model = tiny_model(family, seed=2)
    lengths = (37, 20, 51)
    texts = [random_ids(length, model.spec.vocab_size, seed=length) for length in lengths]
    expected = [one_shot_logits(model, ids) for ids in texts]
    tables = [[9, 4, 22, 1, 15], [7, 20, 2], [12, 3, 30, 5, 18, 6, 25]]
    cache = model.new_cache(32, BLOCK_SIZE)
    done = (10, 19, 45)
    first = make_batch([(ids[:n], 0) for ids, n in zip(texts, done, strict=True)], tables, BLOCK_SIZE)
    rest = make_batch([(ids[n:], n) for ids, n in zip(texts, done, strict=True)], tables, BLOCK_SIZE)
    run(model, first, cache)
    found = run(model, rest, cache)
    wanted = torch.cat([logits[n:] for logits, n in zip(expected, done, strict=True)])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_rewriting_slots_forgets_rejected_tokens() -> None:
    """After a refused draft the same positions are written again: the old keys must not remain."""
    model = tiny_model("llama", seed=3)
    ids = random_ids(30, model.spec.vocab_size)
    expected = one_shot_logits(model, ids)
    table = [3, 1, 2, 0]
    cache = model.new_cache(4, BLOCK_SIZE)
    run(model, make_batch([([*ids[:20], 99, 98, 97, 96], 0)], [table], BLOCK_SIZE), cache)
    found = run(model, make_batch([(ids[20:], 20)], [table], BLOCK_SIZE), cache)
    torch.testing.assert_close(found, expected[20:], atol=1e-4, rtol=0)


def test_long_positions_need_no_table() -> None:
    """Rotary angles come from positions, so the context is limited by the spec alone."""
    model = tiny_model("llama3", max_model_len=100_000)
    cache = model.new_cache(8, BLOCK_SIZE)
    ids = random_ids(BLOCK_SIZE, model.spec.vocab_size)
    batch = make_batch([(ids, 0)], [[1]], BLOCK_SIZE)
    assert torch.isfinite(run(model, batch, cache)).all()
    far = model._rotary.angles(torch.tensor([99_999]))
    assert far[0].shape == (1, 1, model.spec.head_dim)
    assert torch.isfinite(far[0]).all()


def test_first_layers_share_weights_and_compute_a_prefix() -> None:
    target = tiny_model("qwen2", seed=4, num_layers=4)
    draft = target.first_layers(2)
    same = tiny_model("qwen2", seed=4, num_layers=2)  # the same random stream, cut after two layers
    ids = random_ids(20, target.spec.vocab_size)
    assert draft.spec.num_layers == 2
    assert draft.num_bytes == 0
    assert draft.layers[0] is target.layers[0]
    assert draft.new_cache(4, 8).key.shape[0] == 2
    assert not torch.allclose(one_shot_logits(draft, ids), one_shot_logits(target, ids), atol=1e-2)
    hidden_rows = torch.randn(3, target.spec.hidden_size)
    torch.testing.assert_close(draft.logits(hidden_rows), target.logits(hidden_rows))
    assert torch.equal(same.layers[1].qkv.weight, draft.layers[1].qkv.weight)  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_layers", [0, 5, -1])
def test_first_layers_refuses_what_is_not_there(num_layers: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 4"):
        tiny_model(num_layers=4).first_layers(num_layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype) -> None:
    ids = random_ids(40, 128)
    exact = one_shot_logits(tiny_model("llama", seed=6), ids)
    model = tiny_model("llama", seed=6, dtype=dtype)
    found = one_shot_logits(model, ids)
    assert model.new_cache(2, 8).key.dtype == dtype
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 0.15


def test_weight_bytes_are_counted_once() -> None:
    for family in TINY_FAMILIES:
        model = tiny_model(family)
        assert model.num_bytes == 4 * model.spec.num_parameters
