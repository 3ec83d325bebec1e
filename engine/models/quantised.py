"""The decoder over 4- and 8-bit weights with 8-bit activations (`dtype: int8`), on the CPU.

One call into C runs all layers; see `engine/kernels/cpu/decoder.c` for the arithmetic. Keys and
values are kept in bfloat16. A token's logits are the same bit for bit alone, in any batch and
however its prompt was chunked, so greedy output cannot depend on the load or on speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.batch import ForwardBatch
from engine.errors import ModelSourceError
from engine.kernels import native, sampling_in_use
from engine.kernels.native_decoder import DecoderSizes, NativeDecoder, QuantLayer, QuantLinear
from engine.kernels.native_draft import NativeDraftHead
from engine.kv.paged_cache import PagedCache
from engine.layers.linear import Projection
from engine.layers.rotary import rotary_frequencies
from engine.models.interface import GreedyChains
from engine.models.llama import Progress
from engine.models.packed_cache import PackedCache
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


class QuantisedLM:
    """A `LanguageModel` whose products run in integers."""

    dtype = torch.bfloat16  # of the KV cache
    device = torch.device("cpu")

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: QuantLinear,
        layers: tuple[QuantLayer, ...],
        norm: torch.Tensor,  # [hidden] float32
        head: QuantLinear,
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
        self._decoder = NativeDecoder(
            library=_library(),
            sizes=DecoderSizes(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps),
            embedding=embedding,
            layers=layers,
            norm=norm,
            frequencies=rotary_frequencies(spec.rope, spec.head_dim),
        )

    @property
    def num_bytes(self) -> int:
        """Weight memory held by this model alone, in bytes."""
        if self._is_shared:
            return 0
        if self._is_beside:
            return self.head.num_bytes + sum(layer.num_bytes for layer in self.layers) + int(self.norm.nbytes)
        tables = self.embedding.num_bytes + (0 if self.spec.is_tied else self.head.num_bytes)
        return tables + sum(layer.num_bytes for layer in self.layers) + self.norm.nbytes

    @property
    def precision(self) -> str:
        """The number format of weights and products by its configured name."""
        return "int8"

    @property
    def kernels(self) -> str:
        """Which implementations of the hot operations run, for step records."""
        bits = sorted({product.bits for layer in self.layers for product in (layer.qkv, layer.down)})
        products = f"decoder=c-w{'w'.join(map(str, bits))}a8 head=c-w{self.head.bits}a8"
        return f"{products} attention=c kv_write=c sampling={sampling_in_use(self.device)}"

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
        """Hidden states after the final norm, [num_tokens, hidden] float32; writes the new K and V.

        `inputs` stands in for the tokens' embeddings.
        """
        return self._decoder(batch, cache.key, cache.value, inputs)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result, [rows, hidden] -> [rows, vocab] float32."""
        return self.head(hidden)

    def first_layers(self, num_layers: int) -> QuantisedLM:
        """A model of the first `num_layers` layers that shares all weights."""
        if not 1 <= num_layers <= self.spec.num_layers:
            raise ValueError(f"num_layers is {num_layers}; it must be between 1 and {self.spec.num_layers}")
        return QuantisedLM(
            replace(self.spec, num_layers=num_layers, name=f"{self.spec.name}[:{num_layers}]"),
            embedding=self.embedding,
            layers=self.layers[:num_layers],
            norm=self.norm,
            head=self.head,
            is_shared=True,
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> the tokens' embeddings, [num_tokens, hidden] float32."""
        return self.embedding.rows(token_ids.tolist())

    def with_layers(
        self, spec: ModelSpec, source: WeightSource, head_token_ids: torch.Tensor, num_tokens: int = 1
    ) -> tuple[QuantisedLM, QuantLinear]:
        """See `LanguageModel.with_layers`."""
        library, shapes = _library(), head_shapes(spec, num_tokens)
        weights = CheckedWeights(spec, source, device=self.device, dtype=torch.float32, shapes=shapes)
        decoder = QuantisedLM(
            spec,
            embedding=self.embedding,
            layers=tuple(_load_layer(spec, weights, layer_prefix(i)) for i in range(spec.num_layers)),
            norm=weights.load(FINAL_NORM),
            head=QuantLinear(library, self.head.rows(head_token_ids.tolist())),
            is_beside=True,
        )
        return decoder, QuantLinear(library, weights.load(HEAD_INPUT))

    def greedy_chains(self, fc: Projection, draft_token_ids: Sequence[int]) -> GreedyChains | None:
        """See `LanguageModel.greedy_chains`. `self` is the decoder."""
        if not isinstance(fc, QuantLinear):
            return None
        return NativeDraftHead(_library(), self._decoder, fc, self.head, draft_token_ids)


def build_quantised(
    spec: ModelSpec,
    source: WeightSource,
    *,
    progress: Progress | None = None,
    cache: PackedCache | None = None,
) -> QuantisedLM:
    """Quantise a model from named weights, tensor by tensor; packed ones come from `cache` and go there.

    Raises `ModelSourceError` where the weights do not fit the spec, or the kernels cannot be had.
    """
    library = _library()
    _check_sizes(spec)
    weights = CheckedWeights(spec, source, device=QuantisedLM.device, dtype=torch.float32)
    embedding = _matrix(library, weights, (EMBEDDING,), None, cache)
    layers = []
    for index in range(spec.num_layers):
        layers.append(_load_layer(spec, weights, layer_prefix(index), cache))
        if progress is not None:
            progress("loading weights", (index + 1) / (spec.num_layers + 1))
    head = embedding if spec.is_tied else _matrix(library, weights, (HEAD,), None, cache)
    if cache is not None:
        cache.save()
    if progress is not None:
        progress("loading weights", 1.0)
    return QuantisedLM(
        spec, embedding=embedding, layers=tuple(layers), norm=weights.load(FINAL_NORM), head=head
    )


def _matrix(
    library: native.Library,
    weights: CheckedWeights,
    names: tuple[str, ...],
    bias: torch.Tensor | None,
    cache: PackedCache | None,
) -> QuantLinear:
    """The named weights as one packed matrix, from the cache where it is there."""

    def make() -> QuantLinear:
        return QuantLinear(library, weights.load(*names), bias)

    return make() if cache is None else cache.matrix("+".join(names), bias, make)


def _load_layer(
    spec: ModelSpec, weights: CheckedWeights, prefix: str, cache: PackedCache | None = None
) -> QuantLayer:
    def linear(*names: str) -> QuantLinear:
        return _matrix(
            _library(),
            weights,
            tuple(f"{prefix}{name}_proj.weight" for name in names),
            weights.load_if_any(*(f"{prefix}{name}_proj.bias" for name in names)),
            cache,
        )

    def norm(name: str) -> torch.Tensor:
        return weights.load(f"{prefix}{name}.weight")

    return QuantLayer(
        attention_norm=norm("input_layernorm"),
        mlp_norm=norm("post_attention_layernorm"),
        qk_norms=(norm("self_attn.q_norm"), norm("self_attn.k_norm")) if spec.has_qk_norm else None,
        qkv=linear("self_attn.q", "self_attn.k", "self_attn.v"),
        output=linear("self_attn.o"),
        gate=linear("mlp.gate"),
        up=linear("mlp.up"),
        down=linear("mlp.down"),
    )


def serves(spec: ModelSpec) -> bool:
    """True where int8 would run: the C kernels are here and fit the model's heads."""
    return native.load_library() is not None and _fits(spec)


def _fits(spec: ModelSpec) -> bool:
    group = spec.num_heads // spec.num_kv_heads
    return native.supports(torch.float32, torch.bfloat16, spec.head_dim, group)


def _library() -> native.Library:
    library = native.load_library()
    if library is None:
        raise ModelSourceError(
            "The dtype int8 needs the C kernels, which are not built here; run"
            " `python -m engine.kernels.build` to see why, or use dtype float32."
        )
    return library


def _check_sizes(spec: ModelSpec) -> None:
    if not _fits(spec):
        raise ModelSourceError(
            f"The dtype int8 serves heads of at most {native.MAX_HEAD_DIM} dimensions in groups of at most"
            f" {native.MAX_GROUP}; {spec.name} has more, so use dtype float32 or bfloat16."
        )
