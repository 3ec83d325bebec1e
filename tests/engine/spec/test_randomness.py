"""Philox against its published vectors; Gumbel noise by shape, independence and distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.native_noise import philox_rows
from engine.spec import randomness
from engine.spec.randomness import RandomKey, gumbel_of, gumbel_rows, philox4x32

# Random123's kat_vectors, "philox4x32 10".
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

words = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == answer


@given(st.lists(words, min_size=1, max_size=5), words, words, words, words, words)
@settings(max_examples=50, deadline=None)
def test_array_versions_are_the_plain_one(
    blocks: list[int], position: int, salt: int, stream: int, low: int, high: int
) -> None:
    expected = [philox4x32((block, position, salt, stream), (low, high)) for block in blocks]
    rows = np.array([[position], [salt], [stream], [low], [high]], dtype=np.uint64)[:, :, None]
    by_numpy = np.stack(randomness._philox_numpy(np.array([blocks]), rows), axis=-1)[0]
    columns = torch.from_numpy(rows.astype(np.int64))
    by_torch = torch.stack(randomness._philox_torch(torch.tensor([blocks]), columns), dim=-1)[0]
    assert [tuple(row) for row in by_numpy.tolist()] == expected
    assert [tuple(row) for row in by_torch.tolist()] == expected


@given(st.integers(1, 9), st.integers(1, 300), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_the_c_kernel_gives_the_same_words(num_rows: int, num_blocks: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 2**32, (num_rows, 5), dtype=np.uint64)
    found = philox_rows(rows, num_blocks)
    if found is None:
        pytest.skip("no C compiler here")
    assert torch.equal(found, torch.from_numpy(randomness._words_by_row(num_blocks, rows.T)))


def test_noise_is_a_function_of_seed_and_position_only() -> None:
    keys = [RandomKey(7), RandomKey(2**63 + 7), RandomKey(-1)]
    rows = gumbel_rows(keys, [3, 2**31, 3], 20_001)
    for key, position, row in zip(keys, [3, 2**31, 3], rows, strict=True):
        assert torch.equal(key.gumbel(position, 20_001), row)
        assert torch.equal(key.gumbel(position, 17), row[:17]), "the vocabulary's size must not matter"
    assert torch.equal(RandomKey(-1).gumbel(3, 9), RandomKey(2**64 - 1).gumbel(3, 9))


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_subset_of_noise_is_that_part_of_all(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(1, 300))
    ids = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=9)
    keys, positions, subsets = [], [], []
    for _ in range(data.draw(st.integers(1, 4))):
        keys.append(RandomKey(data.draw(st.integers(-(2**63), 2**63)), salt=data.draw(words)))
        positions.append(data.draw(words))
        subsets.append(torch.tensor(data.draw(ids)))
    found = gumbel_of(keys, positions, subsets)
    for key, position, subset, noise in zip(keys, positions, subsets, found, strict=True):
        assert torch.equal(noise, key.gumbel(position, vocab_size)[subset])
        assert torch.equal(noise, key.gumbel_of(position, subset))


def test_no_two_streams_positions_salts_or_seeds_share_noise() -> None:
    size = 1000
    key = RandomKey(5)
    rows = [
        key.gumbel(1, size),
        key.gumbel(2, size),
        RandomKey(6).gumbel(1, size),
        RandomKey(5 + 2**32).gumbel(1, size),
        key.for_draft(1).gumbel(1, size),
        key.for_draft(2).gumbel(1, size),
        -torch.log(-torch.log(key.uniform(1, size))).float(),
    ]
    correlations = np.corrcoef(torch.stack(rows).numpy())
    off_diagonal = correlations[~np.eye(len(rows), dtype=bool)]
    assert np.abs(off_diagonal).max() < 0.15  # 4.7 standard errors of 1/sqrt(1000)
    assert len(torch.cat(rows).unique()) > 0.999 * size * len(rows)


def test_a_seeded_sequence_drafts_with_the_targets_noise() -> None:
    assert RandomKey(5, is_seeded=True).for_draft(9) == RandomKey(5, is_seeded=True)
    assert RandomKey(5).for_draft(9) != RandomKey(5)
    assert RandomKey(5).for_draft(9) != RandomKey(5).for_draft(10)


def test_gumbel_noise_has_the_standard_gumbel_distribution() -> None:
    noise = torch.cat([RandomKey(seed).gumbel(seed, 50_000) for seed in range(4)]).double()
    values, _ = noise.sort()
    expected = torch.exp(-torch.exp(-values))
    steps = torch.arange(len(values), dtype=torch.float64) / len(values)
    distance = torch.maximum((expected - steps).abs(), (steps + 1 / len(values) - expected).abs()).max()
    # Kolmogorov-Smirnov: 1.95/sqrt(n) is passed by chance once in a thousand seeds.
    assert distance < 1.95 / math.sqrt(len(values))
    assert noise.isfinite().all()


def test_uniform_numbers_are_uniform_and_repeat() -> None:
    numbers = RandomKey(3).uniform(11, 20_000)
    assert numbers.dtype == torch.float64
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert torch.equal(numbers[:7], RandomKey(3).uniform(11, 7))
    counts = torch.histc(numbers, bins=20, min=0.0, max=1.0)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 43.8  # 99.9 % point with 19 degrees of freedom


def test_extreme_words_give_finite_noise() -> None:
    noise = randomness._to_gumbel(torch.tensor([0.0, 1.0, 2.0**32 - 1, 2.0**32]))
    assert noise.isfinite().all()
    assert noise[0] == pytest.approx(-math.log(2.0**-33), rel=1e-6)
    assert noise[0] > noise[1] > noise[2]
