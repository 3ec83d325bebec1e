"""From samples to padded batches: crops of texts, with which of their entries count for what."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.training.corpus import Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """Entry j of a row is made of `token_ids[:, j + 1]` and `hidden[:, j]`; it guesses `hidden[:, j + 1]`.

    All rows are padded at the end to `length` + 1 tokens.
    """

    token_ids: torch.Tensor  # [rows, length + 1] int64
    hidden: torch.Tensor  # [rows, length + 1, hidden_size] float32
    is_entry: torch.Tensor  # [rows, length] bool: no padding
    is_output: torch.Tensor  # [rows, length] bool: the entry guesses a token a drafter would be asked for

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(
            *(part.to(device) for part in (self.token_ids, self.hidden, self.is_entry, self.is_output))
        )

    @property
    def num_outputs(self) -> int:
        """Entries a drafter would be asked for."""
        return int(self.is_output.sum())


def make_batch(samples: Sequence[Sample], crops: Sequence[int]) -> Batch:
    """Rows of whole samples less the first `crops[i]` tokens of what is kept of sample i."""
    rows = len(samples)
    starts = [sample.first + crop for sample, crop in zip(samples, crops, strict=True)]
    lengths = [len(sample.token_ids) - start for sample, start in zip(samples, starts, strict=True)]
    longest = max(lengths)
    token_ids = torch.zeros(rows, longest, dtype=torch.int64)
    hidden = torch.zeros(rows, longest, samples[0].hidden.shape[1])
    is_entry = torch.zeros(rows, longest - 1, dtype=torch.bool)
    is_output = torch.zeros_like(is_entry)
    for row, (sample, start, length) in enumerate(zip(samples, starts, lengths, strict=True)):
        token_ids[row, :length] = sample.token_ids[start:]
        hidden[row, :length] = sample.hidden[start - sample.first :]
        is_entry[row, : length - 1] = True
        # The first draft is asked for when the first output token is known, and none after the last.
        is_output[row, max(sample.prompt_length - 1 - start, 0) : length - 2] = True
    return Batch(token_ids, hidden, is_entry, is_output)


def training_batches(
    samples: Sequence[Sample], batch_tokens: int, max_length: int, dice: random.Random
) -> Iterator[Batch]:
    """One epoch in random order, rows of like length together, each begun at a random place.

    So the head learns to do with whatever context it has: in serving it may lack the beginning.
    """
    order = list(samples)
    dice.shuffle(order)
    pool_size = 64
    batches: list[tuple[list[Sample], list[int]]] = []
    for at in range(0, len(order), pool_size):
        pool = [(sample, _crop(sample, max_length, dice)) for sample in order[at : at + pool_size]]
        pool.sort(key=lambda pair: len(pair[0].token_ids) - pair[0].first - pair[1])
        row: list[tuple[Sample, int]] = []
        for sample, crop in pool:
            length = len(sample.token_ids) - sample.first - crop
            if row and length * (len(row) + 1) > batch_tokens:
                batches.append(([s for s, _ in row], [c for _, c in row]))
                row = []
            row.append((sample, crop))
        batches.append(([s for s, _ in row], [c for _, c in row]))
    dice.shuffle(batches)
    for chosen, crops in batches:
        yield make_batch(chosen, crops)


def _crop(sample: Sample, max_length: int, dice: random.Random) -> int:
    """How many of the kept tokens are left out: some of the prompt, and more where the text is too long."""
    num_prompt = sample.prompt_length - sample.first
    excess = len(sample.token_ids) - sample.first - max_length
    crop = dice.randint(0, max(num_prompt - 1, 0)) if dice.random() < 0.5 else 0
    return max(crop, excess, 0)
