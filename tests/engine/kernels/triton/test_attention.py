"""The Triton attention against the readable reference, over shapes, masks and block tables."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from engine.batch import ForwardBatch
from engine.kernels import reference
from engine.kernels.triton import attention
from tests.engine.kernels.test_attention import make_batch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def to_device(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return ForwardBatch(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in values.items()})


def cases(count: int, seed: int) -> Iterator[dict[str, object]]:
    rng = random.Random(seed)
    for _ in range(count):
        is_window = rng.random() < 0.6
        lens = [
            (
                rng.choice([0, rng.randint(1, 40), rng.randint(60, 200)]),
                rng.choice([1, rng.randint(2, 9)]) if is_window else rng.choice([1, rng.randint(17, 70)]),
            )
            for _ in range(rng.randint(1, 4))
        ]
        yield {
            "lens": lens,
            "block_size": rng.choice([1, 8, 16, 32]),
            "head_dim": rng.choice([16, 24, 64, 80, 128]),
            "num_kv_heads": rng.choice([1, 2]),
            "group": rng.choice([1, 3, 4, 7, 8]),
            "is_tree": rng.random() < 0.5,
            "knows_sizes": rng.random() < 0.7,
            "dtype": rng.choice(DTYPES),
        }


def check(case: dict[str, object], device: torch.device) -> None:
    rng = random.Random(str(case))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    batch, num_blocks = make_batch(case["lens"], case["block_size"], rng, is_tree=case["is_tree"])
    if case["knows_sizes"]:
        lens = case["lens"]
        batch = replace(
            batch, max_new_tokens=max(new for _, new in lens), max_context=max(old + new for old, new in lens)
        )
    batch = to_device(batch, device)
    dtype, head_dim = case["dtype"], case["head_dim"]
    shape = (num_blocks, case["num_kv_heads"], case["block_size"], head_dim)
    keys = torch.randn(shape, generator=generator).to(device, dtype)
    values = torch.randn(shape, generator=generator).to(device, dtype)
    heads = case["num_kv_heads"] * case["group"]
    fused = torch.randn(len(batch.slots), heads + 2, head_dim, generator=generator).to(device, dtype)
    query = fused[:, :heads]  # not contiguous, as in the model
    scale = head_dim**-0.5
    got = attention.paged_attention(query, keys, values, batch, scale)
    expected = reference.paged_attention(query, keys, values, batch, scale)
    assert got.dtype == dtype
    tolerance = {
        torch.float32: {"rtol": 1e-4, "atol": 1e-5},
        torch.float16: {"rtol": 4e-3, "atol": 4e-3},
        torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    }[dtype]
    torch.testing.assert_close(got.float(), expected.float(), **tolerance)


@pytest.mark.parametrize("case", list(cases(12, seed=1)))
def test_equals_reference(case: dict[str, object], device: torch.device) -> None:
    check(case, device)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(cases(150, seed=2)))
def test_equals_reference_on_more_shapes(case: dict[str, object], device: torch.device) -> None:
    check(case, device)


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_context_is_cut_and_joined(
    is_tree: bool, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence ends within its first piece, one on a border, one in the fourth."""
    monkeypatch.setattr(attention, "SPLIT_TOKENS", 64)
    case = {
        "lens": [(10, 1), (120, 8), (230, 5), (0, 3)],
        "block_size": 16,
        "head_dim": 32,
        "num_kv_heads": 2,
        "group": 3,
        "is_tree": is_tree,
        "knows_sizes": True,
        "dtype": dtype,
    }
    assert attention.split_shape(8, 235) == (4, 64)
    check(case, device)


def test_a_sequence_gets_the_same_bits_whoever_shares_its_batch(device: torch.device) -> None:
    rng = random.Random(5)
    batch, num_blocks = make_batch([(130, 4), (20, 4), (75, 4)], 16, rng)
    batch = replace(to_device(batch, device), max_new_tokens=4)
    keys, values = torch.randn(2, num_blocks, 2, 16, 64, device=device)
    query = torch.randn(12, 6, 64, device=device)
    together = attention.paged_attention(query, keys, values, batch, 0.125)
    for s in range(3):
        rows = slice(4 * s, 4 * s + 4)
        alone = replace(
            batch,
            positions=batch.positions[rows],
            slots=batch.slots[rows],
            query_start=torch.tensor([0, 4], dtype=torch.int32, device=device),
            context_lens=batch.context_lens[s : s + 1],
            block_tables=batch.block_tables[s : s + 1],
        )
        assert torch.equal(attention.paged_attention(query[rows], keys, values, alone, 0.125), together[rows])


def test_sequences_without_new_tokens_do_no_harm(device: torch.device) -> None:
    """A replayed graph is padded with them."""
    rng = random.Random(9)
    batch, num_blocks = make_batch([(30, 3), (12, 2)], 8, rng)
    batch = to_device(batch, device)
    keys, values = torch.randn(2, num_blocks, 1, 8, 16, device=device)
    query = torch.randn(5, 2, 16, device=device)
    expected = reference.paged_attention(query, keys, values, batch, 0.25)
    padded = replace(
        batch,
        query_start=torch.tensor([0, 3, 5, 5, 5], dtype=torch.int32, device=device),
        context_lens=torch.cat((batch.context_lens, batch.context_lens.new_zeros(2))),
        block_tables=torch.cat((batch.block_tables, torch.zeros_like(batch.block_tables))),
    )
    got = attention.paged_attention(query, keys, values, padded, 0.25)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
