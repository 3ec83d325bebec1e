/* The two products of attention on bfloat16 pairs (AVX-512 BF16): twice the work per instruction.
 *
 * Queries and softmax weights are rounded to bfloat16 as keys and values are; sums stay in float32.
 */
#ifndef SPECGATE_ATTENTION_BF16_H
#define SPECGATE_ATTENTION_BF16_H

#include "vec.h"

#ifdef __AVX512BF16__
#define HAS_BF16_PAIRS 1

INLINE __m512i pair_of(const uint16_t *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof(pair));
    return _mm512_set1_epi32(pair);
}

INLINE vf32 add_pairs(vf32 sum, __m512i a, __m512i b) {
    return (vf32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

INLINE void round_to_bf16(const float *from, int64_t count, uint16_t *to) {
    for (int64_t i = 0; i + 16 <= count; i += 16)
        _mm256_storeu_si256((__m256i *)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
}

/* columns[i] = dimensions 2i and 2i + 1 of 16 keys; those beyond `count` are zero. dim: a multiple of 32. */
INLINE void key_pairs_to_columns(const char *const *keys, int64_t count, int64_t dim, vi32 *columns) {
    for (int64_t d = 0; d < dim / 2; d += 16) {
        vi32 m[16];
        if (count >= 16) {
#pragma GCC unroll 16
            for (int k = 0; k < 16; k++) m[k] = (vi32)load_f32((const float *)keys[k] + d);
        } else {
            for (int k = 0; k < 16; k++) m[k] = (vi32){0};
            for (int k = 0; k < count; k++) m[k] = (vi32)load_f32((const float *)keys[k] + d);
        }
        transpose(m);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) columns[d + i] = m[i];
    }
}

/* As score_rows, over pairs. `stride`: floats from one row of scores to the next. */
INLINE void score_row_pairs(const uint16_t *query, const vi32 *left, const vi32 *right, int64_t dim, int rows,
                            int64_t stride, float *scores) {
    vf32 even[4][2], odd[4][2];
    for (int r = 0; r < rows; r++) even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = (vf32){0};
    for (int64_t i = 0; i < dim / 2; i += 2) {
        vi32 a = left[i], b = right[i], c = left[i + 1], e = right[i + 1];
        IN_REGISTER(a);
        IN_REGISTER(b);
        IN_REGISTER(c);
        IN_REGISTER(e);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const __m512i q = pair_of(query + r * dim + 2 * i), p = pair_of(query + r * dim + 2 * i + 2);
            even[r][0] = add_pairs(even[r][0], (__m512i)a, q);
            even[r][1] = add_pairs(even[r][1], (__m512i)b, q);
            odd[r][0] = add_pairs(odd[r][0], (__m512i)c, p);
            odd[r][1] = add_pairs(odd[r][1], (__m512i)e, p);
        }
    }
    for (int r = 0; r < rows; r++) {
        store_f32(scores + r * stride, even[r][0] + odd[r][0]);
        store_f32(scores + r * stride + 16, even[r][1] + odd[r][1]);
    }
}

/* acc[row] += weight[row][key] * value[key] for 32 * width dimensions from d, two keys at a time. The
 * partner of a last odd key has weight 0. `stride`: weights from one row to the next. */
INLINE void add_value_pairs(const uint16_t *weights, const char *const *values, int64_t count, int64_t dim, int64_t d,
                            int width, int rows, int64_t stride, float *acc) {
    static const uint16_t places[2][32] = {
        {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63},
    };
    const __m512i low = _mm512_loadu_si512(places[0]), high = _mm512_loadu_si512(places[1]);
    vf32 sum[4][4];
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < 2 * width; w++) sum[r][w] = load_f32(acc + r * dim + d + w * 16);
    for (int64_t k = 0; k < count; k += 2) {
        const uint16_t *one = (const uint16_t *)values[k] + d;
        const uint16_t *two = (const uint16_t *)values[k + 1 < count ? k + 1 : k] + d;
        vf32 v[4];
#pragma GCC unroll 2
        for (int w = 0; w < width; w++) {
            const __m512i x = _mm512_loadu_si512(one + 32 * w), y = _mm512_loadu_si512(two + 32 * w);
            v[2 * w] = (vf32)_mm512_permutex2var_epi16(x, low, y);
            v[2 * w + 1] = (vf32)_mm512_permutex2var_epi16(x, high, y);
            IN_REGISTER(v[2 * w]);
            IN_REGISTER(v[2 * w + 1]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const __m512i weight = pair_of(weights + r * stride + k);
#pragma GCC unroll 4
            for (int w = 0; w < 2 * width; w++) sum[r][w] = add_pairs(sum[r][w], (__m512i)v[w], weight);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < 2 * width; w++) store_f32(acc + r * dim + d + w * 16, sum[r][w]);
}

#else
#define HAS_BF16_PAIRS 0
#endif

#endif
