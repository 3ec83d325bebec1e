"""Paged attention and KV write: every implementation against the readable reference."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.batch import ForwardBatch
from engine.kernels import native, reference, vectorised

LIBRARY = native.load_library()
needs_c = pytest.mark.skipif(LIBRARY is None, reason="no C compiler on this machine")
DTYPES = [torch.float32, torch.bfloat16]


def attend(name: str, *args: object) -> torch.Tensor:
    """Run one implementation by name."""
    if name == "c":
        return native.paged_attention(LIBRARY, *args)
    return vectorised.paged_attention(*args)


def make_batch(
    lens: list[tuple[int, int]], block_size: int, rng: random.Random, *, is_tree: bool = False
) -> tuple[ForwardBatch, int]:
    """A batch of (cached tokens, new tokens) over shuffled blocks, and the number of blocks."""
    counts = [-(-(old + new) // block_size) for old, new in lens]
    blocks = list(range(sum(counts) + 3))
    rng.shuffle(blocks)
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    visible: list[int] = []
    for s, (old, new) in enumerate(lens):
        mine = [blocks.pop() for _ in range(counts[s])]
        tables[s, : counts[s]] = torch.tensor(mine)
        seen: list[int] = []
        depth: list[int] = []
        for i in range(new):
            parent = rng.randrange(max(0, i - 3), i) if i else None
            seen.append((seen[parent] if parent is not None else 0) | 1 << i)
            depth.append(0 if parent is None else depth[parent] + 1)
            slots.append(mine[(old + i) // block_size] * block_size + (old + i) % block_size)
            tree_row = is_tree and new <= 63
            positions.append(old + (depth[i] if tree_row else i))
            visible.append(seen[i] if tree_row else 0)
    new_lens = torch.tensor([new for _, new in lens])
    batch = ForwardBatch(
        token_ids=torch.zeros(len(slots), dtype=torch.int64),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_start=torch.cat((torch.zeros(1, dtype=torch.int64), new_lens.cumsum(0))).int(),
        context_lens=torch.tensor([old + new for old, new in lens], dtype=torch.int32),
        block_tables=tables,
        logits_rows=torch.zeros(0, dtype=torch.int64),
        visible=torch.tensor(visible) if is_tree else None,
    )
    return batch, sum(counts) + 3


def random_cases(count: int) -> Iterator[tuple[int, dict[str, object]]]:
    """Shapes that meet every branch: odd head sizes, tiny blocks, chunks, windows, long contexts."""
    rng = random.Random(7)
    for i in range(count):
        new_of = [lambda: 1, lambda: rng.randint(2, 9), lambda: rng.randint(17, 70)]
        lens = [
            (rng.choice([0, rng.randint(1, 40), rng.randint(200, 700)]), rng.choice(new_of)())
            for _ in range(rng.randint(1, 5))
        ]
        yield (
            i,
            {
                "lens": lens,
                "block_size": rng.choice([1, 4, 16, 32]),
                "head_dim": rng.choice([8, 16, 24, 64, 80, 128]),
                "num_kv_heads": rng.choice([1, 2, 3]),
                "group": rng.choice([1, 3, 4, 7]),
                "is_tree": rng.random() < 0.4,
            },
        )


@pytest.mark.parametrize("name", [pytest.param("c", marks=needs_c), "vectorised"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [c for _, c in random_cases(24)])
def test_attention_equals_reference(name: str, dtype: torch.dtype, case: dict[str, object]) -> None:
    rng = random.Random(str(case))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    batch, num_blocks = make_batch(case["lens"], case["block_size"], rng, is_tree=case["is_tree"])
    shape = (num_blocks, case["num_kv_heads"], case["block_size"], case["head_dim"])
    keys = torch.randn(shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator).to(dtype)
    heads = case["num_kv_heads"] * case["group"]
    query = 2 * torch.randn(len(batch.slots), heads, case["head_dim"], generator=generator).to(dtype).float()
    scale = case["head_dim"] ** -0.5
    expected = reference.paged_attention(query, keys, values, batch, scale)
    got = attend(name, query, keys, values, batch, scale)
    # With keys in bfloat16, query and weights may be rounded to it too.
    tolerance = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 0, "atol": 3e-2}
    torch.testing.assert_close(got, expected, **tolerance)
    assert (got - expected).abs().mean() < 2e-3


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
def test_query_may_be_bfloat16_and_strided(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    batch, num_blocks = make_batch([(30, 5), (0, 20)], 16, rng)
    keys, values = torch.randn(2, num_blocks, 2, 16, 64).to(dtype)
    fused = torch.randn(len(batch.slots), 6 + 2 + 2, 64).bfloat16()
    query = fused[:, :6]
    expected = reference.paged_attention(query, keys, values, batch, 0.125)
    got = attend("c", query, keys, values, batch, 0.125)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected.float(), rtol=1e-2, atol=1e-2)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (24, 7), (20, 1)])
@pytest.mark.parametrize("is_tree", [False, True])
def test_portable_build_agrees(
    portable: ctypes.CDLL, dtype: torch.dtype, head_dim: int, group: int, is_tree: bool
) -> None:
    lens = [(0, 1), (0, 37), (70, 3), (600, 9), (257, 16), (63, 1)]
    batch, num_blocks = make_batch(lens, 16, random.Random(5), is_tree=is_tree)
    keys, values = torch.randn(2, num_blocks, 2, 16, head_dim).to(dtype)
    query = torch.randn(len(batch.slots), 2 * group, head_dim)
    expected = reference.paged_attention(query, keys, values, batch, 0.2)
    got = native.paged_attention(portable, query, keys, values, batch, 0.2)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3 if dtype == torch.float32 else 1e-2)


@needs_c
def test_portable_build_gives_a_token_the_same_bits_in_any_chunking(portable: ctypes.CDLL) -> None:
    batch, num_blocks = make_batch([(300, 40)], 16, random.Random(6))
    keys, values = torch.randn(2, num_blocks, 2, 16, 24)
    query = torch.randn(40, 14, 24)
    together = native.paged_attention(portable, query, keys, values, batch, 0.2)
    for chunk in (1, 7):
        for first in range(0, 40, chunk):
            last = min(first + chunk, 40)
            part = take_rows(batch, 0, first, last)
            alone = native.paged_attention(portable, query[first:last], keys, values, part, 0.2)
            assert torch.equal(alone, together[first:last])


def take_rows(batch: ForwardBatch, sequence: int, first: int, last: int) -> ForwardBatch:
    """New tokens first..last (exclusive) of one sequence as a batch of its own."""
    start = int(batch.query_start[sequence])
    new = int(batch.query_start[sequence + 1]) - start
    rows = slice(start + first, start + last)
    return replace(
        batch,
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        query_start=torch.tensor([0, last - first], dtype=torch.int32),
        context_lens=batch.context_lens[sequence : sequence + 1] - (new - last),
        block_tables=batch.block_tables[sequence : sequence + 1],
    )


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 4), (24, 7)])
def test_a_token_gets_the_same_bits_in_any_batch_chunking_and_thread_count(
    dtype: torch.dtype, head_dim: int, group: int
) -> None:
    rng = random.Random(3)
    lens = [(700, 1), (0, 90), (300, 5), (513, 40), (17, 1)]
    batch, num_blocks = make_batch(lens, 16, rng)
    keys, values = torch.randn(2, num_blocks, 2, 16, head_dim).to(dtype)
    query = torch.randn(len(batch.slots), 2 * group, head_dim)
    together = attend("c", query, keys, values, batch, 0.2)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(together, attend("c", query, keys, values, batch, 0.2))
        torch.set_num_threads(1)
        for s, (_, new) in enumerate(lens):
            start = int(batch.query_start[s])
            for chunk in (1, 7, new):
                for first in range(0, new, chunk):
                    last = min(first + chunk, new)
                    part = take_rows(batch, s, first, last)
                    rows = slice(start + first, start + last)
                    alone = attend("c", query[rows], keys, values, part, 0.2)
                    assert torch.equal(alone, together[rows])
    finally:
        torch.set_num_threads(threads)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_write_kv_equals_reference(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    fused = torch.randn(70, 6, 24, generator=generator).to(dtype)
    key, value = fused[:, :3], fused[:, 3:]
    slots = torch.randperm(9 * 8, generator=generator)[:70]
    expected = torch.zeros(2, 9, 3, 8, 24, dtype=cache_dtype)
    got = torch.zeros_like(expected)
    reference.write_kv(key, value, expected[0], expected[1], slots)
    native.write_kv(LIBRARY, key, value, got[0], got[1], slots)
    assert torch.equal(got, expected)
