/* One span of keys against the rows of a tile: scores, softmax weights, weighted sums of values.
 *
 * `type` and mostly `dim` are constants where these are called, so each use becomes code of its own.
 */
#ifndef SPECGATE_ATTENTION_SPAN_H
#define SPECGATE_ATTENTION_SPAN_H

#include "attention.h"
#include "attention_bf16.h"
#include "vec.h"

#define SPAN 64           /* key positions between two rescalings */
#define MAX_HEAD_DIM 256
#define MAX_TILE_ROWS 64  /* query rows (tokens x heads of the group) of a tile */
#define ROWS 4            /* rows that share one pass over keys or values in registers */

INLINE int64_t type_size(int64_t type) { return type == TYPE_F32 ? 4 : 2; }

INLINE f32x16 load_any(const char *p, int64_t i, int64_t type) {
    return type == TYPE_F32 ? load_f32((const float *)p + i) : load_bf16((const uint16_t *)p + i);
}

INLINE float load_scalar(const char *p, int64_t i, int64_t type) {
    return type == TYPE_F32 ? ((const float *)p)[i] : bf16_to_f32(((const uint16_t *)p)[i]);
}

/* 16 rows of keys become columns: columns[d] holds dimension d of all 16, as floats. For bfloat16 two
 * neighbouring dimensions travel together as one 32-bit element. Keys beyond `count` are zero. */
INLINE void keys_to_columns(const char *const *keys, int64_t count, int64_t dim, int64_t type, f32x16 *columns) {
    const int64_t step = type == TYPE_F32 ? 16 : 32;
    int64_t d = 0;
    for (; d + step <= dim; d += step) {
        i32x16 m[16];
        if (count >= 16) {
#pragma GCC unroll 16
            for (int k = 0; k < 16; k++) m[k] = (i32x16)load_f32((const float *)(keys[k] + d * type_size(type)));
        } else {
            for (int k = 0; k < 16; k++) m[k] = (i32x16){0};
            for (int k = 0; k < count; k++) m[k] = (i32x16)load_f32((const float *)(keys[k] + d * type_size(type)));
        }
        transpose_16x16(m);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (type == TYPE_F32) {
                columns[d + i] = (f32x16)m[i];
            } else {
                columns[d + 2 * i] = (f32x16)((u32x16)m[i] << 16);
                columns[d + 2 * i + 1] = (f32x16)((u32x16)m[i] & 0xffff0000u);
            }
        }
    }
    for (; d < dim; d++)
        for (int k = 0; k < 16; k++) columns[d][k] = k < count ? load_scalar(keys[k], d, type) : 0.0f;
}

/* scores[row][0..31] = query row . 32 keys in two sets of columns; even and odd dimensions are summed
 * apart, which keeps enough sums in flight for a single row too. */
INLINE void score_rows(const float *query, const f32x16 *left, const f32x16 *right, int64_t dim, int rows,
                       float *scores) {
    f32x16 even[ROWS][2], odd[ROWS][2];
    for (int r = 0; r < rows; r++) even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = (f32x16){0};
    for (int64_t d = 0; d + 1 < dim; d += 2) {
        f32x16 a = left[d], b = right[d], c = left[d + 1], e = right[d + 1];
        IN_REGISTER(a);
        IN_REGISTER(b);
        IN_REGISTER(c);
        IN_REGISTER(e);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const f32x16 q = splat(query[r * dim + d]), p = splat(query[r * dim + d + 1]);
            even[r][0] += a * q;
            even[r][1] += b * q;
            odd[r][0] += c * p;
            odd[r][1] += e * p;
        }
    }
    if (dim & 1)
        for (int r = 0; r < rows; r++) {
            even[r][0] += left[dim - 1] * query[r * dim + dim - 1];
            even[r][1] += right[dim - 1] * query[r * dim + dim - 1];
        }
    for (int r = 0; r < rows; r++) {
        store_f32(scores + r * SPAN, even[r][0] + odd[r][0]);
        store_f32(scores + r * SPAN + 16, even[r][1] + odd[r][1]);
    }
}

/* acc[row] += sum over keys of weight[row][key] * value[key], for 16 * width dimensions from d. */
INLINE void add_values(const float *weights, const char *const *values, int64_t count, int64_t dim, int64_t d,
                       int width, int64_t type, int rows, float *acc) {
    f32x16 sum[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < width; w++) sum[r][w] = load_f32(acc + r * dim + d + w * 16);
    for (int64_t k = 0; k < count; k++) {
        f32x16 v[4];
#pragma GCC unroll 4
        for (int w = 0; w < width; w++) {
            v[w] = load_any(values[k], d + w * 16, type);
            IN_REGISTER(v[w]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int w = 0; w < width; w++) sum[r][w] += v[w] * weights[r * SPAN + k];
    }
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < width; w++) store_f32(acc + r * dim + d + w * 16, sum[r][w]);
}

INLINE void add_values_all(const float *weights, const char *const *values, int64_t count, int64_t dim,
                           int64_t type, int rows, float *acc) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) add_values(weights, values, count, dim, d, 4, type, rows, acc);
    for (; d + 16 <= dim; d += 16) add_values(weights, values, count, dim, d, 1, type, rows, acc);
    for (; d < dim; d++)
        for (int r = 0; r < rows; r++)
            for (int64_t k = 0; k < count; k++)
                acc[r * dim + d] += weights[r * SPAN + k] * load_scalar(values[k], d, type);
}

/* Online softmax over one span of scores: weights in place, running maximum, sum and scale. */
INLINE void weigh_row(float *scores, const uint32_t *masks, int subs, float *max, float *sum, float *acc,
                      int64_t dim) {
    const i32x16 bit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    const f32x16 never = splat(-INFINITY);
    f32x16 highest = never, total = {0};
    for (int i = 0; i < subs; i++) {
        i32x16 seen = ((int32_t)masks[i] & bit) != 0;
        highest = max_f32(highest, select_f32(seen, load_f32(scores + i * 16), never));
    }
    float before = *max, now = max_lanes(highest);
    if (before > now) now = before;
    if (now == -INFINITY) { /* nothing seen yet */
        for (int i = 0; i < subs; i++) store_f32(scores + i * 16, (f32x16){0});
        return;
    }
    for (int i = 0; i < subs; i++) {
        i32x16 seen = ((int32_t)masks[i] & bit) != 0;
        f32x16 weight = exp_f32(load_f32(scores + i * 16) - now);
        weight = select_f32(seen, weight, (f32x16){0});
        store_f32(scores + i * 16, weight);
        total = total + weight;
    }
    if (now != before) {
        float scale = before == -INFINITY ? 0.0f : exp_scalar(before - now);
        for (int64_t d = 0; d < dim; d++) acc[d] *= scale;
        *sum *= scale;
        *max = now;
    }
    *sum += sum_lanes(total);
}

/* Scores of all rows over a span, as floats. */
INLINE void score_span(const float *query, int64_t rows, const char *const *keys, int64_t count, int64_t dim,
                       int64_t type, float *scores) {
    f32x16 left[MAX_HEAD_DIM], right[MAX_HEAD_DIM];
    for (int64_t at = 0; at < count; at += 32) {
        float *to = scores + at;
        int64_t r = 0;
        keys_to_columns(keys + at, count - at, dim, type, left);
        keys_to_columns(keys + at + 16, count - at - 16, dim, type, right);
        for (; r + 4 <= rows; r += 4) score_rows(query + r * dim, left, right, dim, 4, to + r * SPAN);
        if (rows - r == 3) score_rows(query + r * dim, left, right, dim, 3, to + r * SPAN);
        if (rows - r == 2) score_rows(query + r * dim, left, right, dim, 2, to + r * SPAN);
        if (rows - r == 1) score_rows(query + r * dim, left, right, dim, 1, to + r * SPAN);
    }
}

INLINE void add_span(const float *weights, int64_t rows, const char *const *values, int64_t count, int64_t dim,
                     int64_t type, float *acc) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) add_values_all(weights + r * SPAN, values, count, dim, type, 4, acc + r * dim);
    if (rows - r == 3) add_values_all(weights + r * SPAN, values, count, dim, type, 3, acc + r * dim);
    if (rows - r == 2) add_values_all(weights + r * SPAN, values, count, dim, type, 2, acc + r * dim);
    if (rows - r == 1) add_values_all(weights + r * SPAN, values, count, dim, type, 1, acc + r * dim);
}

#if !HAS_BF16_PAIRS
#define score_span_pairs(query, rows, keys, count, dim, scores) ((void)0)
#define add_span_pairs(weights, rows, values, count, dim, acc) ((void)0)
#else

INLINE void score_span_pairs(const float *query, int64_t rows, const char *const *keys, int64_t count, int64_t dim,
                             float *scores) {
    i32x16 left[MAX_HEAD_DIM / 2], right[MAX_HEAD_DIM / 2];
    uint16_t q[MAX_TILE_ROWS * MAX_HEAD_DIM] ALIGNED;
    round_to_bf16(query, rows * dim, q);
    for (int64_t at = 0; at < count; at += 32) {
        float *to = scores + at;
        int64_t r = 0;
        key_pairs_to_columns(keys + at, count - at, dim, left);
        key_pairs_to_columns(keys + at + 16, count - at - 16, dim, right);
        for (; r + 4 <= rows; r += 4) score_row_pairs(q + r * dim, left, right, dim, 4, SPAN, to + r * SPAN);
        if (rows - r == 3) score_row_pairs(q + r * dim, left, right, dim, 3, SPAN, to + r * SPAN);
        if (rows - r == 2) score_row_pairs(q + r * dim, left, right, dim, 2, SPAN, to + r * SPAN);
        if (rows - r == 1) score_row_pairs(q + r * dim, left, right, dim, 1, SPAN, to + r * SPAN);
    }
}

INLINE void add_row_pairs(const uint16_t *weights, const char *const *values, int64_t count, int64_t dim, int rows,
                          float *acc) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) add_value_pairs(weights, values, count, dim, d, 2, rows, SPAN, acc);
    if (d < dim) add_value_pairs(weights, values, count, dim, d, 1, rows, SPAN, acc);
}

INLINE void add_span_pairs(const float *weights, int64_t rows, const char *const *values, int64_t count, int64_t dim,
                           float *acc) {
    uint16_t w[MAX_TILE_ROWS * SPAN] ALIGNED;
    int64_t r = 0;
    round_to_bf16(weights, rows * SPAN, w);
    for (; r + 4 <= rows; r += 4) add_row_pairs(w + r * SPAN, values, count, dim, 4, acc + r * dim);
    if (rows - r == 3) add_row_pairs(w + r * SPAN, values, count, dim, 3, acc + r * dim);
    if (rows - r == 2) add_row_pairs(w + r * SPAN, values, count, dim, 2, acc + r * dim);
    if (rows - r == 1) add_row_pairs(w + r * SPAN, values, count, dim, 1, acc + r * dim);
}

#endif

#endif
