/* Products of quantised weights and activations.
 *
 * Weights keep their values where a model file stored them in blocks of 32 on 16 evenly spaced
 * levels (GGUF's Q4_0, Q4_1) or 8 symmetric bits (Q8_0); all others are rounded to 8 bits per
 * block. Activations are rounded to 8 bits per token and block of 32. Within a block the products
 * are summed as integers, exactly; the blocks' sums are added as floats, in order of the input
 * features. So an output depends on its own row alone and not on how many rows share the call.
 *
 * Packed layout, per panel of 16 outputs: for each block the 8-bit weights as 8 vectors of
 * [16 outputs][4 inputs], or the 4-bit ones as 4 vectors whose low halves are vectors 0..3 and
 * whose high halves are vectors 4..7; then for each block 16 scales and, for 4 bits, 16 least
 * values, as half floats.
 */
#include "quant.h"

#include <stdlib.h>

#include "quant_layout.h"
#include "team.h"
#include "vec.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define USE_VNNI
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define USE_AVX2
#include <immintrin.h>
#endif

int64_t num_panels(const quant_matrix *m) { return (m->num_rows + PANEL - 1) / PANEL; }

/* --- activations ---------------------------------------------------------------------------- */

INLINE int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t quant_rows_bytes(int64_t num_rows, int64_t num_cols) {
    const int64_t blocks = num_rows * blocks_of(num_cols);
    return padded(blocks * BLOCK) + 3 * padded(blocks * 4);
}

quant_rows quant_rows_at(void *memory, int64_t num_rows, int64_t num_cols) {
    const int64_t blocks = num_rows * blocks_of(num_cols);
    char *at = memory;
    quant_rows rows = {.num_blocks = blocks_of(num_cols)};
    rows.values = (int8_t *)at;
    rows.scales = (float *)(at += padded(blocks * BLOCK));
    rows.sums = (float *)(at += padded(blocks * 4));
    rows.offsets = (int32_t *)(at + padded(blocks * 4));
    return rows;
}

/* from: `count` values of one block; the rest of the block counts as zeros. */
void quantise_block(const quant_rows *to, int64_t row, int64_t block, const float *from, int64_t count) {
    const int64_t index = row * to->num_blocks + block;
    int8_t *values = to->values + index * BLOCK;
    float whole[BLOCK] ALIGNED;
    if (count < BLOCK) {
        memset(whole, 0, sizeof(whole));
        memcpy(whole, from, (size_t)count * sizeof(float));
        from = whole;
    }
    const f32x16 a = load_f32(from), b = load_f32(from + 16);
    const i32x16 magnitude = (i32x16){0} + 0x7fffffff;
    const float highest = max_lanes(max_f32((f32x16)((i32x16)a & magnitude), (f32x16)((i32x16)b & magnitude)));
    const float inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
    const f32x16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    const i32x16 x = (i32x16)(a * inverse + magic) - (i32x16)magic;
    const i32x16 y = (i32x16)(b * inverse + magic) - (i32x16)magic;
    typedef int8_t i8x16 __attribute__((vector_size(16), aligned(1), may_alias));
    *(i8x16 *)values = __builtin_convertvector(x, i8x16);
    *(i8x16 *)(values + 16) = __builtin_convertvector(y, i8x16);
    const int32_t sum = (int32_t)sum_lanes(__builtin_convertvector(x + y, f32x16)); /* exact: below 2^13 */
    to->scales[index] = highest / 127.0f;
    to->sums[index] = highest / 127.0f * (float)sum;
    to->offsets[index] = -128 * sum;
}

void quantise_row(const quant_rows *to, int64_t row, const float *from, int64_t num_cols) {
    for (int64_t block = 0; block < to->num_blocks; block++) {
        int64_t left = num_cols - block * BLOCK;
        quantise_block(to, row, block, from + block * BLOCK, left < BLOCK ? left : BLOCK);
    }
}

/* --- products ------------------------------------------------------------------------------- */

#if defined(USE_VNNI)

/* Bytes ahead: the processor's own prefetcher stops at each page's end, which a panel crosses soon. Far
 * enough that a memory's latency passes meanwhile, and less than what a thread claims at a time. */
#define PREFETCHED 6144

INLINE void multiply_tile(const uint8_t *data, const uint16_t *scales, const quant_rows *rows, int64_t first,
                          int64_t count, int64_t kind, float *tile) {
    const int64_t blocks = rows->num_blocks;
    const __m512i low = _mm512_set1_epi8(15);
    __m512 acc[MAX_TILE];
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) acc[r] = _mm512_setzero_ps();
    for (int64_t block = 0; block < blocks; block++) {
        __m512i w[8];
        const char *ahead = (const char *)data + block * block_bytes(kind) + PREFETCHED;
#pragma GCC unroll 8
        for (int j = 0; j < block_bytes(kind) / 64; j++) _mm_prefetch(ahead + j * 64, _MM_HINT_T0);
        if (kind == WEIGHTS_4BIT) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                __m512i pair = _mm512_loadu_si512(data + block * 256 + j * 64);
                w[j] = _mm512_and_si512(pair, low);
                w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(pair, 4), low);
            }
        } else {
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) w[j] = _mm512_loadu_si512(data + block * 512 + j * 64);
        }
        const uint16_t *half = scales + block * scale_halves(kind);
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)half));
        __m512 least = _mm512_setzero_ps();
        if (kind == WEIGHTS_4BIT) least = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(half + PANEL)));
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            const int64_t index = (first + r) * blocks + block;
            const int32_t *values = (const int32_t *)(rows->values + index * BLOCK);
            __m512i sum = kind == WEIGHTS_4BIT ? _mm512_setzero_si512() : _mm512_set1_epi32(rows->offsets[index]);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) sum = _mm512_dpbusd_epi32(sum, w[j], _mm512_set1_epi32(values[j]));
            const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(rows->scales[index]));
            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), both, acc[r]);
            if (kind == WEIGHTS_4BIT) acc[r] = _mm512_fmadd_ps(least, _mm512_set1_ps(rows->sums[index]), acc[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) _mm512_storeu_ps(tile + r * PANEL, acc[r]);
}

#elif defined(USE_AVX2)

/* 16 outputs x 2 neighbouring products in 16-bit lanes hold 8 x 2 x 15 x 127 for 4-bit weights. For 8
 * bits the activation's sign moves to the weight, so that |a| * w never saturates, and sums are
 * widened at once. */
INLINE void multiply_tile(const uint8_t *data, const uint16_t *scales, const quant_rows *rows, int64_t first,
                          int64_t count, int64_t kind, float *tile) {
    const int64_t blocks = rows->num_blocks;
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), middle = _mm256_set1_epi8(-128);
    memset(tile, 0, (size_t)count * PANEL * sizeof(float));
    for (int64_t block = 0; block < blocks; block++) {
        __m256i w[8][2];
        for (int j = 0; j < 8; j++)
            for (int half = 0; half < 2; half++) {
                if (kind == WEIGHTS_4BIT) {
                    __m256i pair = _mm256_loadu_si256((const __m256i *)(data + block * 256 + j % 4 * 64 + half * 32));
                    w[j][half] = _mm256_and_si256(j < 4 ? pair : _mm256_srli_epi16(pair, 4), low);
                } else {
                    __m256i q = _mm256_loadu_si256((const __m256i *)(data + block * 512 + j * 64 + half * 32));
                    w[j][half] = _mm256_xor_si256(q, middle);
                }
            }
        for (int64_t r = 0; r < count; r++) {
            const int64_t index = (first + r) * blocks + block;
            const int32_t *values = (const int32_t *)(rows->values + index * BLOCK);
            __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                const __m256i a = _mm256_set1_epi32(values[j]);
                for (int half = 0; half < 2; half++) {
                    if (kind == WEIGHTS_4BIT) {
                        sum[half] = _mm256_add_epi16(sum[half], _mm256_maddubs_epi16(w[j][half], a));
                    } else {
                        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(w[j][half], a));
                        sum[half] = _mm256_add_epi32(sum[half], _mm256_madd_epi16(pairs, ones));
                    }
                }
            }
            for (int half = 0; half < 2; half++) {
                const uint16_t *from = scales + block * scale_halves(kind) + half * 8;
                const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
                const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(rows->scales[index]));
                float *to = tile + r * PANEL + half * 8;
                if (kind == WEIGHTS_4BIT) sum[half] = _mm256_madd_epi16(sum[half], ones);
                __m256 acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[half]), both, _mm256_loadu_ps(to));
                if (kind == WEIGHTS_4BIT) {
                    const __m256 least = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + PANEL)));
                    acc = _mm256_fmadd_ps(least, _mm256_set1_ps(rows->sums[index]), acc);
                }
                _mm256_storeu_ps(to, acc);
            }
        }
    }
}

#else

#ifdef FP_FAST_FMAF
#define MULTIPLY_ADD(a, b, c) fmaf(a, b, c)
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif

/* Any machine: the same sums in the same order, in vectors where the compiler finds them. */
INLINE void multiply_tile(const uint8_t *data, const uint16_t *scales, const quant_rows *rows, int64_t first,
                          int64_t count, int64_t kind, float *tile) {
    const int64_t blocks = rows->num_blocks;
    memset(tile, 0, (size_t)count * PANEL * sizeof(float));
    for (int64_t block = 0; block < blocks; block++) {
        int16_t w[8][PANEL * 4];
        for (int j = 0; j < 8; j++)
            for (int i = 0; i < PANEL * 4; i++) {
                if (kind == WEIGHTS_8BIT) w[j][i] = data[block * 512 + j * 64 + i];
                else w[j][i] = j < 4 ? data[block * 256 + j * 64 + i] & 15 : data[block * 256 + (j - 4) * 64 + i] >> 4;
            }
        float scale[PANEL], least[PANEL];
        for (int lane = 0; lane < PANEL; lane++) {
            scale[lane] = half_to_f32(scales[block * scale_halves(kind) + lane]);
            least[lane] = kind == WEIGHTS_4BIT ? half_to_f32(scales[block * scale_halves(kind) + PANEL + lane]) : 0.0f;
        }
        for (int64_t r = 0; r < count; r++) {
            const int64_t index = (first + r) * blocks + block;
            int32_t sum[PANEL * 4] = {0};
            for (int j = 0; j < 8; j++) {
                int16_t four[PANEL * 4]; /* the 4 inputs of vector j, once for each output */
                for (int i = 0; i < PANEL * 4; i++) four[i] = rows->values[index * BLOCK + j * 4 + i % 4];
                for (int i = 0; i < PANEL * 4; i++) sum[i] += w[j][i] * four[i];
            }
            for (int lane = 0; lane < PANEL; lane++) {
                int32_t whole = sum[4 * lane] + sum[4 * lane + 1] + sum[4 * lane + 2] + sum[4 * lane + 3];
                float *to = tile + r * PANEL + lane;
                if (kind == WEIGHTS_8BIT) whole += rows->offsets[index];
                *to = MULTIPLY_ADD((float)whole, scale[lane] * rows->scales[index], *to);
                if (kind == WEIGHTS_4BIT) *to = MULTIPLY_ADD(least[lane], rows->sums[index], *to);
            }
        }
    }
}

#endif

#define TILE_CASE(n) \
    case n: multiply_tile(data, scales, rows, first, n, kind, tile); break;

INLINE void multiply_any(const uint8_t *data, const uint16_t *scales, const quant_rows *rows, int64_t first,
                         int64_t count, int64_t kind, float *tile) {
    switch (count) {
        TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5) TILE_CASE(6) TILE_CASE(7) TILE_CASE(8)
    }
}

static __attribute__((noinline)) void multiply_4bit(const uint8_t *data, const uint16_t *scales,
                                                    const quant_rows *rows, int64_t first, int64_t count, float *tile) {
    multiply_any(data, scales, rows, first, count, WEIGHTS_4BIT, tile);
}

static __attribute__((noinline)) void multiply_8bit(const uint8_t *data, const uint16_t *scales,
                                                    const quant_rows *rows, int64_t first, int64_t count, float *tile) {
    multiply_any(data, scales, rows, first, count, WEIGHTS_8BIT, tile);
}

void multiply_panel(const quant_matrix *m, int64_t panel, const quant_rows *rows, int64_t first, int64_t count,
                    float *tile) {
    const uint8_t *data = m->data + panel * panel_bytes(m->num_cols, m->kind);
    const uint16_t *scales = (const uint16_t *)(data + rows->num_blocks * block_bytes(m->kind));
    (m->kind == WEIGHTS_4BIT ? multiply_4bit : multiply_8bit)(data, scales, rows, first, count, tile);
    if (m->bias == NULL) return;
    for (int64_t lane = 0; lane < PANEL && panel * PANEL + lane < m->num_rows; lane++)
        for (int64_t r = 0; r < count; r++) tile[r * PANEL + lane] += m->bias[panel * PANEL + lane];
}

static void write_panel(const quant_matrix *matrix, int64_t panel, const quant_rows *rows, int64_t num_rows, float *out) {
    const int64_t left = matrix->num_rows - panel * PANEL;
    const int64_t tiles = (num_rows + MAX_TILE - 1) / MAX_TILE, step = (num_rows + tiles - 1) / tiles;
    for (int64_t first = 0; first < num_rows; first += step) {
        const int64_t count = num_rows - first < step ? num_rows - first : step;
        float tile[MAX_TILE * PANEL] ALIGNED;
        multiply_panel(matrix, panel, rows, first, count, tile);
        for (int64_t r = 0; r < count; r++)
            memcpy(out + (first + r) * matrix->num_rows + panel * PANEL, tile + r * PANEL,
                   (size_t)(left < PANEL ? left : PANEL) * sizeof(float));
    }
}

/* out [num_rows, matrix rows] = input [num_rows, matrix cols] x matrix^T + bias. Returns 0, or -1
 * when memory ran out. */
int64_t specgate_linear(const quant_matrix *matrix, const float *input, int64_t num_rows, float *out,
                        int64_t num_threads) {
    void *memory;
    if (num_rows == 0) return 0;
    if (posix_memalign(&memory, 64, (size_t)quant_rows_bytes(num_rows, matrix->num_cols)) != 0) return -1;
    const quant_rows rows = quant_rows_at(memory, num_rows, matrix->num_cols);
    team threads = {0};
    num_threads = useful_threads(num_threads, num_rows * matrix->num_rows * matrix->num_cols);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        const worker w = join_team(&threads);
        int64_t first_panel, last_panel;
        for (int64_t r = first_row(&w, num_rows); r < last_row(&w, num_rows); r++)
            quantise_row(&rows, r, input + r * matrix->num_cols, matrix->num_cols);
        next_phase(&w);
        while (claim(&w, num_panels(matrix), &first_panel, &last_panel))
            for (int64_t panel = first_panel; panel < last_panel; panel++)
                write_panel(matrix, panel, &rows, num_rows, out);
    }
    free(memory);
    return 0;
}
