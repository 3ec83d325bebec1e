/* Portable 16-lane float vectors (GCC's vector extensions) and what the kernels share.
 *
 * The compiler lowers them to whatever the machine has (AVX-512, two AVX2 halves, NEON, plain C).
 * All sums run in an order fixed by the source, so a result never depends on the batch around it.
 */
#ifndef SPECGATE_VEC_H
#define SPECGATE_VEC_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef float f32x16_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t u16x16_any __attribute__((vector_size(32), aligned(2), may_alias));

/* Holds a vector that several operations share in a register, where the compiler would rather load
 * it again for each: one load a cycle is all that there is. */
#ifdef __AVX512F__
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define IN_REGISTER(x) (void)(x)
#endif

INLINE f32x16 splat(float x) { return x - (f32x16){0}; }

INLINE f32x16 load_f32(const float *p) { return *(const f32x16_any *)p; }

INLINE void store_f32(float *p, f32x16 x) { *(f32x16_any *)p = x; }

INLINE f32x16 select_f32(i32x16 mask, f32x16 a, f32x16 b) {
    return (f32x16)((mask & (i32x16)a) | (~mask & (i32x16)b));
}

/* a > b ? a : b, so b where either is NaN. */
INLINE f32x16 max_f32(f32x16 a, f32x16 b) {
#ifdef __AVX512F__
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select_f32(a > b, a, b);
#endif
}

INLINE f32x16 min_f32(f32x16 a, f32x16 b) {
#ifdef __AVX512F__
    return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return select_f32(a < b, a, b);
#endif
}

/* bfloat16 is the upper half of a float. */
INLINE f32x16 load_bf16(const uint16_t *p) {
#ifdef __AVX512F__ /* the compiler's own way takes two halves */
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    u16x16 half = *(const u16x16_any *)p;
    return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
#endif
}

INLINE float bf16_to_f32(uint16_t x) {
    union { uint32_t u; float f; } bits = {.u = (uint32_t)x << 16};
    return bits.f;
}

/* Round to nearest even; NaN stays NaN. */
INLINE uint16_t f32_to_bf16(float x) {
    union { float f; uint32_t u; } bits = {.f = x};
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits.u + 0x7fff + ((bits.u >> 16) & 1)) >> 16);
}

INLINE void store_bf16(uint16_t *p, f32x16 x) {
    u32x16 u = (u32x16)x;
    u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    u = (u32x16)select_f32(x == x, (f32x16)u, (f32x16)((u32x16){0} + 0x7fc0));
    *(u16x16_any *)p = __builtin_convertvector(u, u16x16);
}

#define SHUFFLED(x, ...) __builtin_shuffle(x, (i32x16){__VA_ARGS__})
#define SWAP8(x) SHUFFLED(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define SWAP4(x) SHUFFLED(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define SWAP2(x) SHUFFLED(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define SWAP1(x) SHUFFLED(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)

INLINE float sum_lanes(f32x16 x) {
    x = x + SWAP8(x);
    x = x + SWAP4(x);
    x = x + SWAP2(x);
    x = x + SWAP1(x);
    return x[0];
}

INLINE float max_lanes(f32x16 x) {
    x = max_f32(x, SWAP8(x));
    x = max_f32(x, SWAP4(x));
    x = max_f32(x, SWAP2(x));
    x = max_f32(x, SWAP1(x));
    return x[0];
}

/* e^x: split off a power of two, then the degree-6 polynomial of Cephes' expf; exact at 0.
 * Below -87 the result is the smallest normal float's neighbourhood, never less. */
INLINE f32x16 exp_f32(f32x16 x) {
    const f32x16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = max_f32(min_f32(x, splat(88.0f)), splat(-87.0f));
    f32x16 whole = x * 1.44269504088896341f + magic;
    i32x16 power = (i32x16)whole - (i32x16)magic;
    whole = whole - magic;
    x = x - whole * 0.693359375f;
    x = x + whole * 2.12194440e-4f;
    f32x16 y = splat(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * (x * x) + x;
    y = y + 1.0f;
    return (f32x16)((i32x16)y + (power << 23));
}

INLINE float exp_scalar(float x) { return exp_f32(splat(x))[0]; }

/* Rows a..p of a 16 x 16 matrix of 32-bit elements become its columns, in place. */
INLINE void transpose_16x16(i32x16 m[16]) {
    static const i32x16 low[4] = {
        {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
        {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
        {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
        {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
    };
    static const i32x16 high[4] = {
        {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31},
        {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31},
        {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31},
        {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31},
    };
#pragma GCC unroll 4
    for (int level = 0; level < 4; level++) {
        const int gap = 1 << level;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (i & gap) continue;
            i32x16 a = m[i], b = m[i + gap];
            m[i] = __builtin_shuffle(a, b, low[level]);
            m[i + gap] = __builtin_shuffle(a, b, high[level]);
        }
    }
}

#endif
