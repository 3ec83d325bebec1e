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
    const vi32 magnitude = (vi32){0} + 0x7fffffff;
    vf32 most = {0};
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK; i += LANES) most = max_f32(most, (vf32)((vi32)load_f32(from + i) & magnitude));
    const float highest = max_lanes(most);
    const float inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
    const vf32 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vi32 total = {0};
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK; i += LANES) {
        const vi32 x = (vi32)(load_f32(from + i) * inverse + magic) - (vi32)magic;
        store_i8(values + i, x);
        total += x;
    }
    const int32_t sum = (int32_t)sum_lanes(__builtin_convertvector(total, vf32)); /* exact: below 2^13 */
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

/* Bytes ahead: the processor's own prefetcher stops at each page's end, which a panel crosses soon. Far
 * enough that a memory's latency passes meanwhile, and less than what a thread claims at a time. */
#define PREFETCHED 6144

#if defined(USE_VNNI)

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

#define ROWS_AT_ONCE 4 /* of 8 outputs and 4 bits each: that many sums stay in 16 registers */

/* Added now and not later: else the compiler keeps products, more than there are registers. */
#define NOW(x) __asm__ volatile("" : "+x"(x))

/* Sums of products with 4-bit weights fit in 16-bit lanes over a whole block: 8 x 2 x 15 x 127. So weights of
 * 8 bits are taken as two of 4, 16 x high + low. */
INLINE void add_products(const uint8_t *data, const int32_t *const *values, int64_t count, int64_t kind,
                         __m256i sum[ROWS_AT_ONCE][2]) {
    const __m256i low = _mm256_set1_epi8(15);
    const int pairs = (int)(block_bytes(kind) / 64);
#pragma GCC unroll 4
    for (int r = 0; r < count; r++) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = 0; j < pairs; j++) {
        const __m256i both = _mm256_loadu_si256((const __m256i *)(data + j * 64));
        __m256i lows = _mm256_and_si256(both, low), highs = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        IN_REGISTER(lows);
        IN_REGISTER(highs);
#pragma GCC unroll 4
        for (int r = 0; r < count; r++) {
            const __m256i a = _mm256_set1_epi32(values[r][j]);
            if (kind == WEIGHTS_4BIT) {
                const __m256i b = _mm256_set1_epi32(values[r][j + 4]);
                sum[r][0] = _mm256_add_epi16(sum[r][0], _mm256_maddubs_epi16(lows, a));
                sum[r][0] = _mm256_add_epi16(sum[r][0], _mm256_maddubs_epi16(highs, b));
            } else {
                sum[r][0] = _mm256_add_epi16(sum[r][0], _mm256_maddubs_epi16(lows, a));
                sum[r][1] = _mm256_add_epi16(sum[r][1], _mm256_maddubs_epi16(highs, a));
                NOW(sum[r][1]);
            }
            NOW(sum[r][0]);
        }
    }
}

INLINE void multiply_rows(const uint8_t *data, const uint16_t *scales, const quant_rows *rows, int64_t first,
                          int64_t count, int64_t kind, float *tile) {
    const int64_t blocks = rows->num_blocks;
    const __m256i ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
    __m256 acc[2][ROWS_AT_ONCE];
#pragma GCC unroll 4
    for (int r = 0; r < count; r++) acc[0][r] = acc[1][r] = _mm256_setzero_ps();
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t at = first * blocks + block;
        const char *ahead = (const char *)data + block * block_bytes(kind) + PREFETCHED;
#pragma GCC unroll 8
        for (int j = 0; j < block_bytes(kind) / 64; j++) _mm_prefetch(ahead + j * 64, _MM_HINT_T0);
        const int32_t *values[ROWS_AT_ONCE];
#pragma GCC unroll 4
        for (int r = 0; r < count; r++) values[r] = (const int32_t *)(rows->values + (at + r * blocks) * BLOCK);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m256i sum[ROWS_AT_ONCE][2];
            __asm__ volatile("" ::: "memory"); /* inputs are loaded anew: kept, they would go to memory and back */
            add_products(data + block * block_bytes(kind) + half * 32, values, count, kind, sum);
            const uint16_t *from = scales + block * scale_halves(kind) + half * 8;
            const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
            __m256 least = _mm256_setzero_ps();
            if (kind == WEIGHTS_4BIT) least = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + PANEL)));
#pragma GCC unroll 4
            for (int r = 0; r < count; r++) {
                const int64_t index = at + r * blocks;
                const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(rows->scales[index]));
                __m256i whole = _mm256_madd_epi16(sum[r][0], ones);
                if (kind == WEIGHTS_8BIT) {
                    whole = _mm256_add_epi32(whole, _mm256_madd_epi16(sum[r][1], sixteens));
                    whole = _mm256_add_epi32(whole, _mm256_set1_epi32(rows->offsets[index]));
                }
                acc[half][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), both, acc[half][r]);
                if (kind == WEIGHTS_4BIT)
                    acc[half][r] = _mm256_fmadd_ps(least, _mm256_set1_ps(rows->sums[index]), acc[half][r]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < count; r++) {
        _mm256_storeu_ps(tile + r * PANEL, acc[0][r]);
        _mm256_storeu_ps(tile + r * PANEL + 8, acc[1][r]);
    }
}

/* At most MAX_TILE rows, in two passes: a panel stays in the nearest cache from one to the next. */
INLINE void multiply_tile(const uint8_t *data, const uint16_t *scales, const quant_rows *rows, int64_t first,
                          int64_t count, int64_t kind, float *tile) {
    const int64_t passes = (count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, most = (count + passes - 1) / passes;
    multiply_rows(data, scales, rows, first, most, kind, tile);
    if (passes > 1) multiply_rows(data, scales, rows, first + most, count - most, kind, tile + most * PANEL);
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
