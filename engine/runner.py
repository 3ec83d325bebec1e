"""The target model's side of a step: one forward for the whole batch, logits only where needed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from engine.batch import BatchRow, ForwardBatch, build_batch
from engine.models.interface import LanguageModel
from engine.replay import StepReplay
from engine.sampling import token_logprobs
from engine.scheduler import ScheduledStep
from engine.sequence import Sequence
from engine.spec.tree import DraftTree
from engine.stats import StepSizes

PROMPT_LOGPROB_ROWS = 64
"""Prompt positions whose logits are held at a time: bounds the memory that `echo` can take."""


class ModelRunner:
    """Runs the target. Holds its cache; knows nothing of scheduling or acceptance.

    On a GPU nothing here waits for the device but prompt logprobs.
    """

    def __init__(
        self,
        target: LanguageModel,
        num_blocks: int,
        block_size: int,
        max_sequences: int = 0,
        *,
        is_padded: bool | None = None,
    ) -> None:
        """Small steps of up to `max_sequences` sequences run at padded sizes, replayed as CUDA graphs on
        a GPU, where `is_padded`; None: on a GPU."""
        self.target = target
        self.device = target.device
        self.block_size = block_size
        is_cuda = self.device.type == "cuda"
        has_replay = max_sequences > 0 and (is_cuda if is_padded is None else is_padded)
        self.cache = target.new_cache(num_blocks + has_replay, block_size)
        self._replay: StepReplay | None = None
        if has_replay:  # the block past the last is nobody's: padding writes there
            self._replay = StepReplay(target, self.cache, num_blocks, max_sequences, is_captured=is_cuda)
        self._marks: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if is_cuda:
            self._marks = (_mark(), _mark())
        self.hidden: torch.Tensor | None = None  # [num_tokens, hidden] of the last forward

    @property
    def precision(self) -> str:
        """The target's number format."""
        return self.target.precision

    @property
    def kernels(self) -> str:
        """Which implementations of the hot operations run here, for step records."""
        return self.target.kernels

    def forward(self, step: ScheduledStep, trees: Seq[DraftTree]) -> tuple[torch.Tensor, StepSizes]:
        """One target forward over every scheduled token; `trees[i]` belongs to `step.sequences[i]`.

        Returns the logits that `verify` wants, [sum over deciding sequences of 1 + len(tree), vocab]
        float32, and the sizes for the step record.
        """
        rows = [
            _batch_row(seq, num_new, tree)
            for seq, num_new, tree in zip(step.sequences, step.num_new, trees, strict=True)
        ]
        batch = build_batch(rows, self.block_size, self.device)
        if self._marks is not None:
            self._marks[0].record()
        with torch.inference_mode():
            hidden, logits = self._compute(batch)
            self.hidden = hidden
            num_prompt_rows = self._add_prompt_logprobs(step, rows, hidden)
        if self._marks is not None:
            self._marks[1].record()
        return logits, StepSizes(
            num_tokens=hidden.shape[0],
            num_kv_tokens=sum(row.start + len(row.token_ids) for row in rows),
            num_logits_rows=logits.shape[0] + num_prompt_rows,
            num_window_kv_tokens=sum(
                len(tree) * (row.start + len(row.token_ids)) for row, tree in zip(rows, trees, strict=True)
            ),
        )

    def _compute(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of all tokens, logits of `batch.logits_rows`."""
        replayed = None if self._replay is None else self._replay.run(batch)
        if replayed is not None:
            return replayed
        hidden = self.target.forward(batch, self.cache)
        return hidden, self.target.logits(hidden[batch.logits_rows])

    def wait_for_forward(self) -> float | None:
        """Seconds that the last forward took on the device, once it is over; None where the call itself
        took them. Steps end with this: nothing before it waits but the reading of what was decided."""
        if self._marks is None:
            return None
        self._marks[1].synchronize()
        milliseconds: float = self._marks[0].elapsed_time(self._marks[1])
        return milliseconds / 1e3

    def _add_prompt_logprobs(self, step: ScheduledStep, batch: Seq[BatchRow], hidden: torch.Tensor) -> int:
        """Extend `prompt_logprobs` of the sequences that want them; the number of rows that took."""
        rows: list[int] = []
        token_ids: list[int] = []
        num_top: list[int] = []
        owners: list[Sequence] = []
        first = 0
        for seq, row in zip(step.sequences, batch, strict=True):
            if seq.needs_prompt_logprobs:
                # Row of position p tells of the token at p + 1; the last prompt row tells of the output.
                num = min(len(row.token_ids), seq.prompt_length - 1 - seq.num_computed)
                rows += range(first, first + num)
                token_ids += seq.token_ids[seq.num_computed + 1 : seq.num_computed + 1 + num]
                num_top += [seq.request.sampling.num_logprobs or 0] * num
                owners += [seq] * num
            first += len(row.token_ids)
        for start in range(0, len(rows), PROMPT_LOGPROB_ROWS):
            part = slice(start, start + PROMPT_LOGPROB_ROWS)
            logits = self.target.logits(hidden[rows[part]])
            found = token_logprobs(logits, token_ids[part], num_top[part])
            for seq, logprob in zip(owners[part], found, strict=True):
                assert seq.prompt_logprobs is not None
                seq.prompt_logprobs.append(logprob)
        return len(rows)


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _batch_row(seq: Sequence, num_new: int, tree: DraftTree) -> BatchRow:
    end = seq.num_computed + num_new
    num_logits = 1 + len(tree.token_ids) if end == len(seq.token_ids) else 0
    token_ids = seq.token_ids[seq.num_computed : end]
    if tree.token_ids:
        token_ids.extend(tree.token_ids)
    return BatchRow(token_ids, seq.num_computed, seq.block_table, num_logits)
