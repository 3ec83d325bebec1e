"""Prompt lookup on the device: the longest n-gram match, its newest occurrence, what followed it.

The same rule as `engine.spec.ngram`, for token histories that are on the device already.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import power_of_2

TILE = 1024


@triton.jit(do_not_specialize=["max_length"])
def match_kernel(
    history_ptr,  # [sequences, max_length] int32
    length_ptr,
    result_ptr,  # [sequences, 1 + NUM_DRAFT] int32: number, tokens
    max_length,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    NUM_DRAFT: tl.constexpr,
    DRAFT: tl.constexpr,  # NUM_DRAFT rounded up to a power of 2
    TILE: tl.constexpr,
):
    sequence = tl.program_id(0)
    history = history_ptr + sequence.to(tl.int64) * max_length
    length = tl.load(length_ptr + sequence)
    # Score of an end e (the token before the continuation): matched length, then how new it is.
    best = tl.zeros([], dtype=tl.int64)
    for first in range(0, length - 1, TILE):
        end = first + tl.arange(0, TILE)
        matched = tl.zeros([TILE], dtype=tl.int32)
        goes_on = end < length - 1
        for back in tl.static_range(MAX_N):
            is_there = goes_on & (end - back >= 0)
            token = tl.load(history + end - back, mask=is_there, other=-1)
            last = tl.load(history + length - 1 - back, mask=length - 1 - back >= 0, other=-2)
            goes_on = is_there & (token == last)
            matched += goes_on.to(tl.int32)
        score = tl.where(matched >= MIN_N, matched.to(tl.int64) * 4294967296 + end + 1, 0)
        best = tl.maximum(best, tl.max(score, axis=0))
    start = (best % 4294967296).to(tl.int32)
    num = tl.where(best > 0, tl.minimum(length - start, NUM_DRAFT), 0)
    place = tl.arange(0, DRAFT)
    token = tl.load(history + start + place, mask=place < num, other=0)
    tl.store(result_ptr + sequence * (1 + NUM_DRAFT), num)
    tl.store(result_ptr + sequence * (1 + NUM_DRAFT) + 1 + place, token, mask=place < NUM_DRAFT)


def match_ngrams(
    history: torch.Tensor, lengths: torch.Tensor, num_draft: int, min_n: int, max_n: int
) -> torch.Tensor:
    """Drafts for histories [sequences, max_length] int32 of the given lengths [sequences] int32.

    Returns [sequences, 1 + num_draft] int32: how many tokens, then the tokens.
    """
    num_sequences, max_length = history.shape
    result = torch.zeros((num_sequences, 1 + num_draft), dtype=torch.int32, device=history.device)
    if num_sequences and num_draft:
        match_kernel[(num_sequences,)](
            history,
            lengths,
            result,
            max_length,
            MIN_N=min_n,
            MAX_N=max_n,
            NUM_DRAFT=num_draft,
            DRAFT=power_of_2(num_draft),
            TILE=TILE,
        )
    return result
