"""GGUF round trips: what is written quantised comes back as the gguf package dequantises it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant

from engine.errors import ModelSourceError
from engine.models.gguf_file import read_header
from engine.models.gguf_weights import GgufWeights
from engine.models.llama import build_model
from engine.models.registry import load_model
from engine.models.rope import Llama3Scaling, RopeSpec, StoredDivisors
from engine.models.source import resolve
from engine.models.spec import load_spec
from engine.models.tiny import random_model, random_weights, tiny_spec
from engine.models.weights import DictWeights, tensor_shapes
from tests.engine.models.support import gguf_name, one_shot_logits, random_ids, write_gguf

WRITABLE = [
    Quant.F32,
    Quant.F16,
    Quant.BF16,
    Quant.Q8_0,
    Quant.Q4_0,
    Quant.Q4_1,
    Quant.Q5_0,
    Quant.Q5_1,
    Quant.MXFP4,
]
READ_ONLY = [
    Quant.Q2_K,
    Quant.Q3_K,
    Quant.Q4_K,
    Quant.Q5_K,
    Quant.Q6_K,
    Quant.IQ2_XXS,
    Quant.IQ2_XS,
    Quant.IQ2_S,
    Quant.IQ3_XXS,
    Quant.IQ3_S,
    Quant.IQ4_NL,
    Quant.IQ4_XS,
    Quant.TQ1_0,
    Quant.TQ2_0,
]


def rounded(state: dict[str, torch.Tensor], quant: Quant) -> dict[str, torch.Tensor]:
    """The weights after one trip through a quantisation."""

    def trip(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim < 2:
            return tensor
        return torch.from_numpy(
            np.array(gguf.dequantize(gguf.quantize(tensor.numpy(), quant), quant), dtype=np.float32)
        )

    return {name: trip(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("quant", WRITABLE, ids=lambda quant: quant.name)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_equal_those_of_the_dequantised_weights(family: str, quant: Quant, tmp_path: Path) -> None:
    spec = tiny_spec(family)
    state = random_weights(spec, seed=11)
    path = write_gguf(tmp_path / "tiny.gguf", spec, state, quant)
    expected = build_model(
        spec, DictWeights(rounded(state, quant)), device=torch.device("cpu"), dtype=torch.float32
    )
    loaded = load_model(str(path), dtype="float32")
    assert replace(loaded.spec, name=spec.name) == replace(spec, rms_norm_eps=loaded.spec.rms_norm_eps)
    ids = random_ids(50, spec.vocab_size)
    # Permuting rows and quantising rows commute, so only the addition order may differ.
    torch.testing.assert_close(
        one_shot_logits(loaded, ids), one_shot_logits(expected, ids), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("quant", READ_ONLY, ids=lambda quant: quant.name)
def test_types_that_can_only_be_read(quant: Quant, tmp_path: Path) -> None:
    """The gguf package cannot write these: any bytes with finite scales are a valid matrix."""
    spec = replace(tiny_spec("qwen2", num_heads=16, num_layers=1), intermediate_size=256, vocab_size=8)
    block_size, type_size = gguf.GGML_QUANT_SIZES[quant]
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "raw.gguf", "qwen2")
    raw: dict[str, np.ndarray] = {}
    for name, shape in tensor_shapes(spec).items():
        if len(shape) < 2:
            writer.add_tensor(gguf_name(name), np.ones(shape, dtype=np.float32))
            continue
        # Bytes below 0x3c keep every half-precision scale finite and small.
        raw[name] = rng.integers(0, 0x3C, (shape[0], shape[1] // block_size * type_size), dtype=np.uint8)
        writer.add_tensor(gguf_name(name), raw[name], raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = GgufWeights(read_header(tmp_path / "raw.gguf"), spec)
    assert weights.names() == frozenset(tensor_shapes(spec))
    for name, packed in raw.items():
        expected = gguf.dequantize(packed, quant)
        assert np.isfinite(expected).all()
        assert np.array_equal(weights.load(name).numpy(), expected)


def test_llama3_scaling_comes_from_rope_freqs(tmp_path: Path) -> None:
    spec = tiny_spec("llama3")
    state = random_weights(spec, seed=2)
    assert isinstance(spec.rope.scaling, Llama3Scaling)
    divisors = spec.rope.scaling.divisors(spec.rope.theta, spec.head_dim)
    assert divisors[0] == 1.0
    assert divisors[-1] == pytest.approx(8.0)
    path = write_gguf(tmp_path / "tiny.gguf", spec, state, rope_freqs=divisors)
    loaded = load_model(str(path), dtype="float32")
    assert isinstance(loaded.spec.rope.scaling, StoredDivisors)
    ids = random_ids(200, spec.vocab_size)
    found, expected = one_shot_logits(loaded, ids), one_shot_logits(random_model(spec, seed=2), ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    plain = one_shot_logits(random_model(replace(spec, rope=RopeSpec(spec.rope.theta)), seed=2), ids)
    assert (plain - expected).abs().max() > 0.01  # the scaling does matter here


def test_linear_scaling_comes_from_metadata(tmp_path: Path) -> None:
    spec = tiny_spec("llama-linear")
    extra: dict[str, str | int | float] = {
        "{arch}.rope.scaling.type": "linear",
        "{arch}.rope.scaling.factor": 4.0,
    }
    path = write_gguf(tmp_path / "tiny.gguf", spec, random_weights(spec, seed=2), extra=extra)
    ids = random_ids(100, spec.vocab_size)
    found, expected = (
        one_shot_logits(load_model(str(path), dtype="float32"), ids),
        one_shot_logits(random_model(spec, 2), ids),
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"{arch}.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"{arch}.expert_count": 8}, "mixture of experts"),
        ({"{arch}.rope.dimension_count": 8}, "only a part of each head"),
        ({"split.count": 3}, "llama-gguf-split --merge"),
        ({"{arch}.attention.sliding_window": 128}, "set max_model_len to 128"),
    ],
)
def test_what_is_unsupported_is_refused(
    extra: dict[str, str | int | float], message: str, tmp_path: Path
) -> None:
    spec = tiny_spec()
    path = write_gguf(tmp_path / "tiny.gguf", spec, random_weights(spec), extra=extra)
    with pytest.raises(ModelSourceError, match=message):
        load_spec(resolve(str(path)))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelSourceError, match="'mamba' is not supported; choose one of llama, qwen2, qwen3"):
        load_model(str(tmp_path / "a.gguf"))


def test_tensors_nobody_asked_for_are_refused(tmp_path: Path) -> None:
    spec = tiny_spec("llama")
    state = random_weights(spec)
    path = write_gguf(
        tmp_path / "tiny.gguf", spec, {**state, "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    )
    with pytest.raises(ModelSourceError, match=r"q_norm\.weight first; the model is of a kind"):
        load_model(str(path))


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    spec = tiny_spec("llama")
    state = random_weights(spec)
    del state["model.layers.1.mlp.up_proj.weight"]
    path = write_gguf(tmp_path / "tiny.gguf", spec, state)
    with pytest.raises(ModelSourceError, match=r"lack 1 tensors .* model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(path))
