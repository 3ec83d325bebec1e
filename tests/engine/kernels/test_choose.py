"""Rows of logits to tokens in C against the definition, on this machine's build and on others'."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import InvalidLogits
from engine.kernels import native, native_choose, reference_verify
from engine.processors import adjusted_rows, changed_scores
from engine.sampling_state import LogitsRow, SamplingState
from engine.spec.randomness import RandomKey, counter_rows
from engine.spec.tree import EMPTY_TREE
from engine.types import AcceptRule, SamplingParams

LIBRARY = native.load_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no C compiler on this machine")
NUM_ROWS = 40


def choose(library: ctypes.CDLL, logits: torch.Tensor, rows: list[LogitsRow]) -> list[int]:
    counters = counter_rows([row.state.key for row in rows], [row.position for row in rows])
    return native_choose.choose_rows(
        library, logits, rows, counters, [changed_scores(logits, row) for row in rows]
    )


def any_rows(vocab_size: int, rng: random.Random, num: int = NUM_ROWS) -> list[LogitsRow]:
    """Rows whose parameters take every branch, in any mixture."""
    rows = []
    for index in range(num):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.2, 1.0, 3.0]),
            top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.01]),
            top_k=rng.choice([0, 0, 1, 7, 300, 10**6]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.4]),
            presence_penalty=rng.choice([0.0, 0.8]),
            frequency_penalty=rng.choice([0.0, -0.3]),
            logit_bias=rng.choice([{}, {3: 4.0, vocab_size - 1: 6.0, 100: -100.0}]),
            min_tokens=rng.choice([0, 20]),
        )
        output = tuple(rng.randrange(vocab_size) for _ in range(rng.randrange(12)))
        key = RandomKey(rng.randrange(2**64), salt=rng.choice([0, 5]))
        state = SamplingState(params, (1, 2, 300 % vocab_size), output, frozenset({0}), key, AcceptRule.RATIO)
        rows.append(LogitsRow(index, state))
    return rows


def expected(logits: torch.Tensor, row: LogitsRow) -> int:
    tokens, _ = reference_verify.verify_one(EMPTY_TREE, logits[row.index][None], row.state, AcceptRule.KEYED)
    return tokens[0]


@pytest.mark.parametrize("vocab_size", [130, 127, 500, 5000])
@pytest.mark.parametrize("spread", [0.5, 4.0, 12.0])
def test_rows_decide_as_the_definition_says(vocab_size: int, spread: float) -> None:
    rng = random.Random(vocab_size)
    logits = spread * torch.randn(NUM_ROWS, vocab_size)
    rows = any_rows(vocab_size, rng)
    assert choose(LIBRARY, logits, rows) == [expected(logits, row) for row in rows]


def test_other_machines_decide_alike(portable: ctypes.CDLL) -> None:
    rows = any_rows(3001, random.Random(2), num=120)
    logits = 4.0 * torch.randn(120, 3001)
    assert choose(portable, logits, rows) == choose(LIBRARY, logits, rows)


def test_a_row_decides_alone_as_in_any_company_and_on_any_number_of_threads() -> None:
    rows = any_rows(2000, random.Random(3))
    logits = 4.0 * torch.randn(NUM_ROWS, 2000)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = choose(LIBRARY, logits, rows)
    finally:
        torch.set_num_threads(threads)
    assert together == [choose(LIBRARY, logits, [row])[0] for row in rows]
    assert together[::-1] == choose(LIBRARY, logits, rows[::-1])


def test_rows_of_a_wider_tensor_are_read_where_they_lie() -> None:
    wide = torch.randn(NUM_ROWS, 900)
    rows = any_rows(640, random.Random(4))
    assert choose(LIBRARY, wide[:, :640], rows) == choose(LIBRARY, wide[:, :640].contiguous(), rows)


def test_more_candidates_than_a_row_has_room_for() -> None:
    """A flat row of a large vocabulary: top_p keeps tens of thousands of tokens."""
    logits = 0.01 * torch.randn(3, 50_000)
    params = SamplingParams(top_p=0.9)
    state = SamplingState(params, (1,), (), frozenset({0}), RandomKey(7), AcceptRule.RATIO)
    for i, filtered in enumerate([params, SamplingParams(top_k=30_000), SamplingParams(min_p=0.5)]):
        row = LogitsRow(i, replace(state, params=filtered))
        assert choose(LIBRARY, logits, [row]) == [expected(logits, row)]


def test_equal_scores_go_to_the_lowest_token() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, [130, 700, 701]] = 5.0
    greedy = SamplingState(
        SamplingParams(temperature=0.0), (1,), (), frozenset(), RandomKey(1), AcceptRule.RATIO
    )
    assert choose(LIBRARY, logits, [LogitsRow(0, greedy)]) == [130]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 200, 299])
def test_a_row_that_is_no_distribution_is_refused(temperature: float, bad: float, place: int) -> None:
    logits = torch.zeros(1, 300)
    logits[0, place] = bad
    state = SamplingState(
        SamplingParams(temperature=temperature), (1,), (), frozenset(), RandomKey(1), AcceptRule.RATIO
    )
    with pytest.raises(InvalidLogits, match="NaN or infinity"):
        choose(LIBRARY, logits, [LogitsRow(0, state)])


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(temperature=0.0)]
)
def test_a_row_that_leaves_no_token_is_refused(params: SamplingParams) -> None:
    state = SamplingState(params, (1,), (), frozenset(), RandomKey(1), AcceptRule.RATIO)
    with pytest.raises(InvalidLogits, match="masked"):
        choose(LIBRARY, torch.full((1, 300), -torch.inf), [LogitsRow(0, state)])


def test_masked_tokens_never_come_out() -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [5, 250]] = 0.0
    for seed in range(50):
        for params in (SamplingParams(), SamplingParams(top_p=0.999), SamplingParams(top_k=100)):
            state = SamplingState(params, (1,), (), frozenset(), RandomKey(seed), AcceptRule.RATIO)
            assert choose(LIBRARY, logits, [LogitsRow(0, state)])[0] in (5, 250)


def test_draws_follow_the_distribution() -> None:
    """Chi-squared over 20,000 draws: exceeds its bound with probability 1e-6 where all is right."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -3.0, *([-20.0] * 300)]])
    base = SamplingState(SamplingParams(), (1,), (), frozenset(), RandomKey(0), AcceptRule.RATIO)
    rows = [LogitsRow(0, replace(base, key=RandomKey(seed))) for seed in range(20_000)]
    counts = np.bincount(choose(LIBRARY, logits, rows), minlength=5)[:5]
    wanted = 20_000 * logits[0].softmax(0)[:5].numpy()
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 33.4  # 4 degrees of freedom


def test_the_struct_has_the_size_that_c_gives_it(tmp_path: Path) -> None:
    from engine.kernels import build

    source = tmp_path / "size.c"
    header = build.SOURCE_FOLDER / "choose.h"
    source.write_text(f'#include "{header}"\nint64_t size(void) {{ return sizeof(choice_row); }}\n')
    build.compile_library(build.find_compiler() or "cc", [source], tmp_path / "size.so", cpu_flags=())
    assert ctypes.CDLL(str(tmp_path / "size.so")).size() == native_choose._ROW.itemsize


@pytest.mark.parametrize("end", [-1, 300, 10**9])
def test_an_end_token_outside_the_vocabulary_touches_nothing(end: int) -> None:
    """A model's file may name one; min_tokens then has nothing to forbid."""
    logits = torch.randn(2, 300)
    params = SamplingParams(temperature=0.0, min_tokens=5)
    state = SamplingState(params, (1,), (), frozenset({end, 7}), RandomKey(1), AcceptRule.RATIO)
    logits[:, 7], logits[:, 8], logits[:, 299] = 9.0, 8.0, 7.0
    rows = [LogitsRow(0, state), LogitsRow(1, state)]
    assert choose(LIBRARY, logits, rows) == [8, 8]
    assert adjusted_rows(logits, rows).argmax(1).tolist() == [8, 8]
    assert (adjusted_rows(logits, rows) == -torch.inf).sum() == 2
