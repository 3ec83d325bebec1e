"""Steps at padded sizes: what is captured as a CUDA graph gives what the plain forward gives."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
import torch

from engine.batch import BatchRow, build_batch
from engine.models.tiny import tiny_model
from engine.replay import MAX_NEW_TOKENS, StepReplay, padded
from tests.engine.harness import target

BLOCK_SIZE, NUM_BLOCKS = 4, 40


def test_padding_adds_at_most_a_half() -> None:
    for number in range(1, 600):
        size = padded(number)
        assert number <= size <= max(number * 1.5, 1)
        assert padded(size) == size


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_padded_equals_plain(kernels: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGATE_KERNELS", kernels)
    model = tiny_model(family, vocab_size=64, max_model_len=256)
    rng = random.Random(3)
    plain, cache = (model.new_cache(NUM_BLOCKS + 1, BLOCK_SIZE) for _ in range(2))
    replay = StepReplay(model, cache, NUM_BLOCKS, 8, is_captured=False)
    lengths = [0, 0, 0]
    blocks = list(range(NUM_BLOCKS))
    tables = [array("i", blocks[i::3]) for i in range(3)]
    for num_new in ([9, 1, 5], [1, 1, 1], [3, 1, 2], [1, 6, 1]):
        rows = [
            BatchRow([rng.randrange(64) for _ in range(num)], length, table, min(num, 2))
            for num, length, table in zip(num_new, lengths, tables, strict=True)
        ]
        batch = build_batch(rows, BLOCK_SIZE, torch.device("cpu"))
        with torch.inference_mode():
            hidden = model.forward(batch, plain)
            logits = model.logits(hidden[batch.logits_rows])
            got = replay.run(batch)
        assert got is not None
        torch.testing.assert_close(got[0], hidden)
        torch.testing.assert_close(got[1], logits)
        torch.testing.assert_close(cache.key[:, :NUM_BLOCKS], plain.key[:, :NUM_BLOCKS])
        lengths = [length + num for length, num in zip(lengths, num_new, strict=True)]


def test_long_chunks_and_large_batches_run_as_they_are() -> None:
    model = target()
    cache = model.new_cache(NUM_BLOCKS + 1, BLOCK_SIZE)
    replay = StepReplay(model, cache, NUM_BLOCKS, 2, is_captured=False)
    table = array("i", range(10))
    long = build_batch([BatchRow([1] * (MAX_NEW_TOKENS + 1), 0, table, 1)], BLOCK_SIZE, torch.device("cpu"))
    many = build_batch([BatchRow([1], 0, table, 1)] * 3, BLOCK_SIZE, torch.device("cpu"))
    assert replay.run(long) is None
    assert replay.run(many) is None
    unknown = replace(
        build_batch([BatchRow([1], 0, table, 1)], BLOCK_SIZE, torch.device("cpu")), max_context=0
    )
    assert replay.run(unknown) is None
