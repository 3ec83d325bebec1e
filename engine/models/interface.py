"""What the engine asks of a model, whatever its weights are kept in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from engine.batch import ForwardBatch
from engine.kv.paged_cache import PagedCache
from engine.layers.linear import Projection
from engine.models.spec import ModelSpec
from engine.models.weights import WeightSource

if TYPE_CHECKING:
    from engine.kernels.native_draft import Chain, ChainJob


class GreedyChains(Protocol):
    """A draft head's greedy chains for many sequences in one call; see `NativeDraftHead`."""

    def __call__(
        self, jobs: Sequence[ChainJob], min_confidence: float, cache: PagedCache
    ) -> tuple[list[Chain], int, int]:
        """A chain for each job, sequential forwards, and the KV tokens they attended to."""
        ...


class LanguageModel(Protocol):
    """A decoder-only language model over a paged KV cache. Call under `torch.inference_mode()`."""

    @property
    def spec(self) -> ModelSpec:
        """Shapes, limits and special tokens."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type the KV cache has."""
        ...

    @property
    def precision(self) -> str:
        """The number format of weights and products by its configured name, e.g. float32 or int8."""
        ...

    @property
    def num_bytes(self) -> int:
        """Weight memory held by this model alone, in bytes."""
        ...

    @property
    def kernels(self) -> str:
        """Which implementations of the hot operations run, for step records."""
        ...

    def new_cache(self, num_blocks: int, block_size: int) -> PagedCache:
        """An empty KV cache that fits this model."""
        ...

    def forward(
        self, batch: ForwardBatch, cache: PagedCache, inputs: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states after the final norm, [num_tokens, hidden]; writes the new keys and values.

        inputs: [num_tokens, hidden], what the first layer gets in place of the tokens' embeddings.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result, [rows, hidden] -> [rows, vocab] float32."""
        ...

    def first_layers(self, num_layers: int) -> LanguageModel:
        """A model of the first `num_layers` layers that shares all weights."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> the tokens' embeddings, [num_tokens, hidden]."""
        ...

    def with_layers(
        self, spec: ModelSpec, source: WeightSource, head_token_ids: torch.Tensor, num_tokens: int = 1
    ) -> tuple[LanguageModel, Projection]:
        """A draft head's parts in this model's number format: its decoder and its `fc`.

        The decoder has the layers and norm of `source`, this model's embedding and, of this model's
        head, the rows `head_token_ids`; `fc` reads `num_tokens` embeddings and a hidden state. Raises
        ModelSourceError where the weights do not fit `spec`.
        """
        ...

    def greedy_chains(self, fc: Projection, draft_token_ids: Sequence[int]) -> GreedyChains | None:
        """Of a decoder and `fc` that `with_layers` made: a faster way to chains, where there is one."""
        ...
