/* Philox words over a whole vocabulary, as floats. */
#include "philox.h"

/* rows: [num_rows][5], see philox_blocks. out: [num_rows][num_blocks][4], the words rounded to float. */
void specgate_philox_rows(const uint64_t *rows, int64_t num_rows, int64_t num_blocks, float *out,
                          int64_t num_threads) {
    const int64_t pieces = (num_blocks + AT_ONCE - 1) / AT_ONCE;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_rows * pieces > 256)
    for (int64_t piece = 0; piece < num_rows * pieces; piece++) {
        const int64_t row = piece / pieces, first = piece % pieces * AT_ONCE;
        const int64_t count = num_blocks - first < AT_ONCE ? num_blocks - first : AT_ONCE;
        vu32 words[4][AT_ONCE / LANES];
        philox_blocks(rows + 5 * row, (uint32_t)first, words);
        float *to = out + 4 * (row * num_blocks + first);
        for (int64_t i = 0; i < count; i++)
            for (int lane = 0; lane < 4; lane++) to[4 * i + lane] = (float)words[lane][i / LANES][i % LANES];
    }
}
