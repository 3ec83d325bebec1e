/* Philox words over a whole vocabulary, as floats. */
#include "philox.h"

/* rows: [num_rows][5], see philox_lanes. out: [num_rows][num_blocks][4], the words rounded to float. */
void specgate_philox_rows(const uint64_t *rows, int64_t num_rows, int64_t num_blocks, float *out,
                          int64_t num_threads) {
    const int64_t pieces = (num_blocks + LANES - 1) / LANES;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_rows * pieces > 1024)
    for (int64_t piece = 0; piece < num_rows * pieces; piece++) {
        const int64_t row = piece / pieces, first = piece % pieces * LANES;
        const int64_t count = num_blocks - first < LANES ? num_blocks - first : LANES;
        vu32 words[4];
        philox_lanes(rows + 5 * row, (uint32_t)first, words);
        float *to = out + 4 * (row * num_blocks + first);
        for (int64_t i = 0; i < count; i++)
            for (int lane = 0; lane < 4; lane++) to[4 * i + lane] = (float)words[lane][i];
    }
}
