"""Seeded tiny models, made in milliseconds without files: for tests, and for trying things out."""

from __future__ import annotations

import math

import torch

from engine.models.llama import CausalLM, build_model
from engine.models.rope import LinearScaling, Llama3Scaling, RopeSpec
from engine.models.spec import ModelSpec
from engine.models.weights import EMBEDDING, DictWeights, tensor_shapes

TINY_FAMILIES = ("llama", "llama3", "llama-linear", "smollm2", "mistral", "qwen2", "qwen3")
_HEAD_DIM = 16
_LLAMA3 = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


def tiny_spec(
    family: str = "llama",
    *,
    vocab_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_model_len: int = 512,
    eos_token_ids: frozenset[int] = frozenset({2}),
) -> ModelSpec:
    """A small model of one of `TINY_FAMILIES`, with that family's switches."""
    if family not in TINY_FAMILIES:
        raise ValueError(f"family is {family!r}; it must be one of {', '.join(TINY_FAMILIES)}")
    ropes = {
        "llama3": RopeSpec(500000.0, _LLAMA3),
        "llama-linear": RopeSpec(10000.0, LinearScaling(4.0)),
        "smollm2": RopeSpec(100000.0),
        "qwen2": RopeSpec(1000000.0),
        "qwen3": RopeSpec(1000000.0),
    }
    return ModelSpec(
        family="llama" if family in ("llama3", "llama-linear", "smollm2") else family,
        vocab_size=vocab_size,
        hidden_size=num_heads * _HEAD_DIM,
        intermediate_size=3 * num_heads * _HEAD_DIM,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_HEAD_DIM,
        max_model_len=max_model_len,
        rope=ropes.get(family, RopeSpec()),
        has_qkv_bias=family == "qwen2",
        has_qk_norm=family == "qwen3",
        is_tied=family in ("smollm2", "qwen2"),
        bos_token_id=1,
        eos_token_ids=eos_token_ids,
        name=f"tiny-{family}",
    )


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 weights for `spec`, a function of the seed alone.

    Scaled so that activations keep unit size and logits spread by about 1: the arg-max is clear
    of rounding, while sampling still reaches many tokens.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            return 1.0 + 0.1 * noise
        if name.endswith(".bias"):
            return 0.1 * noise
        if name == EMBEDDING and not spec.is_tied:
            return noise
        return noise / math.sqrt(shape[-1])

    return {name: draw(name, shape) for name, shape in tensor_shapes(spec).items()}


def random_model(
    spec: ModelSpec,
    seed: int = 0,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> CausalLM:
    """A model of `spec` with `random_weights`."""
    weights = DictWeights(random_weights(spec, seed))
    return build_model(spec, weights, device=torch.device(device), dtype=dtype)


def tiny_model(
    family: str = "llama",
    seed: int = 0,
    *,
    vocab_size: int = 128,
    num_layers: int = 2,
    max_model_len: int = 512,
    eos_token_ids: frozenset[int] = frozenset({2}),
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> CausalLM:
    """A random model of `tiny_spec`."""
    spec = tiny_spec(
        family,
        vocab_size=vocab_size,
        num_layers=num_layers,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
    )
    return random_model(spec, seed, device=device, dtype=dtype)
