"""Decode and verify steps at padded sizes, captured once as CUDA graphs and replayed.

A small step on a GPU is bound by the host that launches some hundred kernels. Padded to a few sizes,
the same launches serve again: inputs are copied into fixed buffers, and one call replays them all.
Padding tokens write to a block that belongs to nobody, and padding sequences have no tokens.
Without a GPU everything but the capture runs the same, which is how it is tested.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.batch import ForwardBatch
from engine.kv.paged_cache import PagedCache
from engine.models.interface import LanguageModel

MAX_NEW_TOKENS = 16
"""Steps in which a sequence has more new tokens than this run as they are."""
MAX_TOKENS = 512
MAX_GRAPHS = 96
"""Sizes that are kept; what comes after them runs padded, without a graph."""
_CONTEXT_STEP = 1024


@dataclass(frozen=True, slots=True)
class PaddedSize:
    """What a graph is keyed by: nothing else of a batch shapes the launches."""

    num_sequences: int
    num_tokens: int
    max_new_tokens: int
    max_context: int
    has_tree: bool


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    logits: torch.Tensor


class StepReplay:
    """Runs steps of at most `max_sequences` sequences through padded, replayable forwards.

    `spare_block` is a block of `cache` that no sequence is ever given.
    """

    def __init__(
        self,
        target: LanguageModel,
        cache: PagedCache,
        spare_block: int,
        max_sequences: int,
        *,
        is_captured: bool,
    ) -> None:
        self._target = target
        self.cache = cache
        self._is_captured = is_captured
        self._max_sequences = padded(max_sequences)
        self._spare_slot = spare_block * cache.block_size
        self._graphs: dict[PaddedSize, _Graph] = {}
        self._warm: set[PaddedSize] = set()
        self._pool = torch.cuda.graph_pool_handle() if is_captured else None
        num_blocks = -(-target.spec.max_model_len // cache.block_size)

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=target.device)

        self._buffers = ForwardBatch(
            token_ids=buffer(MAX_TOKENS),
            positions=buffer(MAX_TOKENS),
            slots=buffer(MAX_TOKENS),
            query_start=buffer(self._max_sequences + 1, dtype=torch.int32),
            context_lens=buffer(self._max_sequences, dtype=torch.int32),
            block_tables=buffer(self._max_sequences, num_blocks, dtype=torch.int32),
            logits_rows=buffer(0),
            visible=buffer(MAX_TOKENS),
        )

    @property
    def num_graphs(self) -> int:
        """Sizes captured so far."""
        return len(self._graphs)

    def size_of(self, batch: ForwardBatch) -> PaddedSize | None:
        """The padded size that serves `batch`; None where it is no decode or verify step."""
        num_tokens, num_sequences = batch.token_ids.shape[0], batch.context_lens.shape[0]
        if not 0 < batch.max_new_tokens <= MAX_NEW_TOKENS or not 0 < num_tokens <= MAX_TOKENS:
            return None
        if num_sequences > self._max_sequences or batch.max_context <= 0:
            return None
        context = _CONTEXT_STEP * padded(-(-batch.max_context // _CONTEXT_STEP))
        return PaddedSize(
            num_sequences=padded(num_sequences),
            num_tokens=padded(num_tokens),
            max_new_tokens=1 if batch.max_new_tokens == 1 else MAX_NEW_TOKENS,
            max_context=context,
            has_tree=batch.visible is not None,
        )

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Hidden states [num_tokens, hidden] and the logits of `batch.logits_rows`, float32.

        None where `batch` must run as it is. The next call overwrites the logits. Call under
        `torch.inference_mode()`.
        """
        size = self.size_of(batch)
        if size is None:
            return None
        static = self._fill(batch, size)
        graph = self._graphs.get(size)
        if graph is None and self._is_captured and size in self._warm and len(self._graphs) < MAX_GRAPHS:
            graph = self._graphs[size] = self._capture(static)
        if graph is not None:
            graph.graph.replay()
            hidden, logits = graph.hidden, graph.logits
        else:
            # The first time: kernels are compiled and libraries set up, which a capture must not do.
            hidden, logits = self._compute(static)
            self._warm.add(size)
        num_tokens = batch.token_ids.shape[0]
        hidden, logits = hidden[:num_tokens].clone(), logits[:num_tokens]
        if batch.logits_rows.shape[0] != num_tokens:
            logits = logits[batch.logits_rows.to(logits.device, non_blocking=True)]
        return hidden, logits

    def _compute(self, static: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self._target.forward(static, self.cache)
        return hidden, self._target.logits(hidden)

    def _capture(self, static: ForwardBatch) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden, logits = self._compute(static)
        return _Graph(graph, hidden, logits)

    def _fill(self, batch: ForwardBatch, size: PaddedSize) -> ForwardBatch:
        """The batch in the fixed buffers, cut to `size`."""
        own = self._buffers
        num_tokens, num_sequences = batch.token_ids.shape[0], batch.context_lens.shape[0]
        rest = slice(num_tokens, size.num_tokens)
        for target, source in (
            (own.token_ids, batch.token_ids),
            (own.positions, batch.positions),
            (own.slots, batch.slots),
        ):
            target[:num_tokens].copy_(source, non_blocking=True)
        own.token_ids[rest] = 0
        own.positions[rest] = 0
        own.slots[rest] = self._spare_slot
        own.query_start[: num_sequences + 1].copy_(batch.query_start, non_blocking=True)
        own.query_start[num_sequences + 1 : size.num_sequences + 1] = num_tokens
        own.context_lens[:num_sequences].copy_(batch.context_lens, non_blocking=True)
        own.context_lens[num_sequences : size.num_sequences] = 0
        width = batch.block_tables.shape[1]
        own.block_tables[:num_sequences, :width].copy_(batch.block_tables, non_blocking=True)
        visible = None
        if batch.visible is not None:
            assert own.visible is not None
            own.visible[:num_tokens].copy_(batch.visible, non_blocking=True)
            own.visible[rest] = 0
            visible = own.visible[: size.num_tokens]
        return replace(
            own,
            token_ids=own.token_ids[: size.num_tokens],
            positions=own.positions[: size.num_tokens],
            slots=own.slots[: size.num_tokens],
            query_start=own.query_start[: size.num_sequences + 1],
            context_lens=own.context_lens[: size.num_sequences],
            block_tables=own.block_tables[: size.num_sequences],
            visible=visible,
            max_new_tokens=size.max_new_tokens,
            max_context=size.max_context,
        )


def padded(number: int) -> int:
    """The next of 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, ...: at most a half is added."""
    power = 1
    while power < number:
        power *= 2
    three_quarters = power * 3 // 4
    return three_quarters if power >= 4 and number <= three_quarters else power
