"""Weights by name, one tensor at a time, the same names for every file format.

Names and shapes follow the Hugging Face checkpoints of the Llama family; `tensor_shapes` is the
one list of what a model consists of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from engine.errors import ModelSourceError
from engine.models.spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
HEAD_INPUT = "fc.weight"  # of a draft head: [embeddings; hidden state] -> what its first layer gets


def layer_prefix(layer: int) -> str:
    """What the names of one layer's tensors start with."""
    return f"model.layers.{layer}."


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors by their name within the layer."""
    hidden, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    num_q, num_kv = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (num_q, hidden),
        "self_attn.k_proj.weight": (num_kv, hidden),
        "self_attn.v_proj.weight": (num_kv, hidden),
        "self_attn.o_proj.weight": (hidden, num_q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    biased = ["q", "k", "v"] if spec.has_qkv_bias else []
    biased += ["o"] if spec.has_output_bias else []
    for name in biased:
        shapes[f"self_attn.{name}_proj.bias"] = (shapes[f"self_attn.{name}_proj.weight"][0],)
    if spec.has_mlp_bias:
        for name in ("gate", "up", "down"):
            shapes[f"mlp.{name}_proj.bias"] = (shapes[f"mlp.{name}_proj.weight"][0],)
    if spec.has_qk_norm:
        shapes["self_attn.q_norm.weight"] = (head_dim,)
        shapes["self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of every tensor of a model, by name."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    per_layer = layer_shapes(spec)
    for layer in range(spec.num_layers):
        shapes.update({layer_prefix(layer) + name: shape for name, shape in per_layer.items()})
    shapes[FINAL_NORM] = (spec.hidden_size,)
    if not spec.is_tied:
        shapes[HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes


def head_shapes(spec: ModelSpec, num_tokens: int = 1) -> dict[str, tuple[int, ...]]:
    """Shapes of every tensor of a draft head, by name: no tables, they are the target's.

    `num_tokens`: how many tokens' embeddings an entry is made of.
    """
    width = (num_tokens + 1) * spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {HEAD_INPUT: (spec.hidden_size, width)}
    for layer in range(spec.num_layers):
        shapes.update({layer_prefix(layer) + name: shape for name, shape in layer_shapes(spec).items()})
    shapes[FINAL_NORM] = (spec.hidden_size,)
    return shapes


class WeightSource(Protocol):
    """Where tensors come from."""

    def names(self) -> frozenset[str]:
        """All names there are, without the ones known to carry nothing."""
        ...

    def load(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, in whatever floating dtype it is stored or dequantised to."""
        ...


class DictWeights:
    """Weights that are already in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> frozenset[str]:
        """All names."""
        return frozenset(self._tensors)

    def load(self, name: str) -> torch.Tensor:
        """The tensor itself."""
        return self._tensors[name]


class CheckedWeights:
    """A source measured against a spec: nothing missing, nothing left over, every shape right.

    `load_into` copies parts one by one, so that at most one stored tensor is in memory beside
    the model itself.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """`shapes`: what must be there, by name; None: a whole model."""
        self._shapes = tensor_shapes(spec) if shapes is None else dict(shapes)
        self._source = source
        self._device = device
        self._dtype = dtype
        present = source.names()
        missing = sorted(self._shapes.keys() - present)
        if missing:
            raise ModelSourceError(
                f"The weights of {spec.name} lack {len(missing)} tensors its config promises,"
                f" {missing[0]} first; download the model again."
            )
        # Tied checkpoints often hold a copy of the embedding as head; the config says which counts.
        extra = sorted(present - self._shapes.keys() - ({HEAD} if spec.is_tied else set()))
        if extra:
            raise ModelSourceError(
                f"The weights of {spec.name} hold {len(extra)} tensors its architecture has no use for,"
                f" {extra[0]} first; the model is of a kind that is not supported."
            )

    def load(self, *names: str) -> torch.Tensor:
        """The named tensors joined along the first dimension, in the target dtype and device."""
        first = self._shapes[names[0]]
        rows = sum(self._shapes[name][0] for name in names)
        joined = torch.empty((rows, *first[1:]), dtype=self._dtype, device=self._device)
        at = 0
        for name in names:
            stored = self._source.load(name)
            if tuple(stored.shape) != self._shapes[name]:
                raise ModelSourceError(
                    f"The tensor {name} has shape {list(stored.shape)} where the config promises"
                    f" {list(self._shapes[name])}; download the model again."
                )
            joined[at : at + stored.shape[0]].copy_(stored)
            at += stored.shape[0]
        return joined

    def load_if_any(self, *names: str) -> torch.Tensor | None:
        """As `load`, or None where the model has no such tensors."""
        return self.load(*names) if names[0] in self._shapes else None
