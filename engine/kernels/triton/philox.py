"""Noise on the device: the same numbers as `engine.spec.randomness`, word for word."""

from __future__ import annotations

import triton
import triton.language as tl

GUMBEL_STREAM = tl.constexpr(0)
UNIFORM_STREAM = tl.constexpr(1)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox4x32 on uint32 tensors that broadcast together; four words."""
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        low0 = c0 * 0xD2511F53
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low1 = c2 * 0xCD9E8D57
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def to_gumbel(words):
    """uint32 words to -log(-log(1 - v)), v = (word + 1/2) / 2**32; see `randomness._to_gumbel`.

    For small v, where the large noise comes from, -log(1 - v) is summed as a series: a difference
    from 1 would lose the digits that decide.
    """
    v = words.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    v = tl.minimum(v, 1.0 - 5.960464477539063e-08)
    series = v * (1.0 + v * (0.5 + v * (0.33333333 + v * (0.25 + v * (0.2 + v * 0.16666667)))))
    # The difference is exact for v above 1/16 but for one rounding of 1 - v.
    exponential = tl.where(v < 0.0625, series, -tl.log(1.0 - v))
    return -tl.log(exponential)


@triton.jit
def gumbel_of(token_ids, position, salt, k0, k1):
    """Gumbel noise of arbitrary token ids (int32) at one position. position .. k1: uint32 scalars."""
    block = (token_ids // 4).to(tl.uint32)
    zero = block * 0
    w0, w1, w2, w3 = philox4x32(
        block, zero + position, zero + salt, zero + GUMBEL_STREAM, zero + k0, zero + k1
    )
    lane = token_ids % 4
    words = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return to_gumbel(words)


@triton.jit
def gumbel_run(first, position, salt, k0, k1, NUM: tl.constexpr):
    """Gumbel noise of the NUM token ids from `first` on, a multiple of 4: [NUM] float32."""
    block = ((first // 4) + tl.arange(0, NUM // 4)).to(tl.uint32)
    zero = block * 0
    w0, w1, w2, w3 = philox4x32(
        block, zero + position, zero + salt, zero + GUMBEL_STREAM, zero + k0, zero + k1
    )
    return to_gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def uniform(index, position, salt, k0, k1):
    """Number `index` of `RandomKey.uniform(position, ...)`: a float64 scalar in [0, 1), 53 bits."""
    block = (index // 2).to(tl.uint32)
    zero = block * 0
    w0, w1, w2, w3 = philox4x32(
        block, zero + position, zero + salt, zero + UNIFORM_STREAM, zero + k0, zero + k1
    )
    is_even = index % 2 == 0
    high = tl.where(is_even, w0, w2) >> 5
    low = tl.where(is_even, w1, w3) >> 6
    return (high.to(tl.float64) * 67108864.0 + low.to(tl.float64)) * 1.1102230246251565e-16
