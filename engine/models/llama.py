"""The one decoder: Llama, Mistral, Qwen2 and Qwen3 differ only by their `ModelSpec`.

    x = embed(tokens)
    per layer:  x += o(attention(rope(norm(q)), rope(norm(k)), v));  x += down(silu(gate) * up)
    hidden = norm(x);  logits = head(hidden)

q, k, v share one matrix and so do gate and up: fewer, larger products. Plain objects rather than
`torch.nn.Module`, since nothing is trained here and layers are shared between models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.batch import ForwardBatch
from engine.kernels import kernels_in_use, paged_attention, rotate_and_write, silu_mul
from engine.kv.paged_cache import PagedCache
from engine.layers.linear import Linear, Projection
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotary
from engine.models.spec import ModelSpec
from engine.models.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    HEAD_INPUT,
    CheckedWeights,
    WeightSource,
    head_shapes,
    layer_prefix,
)

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's parts."""

    attention_norm: RMSNorm
    qkv: Projection  # query, key and value heads, in this order
    qk_norms: tuple[RMSNorm, RMSNorm] | None
    output: Projection
    mlp_norm: RMSNorm
    gate_up: Projection  # gate, then up
    down: Projection

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        parts = (self.attention_norm, self.qkv, self.output, self.mlp_norm, self.gate_up, self.down)
        return sum(part.num_bytes for part in (*parts, *(self.qk_norms or ())))


class CausalLM:
    """A decoder-only language model over a paged KV cache.

    Call under `torch.inference_mode()`. `num_bytes` is the weight memory this model adds: a model
    made by `first_layers` shares all of it and adds none.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: torch.Tensor,  # [vocab, hidden]
        layers: tuple[Layer, ...],
        norm: RMSNorm,
        head: Projection,
        is_shared: bool = False,
        is_beside: bool = False,
    ) -> None:
        """`is_shared`: all weights are another model's; `is_beside`: only the embedding is."""
        self.spec = spec
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self._is_shared = is_shared
        self._is_beside = is_beside
        self._rotary = Rotary(spec.rope, spec.head_dim, embedding.device)
        self._scale = spec.head_dim**-0.5

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """The type activations and the KV cache have."""
        return self.embedding.dtype

    @property
    def precision(self) -> str:
        """The number format of weights and products by its configured name."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def kernels(self) -> str:
        """Which implementations of the hot operations run, for step records."""
        return kernels_in_use(self.device, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Weight memory held by this model alone, in bytes."""
        if self._is_shared:
            return 0
        if self._is_beside:
            return self.head.num_bytes + sum(layer.num_bytes for layer in self.layers) + self.norm.num_bytes
        tables = self.embedding.nbytes + (0 if self.spec.is_tied else self.head.num_bytes)
        return tables + sum(layer.num_bytes for layer in self.layers) + self.norm.num_bytes

    def new_cache(self, num_blocks: int, block_size: int) -> PagedCache:
        """An empty KV cache that fits this model."""
        spec = self.spec
        return PagedCache(
            spec.num_layers,
            num_blocks,
            spec.num_kv_heads,
            block_size,
            spec.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(
        self, batch: ForwardBatch, cache: PagedCache, inputs: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states after the final norm, [num_tokens, hidden].

        Writes the new tokens' keys and values to `batch.slots` of every layer, then attends
        through the block tables. `inputs` stands in for the tokens' embeddings.
        """
        x = self.embed(batch.token_ids) if inputs is None else inputs.clone()  # x is added to in place
        angles = self._rotary.angles(batch.positions)
        delta: torch.Tensor | None = None  # what the residual stream has yet to be given
        for index, layer in enumerate(self.layers):
            kv = cache.key[index], cache.value[index]
            x, normed = layer.attention_norm.after_adding(x, delta)
            attended = self._attend(layer, normed, angles, batch, kv)
            x, normed = layer.mlp_norm.after_adding(x, layer.output(attended))
            delta = layer.down(silu_mul(layer.gate_up(normed)))
        return self.norm.after_adding(x, delta)[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result, [rows, hidden] -> [rows, vocab] float32."""
        return self.head(hidden).to(torch.float32)

    def first_layers(self, num_layers: int) -> CausalLM:
        """A model of the first `num_layers` layers with this model's embedding, norm and head."""
        if not 1 <= num_layers <= self.spec.num_layers:
            raise ValueError(f"num_layers is {num_layers}; it must be between 1 and {self.spec.num_layers}")
        return CausalLM(
            replace(self.spec, num_layers=num_layers, name=f"{self.spec.name}[:{num_layers}]"),
            embedding=self.embedding,
            layers=self.layers[:num_layers],
            norm=self.norm,
            head=self.head,
            is_shared=True,
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> the tokens' embeddings, [num_tokens, hidden]."""
        return F.embedding(token_ids, self.embedding)

    def with_layers(
        self, spec: ModelSpec, source: WeightSource, head_token_ids: torch.Tensor, num_tokens: int = 1
    ) -> tuple[CausalLM, Projection]:
        """See `LanguageModel.with_layers`."""
        shapes = head_shapes(spec, num_tokens)
        weights = CheckedWeights(spec, source, device=self.device, dtype=self.dtype, shapes=shapes)
        assert isinstance(self.head, Linear)
        decoder = CausalLM(
            spec,
            embedding=self.embedding,
            layers=tuple(_load_layer(spec, weights, layer_prefix(i)) for i in range(spec.num_layers)),
            norm=RMSNorm(weights.load(FINAL_NORM), spec.rms_norm_eps),
            head=Linear(self.head.weight[head_token_ids.to(self.device)].clone()),
            is_beside=True,
        )
        return decoder, Linear(weights.load(HEAD_INPUT))

    def greedy_chains(self, fc: Projection, draft_token_ids: Sequence[int]) -> None:
        """There is none: chains are made token by token."""

    def _attend(
        self,
        layer: Layer,
        x: torch.Tensor,  # [num_tokens, hidden]
        angles: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        kv: tuple[torch.Tensor, torch.Tensor],  # [num_blocks, num_kv_heads, block_size, head_dim]
    ) -> torch.Tensor:
        num_q, num_kv = self.spec.num_heads, self.spec.num_kv_heads
        heads = layer.qkv(x).view(-1, num_q + 2 * num_kv, self.spec.head_dim)  # [T, H + 2 Hkv, D]
        norms = None if layer.qk_norms is None else (layer.qk_norms[0].weight, layer.qk_norms[1].weight)
        query = rotate_and_write(heads, angles, norms, self.spec.rms_norm_eps, kv, batch.slots)
        attended = paged_attention(query, *kv, batch, self._scale)
        return attended.flatten(1)  # [T, H * D]


def build_model(
    spec: ModelSpec,
    source: WeightSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> CausalLM:
    """Assemble a model from named weights, tensor by tensor.

    `progress` is told ("loading weights", fraction done). Raises `ModelSourceError` where the
    weights do not fit the spec.
    """
    weights = CheckedWeights(spec, source, device=device, dtype=dtype)
    embedding = weights.load(EMBEDDING)
    layers = []
    for index in range(spec.num_layers):
        layers.append(_load_layer(spec, weights, layer_prefix(index)))
        if progress is not None:
            progress("loading weights", (index + 1) / (spec.num_layers + 1))
    norm = RMSNorm(weights.load(FINAL_NORM), spec.rms_norm_eps)
    head = Linear(embedding if spec.is_tied else weights.load(HEAD))
    if progress is not None:
        progress("loading weights", 1.0)
    return CausalLM(spec, embedding=embedding, layers=tuple(layers), norm=norm, head=head)


def _load_layer(spec: ModelSpec, weights: CheckedWeights, prefix: str) -> Layer:
    def linear(*names: str) -> Linear:
        return Linear(
            weights.load(*(f"{prefix}{name}_proj.weight" for name in names)),
            weights.load_if_any(*(f"{prefix}{name}_proj.bias" for name in names)),
        )

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights.load(f"{prefix}{name}.weight"), spec.rms_norm_eps)

    return Layer(
        attention_norm=norm("input_layernorm"),
        qkv=linear("self_attn.q", "self_attn.k", "self_attn.v"),
        qk_norms=(norm("self_attn.q_norm"), norm("self_attn.k_norm")) if spec.has_qk_norm else None,
        output=linear("self_attn.o"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=linear("mlp.gate", "mlp.up"),
        down=linear("mlp.down"),
    )
