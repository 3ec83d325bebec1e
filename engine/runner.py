"""The target model's side of a step: one forward for the whole batch, logits only where needed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from engine.batch import BatchRow, build_batch
from engine.models.interface import LanguageModel
from engine.sampling import token_logprobs
from engine.scheduler import ScheduledStep
from engine.sequence import Sequence
from engine.spec.tree import DraftTree
from engine.stats import StepSizes

PROMPT_LOGPROB_ROWS = 64
"""Prompt positions whose logits are held at a time: bounds the memory that `echo` can take."""


class ModelRunner:
    """Runs the target. Holds its cache; knows nothing of scheduling or acceptance."""

    def __init__(self, target: LanguageModel, num_blocks: int, block_size: int) -> None:
        self.target = target
        self.device = target.device
        self.block_size = block_size
        self.cache = target.new_cache(num_blocks, block_size)
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
        with torch.inference_mode():
            hidden = self.hidden = self.target.forward(batch, self.cache)
            logits = self.target.logits(hidden[batch.logits_rows])
            num_prompt_rows = self._add_prompt_logprobs(step, rows, hidden)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that the step record times forward and verify apart
        return logits, StepSizes(
            num_tokens=hidden.shape[0],
            num_kv_tokens=sum(row.start + len(row.token_ids) for row in rows),
            num_logits_rows=logits.shape[0] + num_prompt_rows,
        )

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


def _batch_row(seq: Sequence, num_new: int, tree: DraftTree) -> BatchRow:
    end = seq.num_computed + num_new
    num_logits = 1 + len(tree.token_ids) if end == len(seq.token_ids) else 0
    token_ids = seq.token_ids[seq.num_computed : end]
    if tree.token_ids:
        token_ids.extend(tree.token_ids)
    return BatchRow(token_ids, seq.num_computed, seq.block_table, num_logits)
