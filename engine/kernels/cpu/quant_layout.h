/* The packed layout of quantised weights; described in quant.c. */
#ifndef SPECGATE_QUANT_LAYOUT_H
#define SPECGATE_QUANT_LAYOUT_H

#include "quant.h"
#include "vec.h"

INLINE int64_t blocks_of(int64_t num_cols) { return (num_cols + BLOCK - 1) / BLOCK; }
INLINE int64_t block_bytes(int64_t kind) { return kind == WEIGHTS_4BIT ? PANEL * BLOCK / 2 : PANEL * BLOCK; }
INLINE int64_t scale_halves(int64_t kind) { return kind == WEIGHTS_4BIT ? 2 * PANEL : PANEL; }
INLINE int64_t panel_bytes(int64_t num_cols, int64_t kind) {
    int64_t bytes = blocks_of(num_cols) * (block_bytes(kind) + 2 * scale_halves(kind));
    return (bytes + 63) / 64 * 64;
}

INLINE float half_to_f32(uint16_t x) {
    union { uint32_t u; float f; } out;
    uint32_t exponent = (x >> 10) & 31, mantissa = x & 0x3ff;
    if (exponent == 0) out.f = (float)mantissa * 5.9604644775390625e-8f; /* 2^-24 */
    else out.u = ((exponent + 112) << 23) | (mantissa << 13);
    return x & 0x8000 ? -out.f : out.f;
}

#endif
