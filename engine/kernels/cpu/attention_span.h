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
#define KEYS 2            /* keys that share one pass over queries */
#if LANES == 16
#define WIDTH 4           /* vectors of a value that share one pass over keys */
#else
#define WIDTH 2
#endif

INLINE int64_t type_size(int64_t type) { return type == TYPE_F32 ? 4 : 2; }

INLINE vf32 load_any(const char *p, int64_t i, int64_t type) {
    return type == TYPE_F32 ? load_f32((const float *)p + i) : load_bf16((const uint16_t *)p + i);
}

INLINE float load_scalar(const char *p, int64_t i, int64_t type) {
    return type == TYPE_F32 ? ((const float *)p)[i] : bf16_to_f32(((const uint16_t *)p)[i]);
}

/* Splits rows of queries as bfloat16 keys are: of 2 * LANES dimensions first the even ones, then the odd ones.
 * Dimensions that fill no such block stay where they are. */
INLINE void split_pairs(const float *query, int64_t rows, int64_t dim, float *to) {
    memcpy(to, query, (size_t)(rows * dim) * sizeof(float));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = r * dim; d + 2 * LANES <= (r + 1) * dim; d += 2 * LANES)
            for (int64_t i = 0; i < LANES; i++) {
                to[d + i] = query[d + 2 * i];
                to[d + LANES + i] = query[d + 2 * i + 1];
            }
}

/* products[row * LANES + key] = per lane, the sum over dimensions of query x key, for KEYS keys from `first`. */
INLINE void multiply_keys(const float *query, const char *const *keys, int first, int64_t dim, int64_t type, int rows,
                          vf32 *products) {
    vf32 sum[ROWS][KEYS];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < KEYS; k++) sum[r][k] = (vf32){0};
    const int parts = type == TYPE_F32 ? 1 : 2;
    for (int64_t d = 0; d + parts * LANES <= dim; d += parts * LANES) {
        vf32 key[2][KEYS] = {{{0}}};
#pragma GCC unroll 2
        for (int k = 0; k < KEYS; k++) {
            key[0][k] = load_f32((const float *)(keys[first + k] + d * type_size(type)));
            if (type != TYPE_F32) {
                key[1][k] = (vf32)((vu32)key[0][k] & 0xffff0000u);
                key[0][k] = (vf32)((vu32)key[0][k] << 16);
            }
        }
#pragma GCC unroll 2
        for (int part = 0; part < parts; part++)
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const vf32 q = load_f32(query + r * dim + d + part * LANES);
#pragma GCC unroll 2
                for (int k = 0; k < KEYS; k++) sum[r][k] = multiply_add(key[part][k], q, sum[r][k]);
            }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int k = 0; k < KEYS; k++) products[r * LANES + first + k] = sum[r][k];
}

/* scores[row * SPAN + key] = query row . key, for LANES keys. */
INLINE void score_rows(const float *query, const char *const *keys, int64_t dim, int64_t type, int rows, float *scores) {
    vf32 products[ROWS * LANES];
    for (int k = 0; k < LANES; k += KEYS) multiply_keys(query, keys, k, dim, type, rows, products);
    vf32 score[ROWS];
    for (int r = 0; r < rows; r++) score[r] = sums_of_vectors(products + r * LANES);
    const int64_t whole = dim - dim % (type == TYPE_F32 ? LANES : 2 * LANES);
    for (int64_t d = whole; d < dim; d++) {
        vf32 column;
        for (int k = 0; k < LANES; k++) column[k] = load_scalar(keys[k], d, type);
        for (int r = 0; r < rows; r++) score[r] = multiply_add(column, splat(query[r * dim + d]), score[r]);
    }
    for (int r = 0; r < rows; r++) store_f32(scores + r * SPAN, score[r]);
}

/* acc[row] += sum over keys of weight[row][key] * value[key], for LANES * width dimensions from d. */
INLINE void add_values(const float *weights, const char *const *values, int64_t count, int64_t dim, int64_t d,
                       int width, int64_t type, int rows, float *acc) {
    vf32 sum[ROWS][WIDTH];
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < width; w++) sum[r][w] = load_f32(acc + r * dim + d + w * LANES);
    for (int64_t k = 0; k < count; k++) {
        vf32 v[WIDTH];
#pragma GCC unroll 4
        for (int w = 0; w < width; w++) {
            v[w] = load_any(values[k], d + w * LANES, type);
            IN_REGISTER(v[w]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int w = 0; w < width; w++) sum[r][w] = multiply_add(v[w], splat(weights[r * SPAN + k]), sum[r][w]);
    }
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < width; w++) store_f32(acc + r * dim + d + w * LANES, sum[r][w]);
}

INLINE void add_values_all(const float *weights, const char *const *values, int64_t count, int64_t dim,
                           int64_t type, int rows, float *acc) {
    int64_t d = 0;
    for (; d + WIDTH * LANES <= dim; d += WIDTH * LANES)
        add_values(weights, values, count, dim, d, WIDTH, type, rows, acc);
    for (; d + LANES <= dim; d += LANES) add_values(weights, values, count, dim, d, 1, type, rows, acc);
    for (; d < dim; d++)
        for (int r = 0; r < rows; r++)
            for (int64_t k = 0; k < count; k++)
                acc[r * dim + d] += weights[r * SPAN + k] * load_scalar(values[k], d, type);
}

/* Online softmax over one span of scores: weights in place, running maximum, sum and scale. */
INLINE void weigh_row(float *scores, const uint32_t *masks, int subs, float *max, float *sum, float *acc,
                      int64_t dim) {
    const vi32 bit = {FIRST_LANES(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)};
    const vf32 never = splat(-INFINITY);
    vf32 highest = never, total = {0};
    for (int i = 0; i < subs; i++) {
        vi32 seen = ((int32_t)masks[i] & bit) != 0;
        highest = max_f32(highest, select_f32(seen, load_f32(scores + i * LANES), never));
    }
    float before = *max, now = max_lanes(highest);
    if (before > now) now = before;
    if (now == -INFINITY) { /* nothing seen yet */
        for (int i = 0; i < subs; i++) store_f32(scores + i * LANES, (vf32){0});
        return;
    }
    for (int i = 0; i < subs; i++) {
        vi32 seen = ((int32_t)masks[i] & bit) != 0;
        vf32 weight = exp_f32(load_f32(scores + i * LANES) - now);
        weight = select_f32(seen, weight, (vf32){0});
        store_f32(scores + i * LANES, weight);
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

/* Scores of all rows over a span, as floats. Those beyond `count` are some key's. */
INLINE void score_span(const float *query, int64_t rows, const char *const *keys, int64_t count, int64_t dim,
                       int64_t type, float *scores) {
    float split[MAX_TILE_ROWS * MAX_HEAD_DIM] ALIGNED;
    if (type == TYPE_BF16) {
        split_pairs(query, rows, dim, split);
        query = split;
    }
    for (int64_t at = 0; at < count; at += LANES) {
        float *to = scores + at;
        int64_t r = 0;
        const char *few[LANES];
        const char *const *some = keys + at;
        if (count - at < LANES) {
            for (int k = 0; k < LANES; k++) few[k] = keys[at + k < count ? at + k : at];
            some = few;
        }
        for (; r + 4 <= rows; r += 4) score_rows(query + r * dim, some, dim, type, 4, to + r * SPAN);
        if (rows - r == 3) score_rows(query + r * dim, some, dim, type, 3, to + r * SPAN);
        if (rows - r == 2) score_rows(query + r * dim, some, dim, type, 2, to + r * SPAN);
        if (rows - r == 1) score_rows(query + r * dim, some, dim, type, 1, to + r * SPAN);
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
    vi32 left[MAX_HEAD_DIM / 2], right[MAX_HEAD_DIM / 2];
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
