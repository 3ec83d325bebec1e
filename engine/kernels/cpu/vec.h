/* Portable float vectors (GCC's vector extensions), as wide as the machine's own, and what the kernels share.
 *
 * Wider ones than the machine has would live in memory and be shuffled element by element. All sums run in
 * an order fixed by the source and LANES, so a result never depends on the batch around it.
 */
#ifndef SPECGATE_VEC_H
#define SPECGATE_VEC_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(SPECGATE_LANES) /* for tests: any width on any machine */
#define LANES SPECGATE_LANES
#elif defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if LANES == 16 && defined(__AVX512F__)
#define HAS_AVX512 1
#elif LANES == 8 && defined(__AVX2__) && defined(__FMA__)
#define HAS_AVX2 1
#endif

#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

typedef float vf32 __attribute__((vector_size(4 * LANES)));
typedef int32_t vi32 __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu32 __attribute__((vector_size(4 * LANES)));
typedef uint16_t vu16 __attribute__((vector_size(2 * LANES)));
typedef int8_t vi8_any __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef float vf32_any __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vu16_any __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* Holds a vector that several operations share in a register, where the compiler would rather load
 * it again for each: loads are what there are fewest of. */
#if HAS_AVX512
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#elif HAS_AVX2
#define IN_REGISTER(x) __asm__("" : "+x"(x))
#else
#define IN_REGISTER(x) (void)(x)
#endif

INLINE vf32 splat(float x) { return x - (vf32){0}; }

INLINE vf32 load_f32(const float *p) { return *(const vf32_any *)p; }

INLINE void store_f32(float *p, vf32 x) { *(vf32_any *)p = x; }

INLINE vf32 select_f32(vi32 mask, vf32 a, vf32 b) {
    return (vf32)((mask & (vi32)a) | (~mask & (vi32)b));
}

/* a > b ? a : b, so b where either is NaN. */
INLINE vf32 max_f32(vf32 a, vf32 b) {
#if HAS_AVX512
    return (vf32)_mm512_max_ps((__m512)a, (__m512)b);
#elif HAS_AVX2
    return (vf32)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select_f32(a > b, a, b);
#endif
}

INLINE vf32 min_f32(vf32 a, vf32 b) {
#if HAS_AVX512
    return (vf32)_mm512_min_ps((__m512)a, (__m512)b);
#elif HAS_AVX2
    return (vf32)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select_f32(a < b, a, b);
#endif
}

/* a * b + c, rounded alike wherever it is written: the compiler contracts some and not others. */
INLINE vf32 multiply_add(vf32 a, vf32 b, vf32 c) {
#if HAS_AVX512
    return (vf32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif HAS_AVX2
    return (vf32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* bfloat16 is the upper half of a float. */
INLINE vf32 load_bf16(const uint16_t *p) {
#if HAS_AVX512 /* the compiler's own way takes two halves */
    return (vf32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif HAS_AVX2
    return (vf32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    vu16 half = *(const vu16_any *)p;
    return (vf32)(__builtin_convertvector(half, vu32) << 16);
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

/* The low byte of each lane. */
INLINE void store_i8(int8_t *p, vi32 x) {
#if HAS_AVX2
    const __m256i bytes = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400));
    const int32_t halves[2] = {_mm256_extract_epi32(bytes, 0), _mm256_extract_epi32(bytes, 4)};
    memcpy(p, halves, sizeof(halves));
#else
    *(vi8_any *)p = __builtin_convertvector(x, vi8_any);
#endif
}

/* Lane i of SWAPPED(x, n) is lane i ^ n of x. */
#if LANES == 16
#define FIRST_LANES(...) __VA_ARGS__
#elif LANES == 8
#define FIRST_LANES(a, b, c, d, e, f, g, h, ...) a, b, c, d, e, f, g, h
#else
#define FIRST_LANES(a, b, c, d, ...) a, b, c, d
#endif
#define LANES_XOR(n)                                                                                              \
    FIRST_LANES(0 ^ n, 1 ^ n, 2 ^ n, 3 ^ n, 4 ^ n, 5 ^ n, 6 ^ n, 7 ^ n, 8 ^ n, 9 ^ n, 10 ^ n, 11 ^ n, 12 ^ n, 13 ^ n, \
                14 ^ n, 15 ^ n)
#define SWAPPED(x, n) __builtin_shuffle(x, (vi32){LANES_XOR(n)})

INLINE float sum_lanes(vf32 x) {
#if LANES > 8
    x = x + SWAPPED(x, 8);
#endif
#if LANES > 4
    x = x + SWAPPED(x, 4);
#endif
    x = x + SWAPPED(x, 2);
    x = x + SWAPPED(x, 1);
    return x[0];
}

INLINE float max_lanes(vf32 x) {
#if LANES > 8
    x = max_f32(x, SWAPPED(x, 8));
#endif
#if LANES > 4
    x = max_f32(x, SWAPPED(x, 4));
#endif
    x = max_f32(x, SWAPPED(x, 2));
    x = max_f32(x, SWAPPED(x, 1));
    return x[0];
}

/* e^x: split off a power of two, then the degree-6 polynomial of Cephes' expf; exact at 0.
 * Below -87 the result is the smallest normal float's neighbourhood, never less. */
INLINE vf32 exp_f32(vf32 x) {
    const vf32 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = max_f32(min_f32(x, splat(88.0f)), splat(-87.0f));
    vf32 whole = x * 1.44269504088896341f + magic;
    vi32 power = (vi32)whole - (vi32)magic;
    whole = whole - magic;
    x = x - whole * 0.693359375f;
    x = x + whole * 2.12194440e-4f;
    vf32 y = splat(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * (x * x) + x;
    y = y + 1.0f;
    return (vf32)((vi32)y + (power << 23));
}

INLINE float exp_scalar(float x) { return exp_f32(splat(x))[0]; }

/* At one level of a transposition 2 x 2 blocks of gap x gap elements swap what lies off their diagonal, of rows
 * i and i + gap: LEVEL(gap, 0) makes the first of them, LEVEL(gap, 1) the second. Lanes from LANES on are row
 * i + gap's. */
#define FROM(lane, gap, second) \
    (((lane) & (gap)) ? LANES + ((lane) ^ (gap)) + ((second) ? (gap) : 0) : (lane) + ((second) ? (gap) : 0))
#define LEVEL(gap, second)                                                                                 \
    {FIRST_LANES(FROM(0, gap, second), FROM(1, gap, second), FROM(2, gap, second), FROM(3, gap, second),   \
                 FROM(4, gap, second), FROM(5, gap, second), FROM(6, gap, second), FROM(7, gap, second),   \
                 FROM(8, gap, second), FROM(9, gap, second), FROM(10, gap, second), FROM(11, gap, second), \
                 FROM(12, gap, second), FROM(13, gap, second), FROM(14, gap, second), FROM(15, gap, second))}
#define FIRST_OF_LEVEL ((const vi32[]){LEVEL(1, 0), LEVEL(2, 0), LEVEL(4, 0), LEVEL(8, 0)})
#define SECOND_OF_LEVEL ((const vi32[]){LEVEL(1, 1), LEVEL(2, 1), LEVEL(4, 1), LEVEL(8, 1)})
#define NUM_LEVELS (LANES == 16 ? 4 : LANES == 8 ? 3 : 2)

/* Rows of a LANES x LANES matrix of 32-bit elements become its columns, in place. */
INLINE void transpose(vi32 m[LANES]) {
#pragma GCC unroll 4
    for (int level = 0; level < NUM_LEVELS; level++) {
        const int gap = 1 << level;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & gap) continue;
            vi32 a = m[i], b = m[i + gap];
            m[i] = __builtin_shuffle(a, b, FIRST_OF_LEVEL[level]);
            m[i + gap] = __builtin_shuffle(a, b, SECOND_OF_LEVEL[level]);
        }
    }
}

/* Lane i = the sum of vector i's lanes: a transposition whose two halves are added at each level. */
INLINE vf32 sums_of_vectors(const vf32 vectors[LANES]) {
    vf32 m[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) m[i] = vectors[i];
#pragma GCC unroll 4
    for (int level = 0; level < NUM_LEVELS; level++) {
        const int gap = 1 << level;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i += 2 * gap)
            m[i] = __builtin_shuffle(m[i], m[i + gap], FIRST_OF_LEVEL[level]) +
                   __builtin_shuffle(m[i], m[i + gap], SECOND_OF_LEVEL[level]);
    }
    return m[0];
}

#endif
