/* Philox4x32-10 (Salmon et al., SC'11) over many counters: the numbers behind Gumbel noise.
 *
 * The definition is engine/spec/randomness.py; this must give the same integers. */
#ifndef SPECGATE_PHILOX_H
#define SPECGATE_PHILOX_H

#include "vec.h"

/* high and low words of x * by, lane by lane. */
INLINE void multiply_words(vu32 x, uint32_t by, vu32 *high, vu32 *low) {
#if HAS_AVX512
    const __m512i a = (__m512i)x, b = _mm512_set1_epi64(by);
    const __m512i even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
    *high = (vu32)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    *low = (vu32)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
#elif HAS_AVX2
    const __m256i a = (__m256i)x, b = _mm256_set1_epi64x(by);
    const __m256i even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
    *high = (vu32)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    *low = (vu32)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
#else
    for (int i = 0; i < LANES; i++) {
        const uint64_t product = (uint64_t)x[i] * by;
        (*high)[i] = (uint32_t)(product >> 32);
        (*low)[i] = (uint32_t)product;
    }
#endif
}

/* words[w]: word w of the LANES blocks from `first` on. row: the upper counter words (position, salt, stream) and
 * the key (low, high). */
INLINE void philox_lanes(const uint64_t *row, uint32_t first, vu32 words[4]) {
    vu32 c0, c1 = (vu32){0} + (uint32_t)row[0], c2 = (vu32){0} + (uint32_t)row[1], c3 = (vu32){0} + (uint32_t)row[2];
    uint32_t k0 = (uint32_t)row[3], k1 = (uint32_t)row[4];
    for (int i = 0; i < LANES; i++) c0[i] = first + (uint32_t)i;
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        vu32 high0, low0, high1, low1;
        multiply_words(c0, 0xD2511F53u, &high0, &low0);
        multiply_words(c2, 0xCD9E8D57u, &high1, &low1);
        c0 = high1 ^ c1 ^ k0;
        c2 = high0 ^ c3 ^ k1;
        c1 = low1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

#endif
