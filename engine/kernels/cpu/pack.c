/* Packs float weights into the layout of quant.c, and reads rows of it back. */
#include "quant_layout.h"

int64_t specgate_packed_bytes(int64_t num_rows, int64_t num_cols, int64_t kind) {
    return (num_rows + PANEL - 1) / PANEL * panel_bytes(num_cols, kind);
}

static uint16_t f32_to_half(float x) {
    union { float f; uint32_t u; } in = {.f = x};
    uint32_t sign = (in.u >> 16) & 0x8000;
    int32_t exponent = (int32_t)((in.u >> 23) & 0xff) - 127 + 15;
    uint32_t mantissa = (in.u & 0x7fffff) | 0x800000;
    if (exponent >= 31) return (uint16_t)(sign | 0x7bff); /* the largest half */
    int shift = exponent <= 0 ? 14 - exponent : 13;
    if (shift > 24) return (uint16_t)sign;
    uint32_t half = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), middle = 1u << (shift - 1);
    half += rest > middle || (rest == middle && (half & 1));
    if (exponent > 0) half += (uint32_t)(exponent - 1) << 10; /* a carry moves the exponent rightly */
    return (uint16_t)(sign | (half > 0x7bff ? 0x7bff : half));
}

typedef struct {
    float scale, least;
} grid;

/* The widest even grid of at most 16 levels that all values lie on; scale < 0 if there is none. */
static grid find_grid(const float *w, int64_t count) {
    float low = w[0], high = w[0];
    for (int64_t i = 1; i < count; i++) {
        low = w[i] < low ? w[i] : low;
        high = w[i] > high ? w[i] : high;
    }
    if (high == low) return (grid){0.0f, low};
    for (int steps = 15; steps >= 1; steps--) {
        grid g = {(high - low) / (float)steps, low};
        float scale = half_to_f32(f32_to_half(g.scale)), least = half_to_f32(f32_to_half(low));
        float worst = 0.0f;
        for (int64_t i = 0; i < count; i++) {
            float level = rintf((w[i] - low) / g.scale);
            float miss = fabsf(scale * level + least - w[i]);
            worst = miss > worst ? miss : worst;
        }
        if (worst <= 0.02f * g.scale) return g;
    }
    return (grid){-1.0f, 0.0f};
}

/* Whether 4 bits keep every value to within a fiftieth of a step. */
int64_t specgate_has_16_levels(const float *weight, int64_t num_rows, int64_t num_cols, int64_t num_threads) {
    int misses = 0;
#pragma omp parallel for num_threads(num_threads) reduction(| : misses)
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t at = 0; at < num_cols && !misses; at += BLOCK) {
            int64_t count = num_cols - at < BLOCK ? num_cols - at : BLOCK;
            misses |= find_grid(weight + row * num_cols + at, count).scale < 0.0f;
        }
    return !misses;
}

static void pack_block_4bit(const float *w, int64_t count, int64_t lane, uint8_t *data, uint16_t *scales) {
    grid g = find_grid(w, count);
    float scale = half_to_f32(scales[lane] = f32_to_half(g.scale));
    float least = half_to_f32(scales[PANEL + lane] = f32_to_half(g.least));
    for (int64_t k = 0; k < count; k++) {
        float level = scale > 0.0f ? rintf((w[k] - least) / scale) : 0.0f;
        uint8_t q = (uint8_t)(level < 0.0f ? 0.0f : level > 15.0f ? 15.0f : level);
        int64_t vector = k / 4;
        data[vector % 4 * 64 + lane * 4 + k % 4] |= (uint8_t)(vector < 4 ? q : q << 4);
    }
}

static void pack_block_8bit(const float *w, int64_t count, int64_t lane, uint8_t *data, uint16_t *scales) {
    float highest = 0.0f;
    for (int64_t k = 0; k < count; k++) highest = fabsf(w[k]) > highest ? fabsf(w[k]) : highest;
    float scale = half_to_f32(scales[lane] = f32_to_half(highest / 127.0f));
    for (int64_t k = 0; k < count; k++) {
        float level = scale > 0.0f ? rintf(w[k] / scale) : 0.0f;
        level = level > 127.0f ? 127.0f : level < -127.0f ? -127.0f : level;
        data[k / 4 * 64 + lane * 4 + k % 4] = (uint8_t)(level + 128.0f);
    }
}

/* weight: [num_rows, num_cols]. Padding outputs and inputs are worth zero. */
void specgate_pack(const float *weight, int64_t num_rows, int64_t num_cols, int64_t kind, uint8_t *packed,
                   int64_t num_threads) {
    const int64_t bytes = panel_bytes(num_cols, kind), blocks = blocks_of(num_cols);
#pragma omp parallel for num_threads(num_threads)
    for (int64_t panel = 0; panel < (num_rows + PANEL - 1) / PANEL; panel++) {
        uint8_t *to = packed + panel * bytes;
        memset(to, 0, (size_t)bytes);
        for (int64_t lane = 0; lane < PANEL && panel * PANEL + lane < num_rows; lane++)
            for (int64_t block = 0; block < blocks; block++) {
                const float *w = weight + (panel * PANEL + lane) * num_cols + block * BLOCK;
                int64_t count = num_cols - block * BLOCK < BLOCK ? num_cols - block * BLOCK : BLOCK;
                uint8_t *data = to + block * block_bytes(kind);
                uint16_t *scales = (uint16_t *)(to + blocks * block_bytes(kind)) + block * scale_halves(kind);
                (kind == WEIGHTS_4BIT ? pack_block_4bit : pack_block_8bit)(w, count, lane, data, scales);
            }
    }
}

/* One row of the matrix as floats: an embedding, when the table is shared with the head. */
void specgate_unpack_row(const quant_matrix *m, int64_t row, float *out) {
    const int64_t blocks = blocks_of(m->num_cols), lane = row % PANEL;
    const uint8_t *panel = m->data + row / PANEL * panel_bytes(m->num_cols, m->kind);
    for (int64_t k = 0; k < m->num_cols; k++) {
        const int64_t block = k / BLOCK, vector = k % BLOCK / 4;
        const uint8_t *data = panel + block * block_bytes(m->kind);
        const uint16_t *scales = (const uint16_t *)(panel + blocks * block_bytes(m->kind)) + block * scale_halves(m->kind);
        const float scale = half_to_f32(scales[lane]);
        if (m->kind == WEIGHTS_4BIT) {
            uint8_t pair = data[vector % 4 * 64 + lane * 4 + k % 4];
            out[k] = scale * (float)(vector < 4 ? pair & 15 : pair >> 4) + half_to_f32(scales[PANEL + lane]);
        } else {
            out[k] = scale * (float)(data[vector * 64 + lane * 4 + k % 4] - 128);
        }
    }
}
