/* Philox4x32-10 (Salmon et al., SC'11) over many counters: the numbers behind Gumbel noise.
 *
 * The definition is engine/spec/randomness.py; this must give the same integers. */

#include <stdint.h>

#define AT_ONCE 32 /* blocks at a time: the inner loops become vector code */

static void philox_blocks(const uint64_t *row, uint32_t first, uint32_t words[4][AT_ONCE])
{
    uint32_t c0[AT_ONCE], c1[AT_ONCE], c2[AT_ONCE], c3[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) {
        c0[i] = first + (uint32_t)i;
        c1[i] = (uint32_t)row[0];
        c2[i] = (uint32_t)row[1];
        c3[i] = (uint32_t)row[2];
    }
    uint32_t k0 = (uint32_t)row[3], k1 = (uint32_t)row[4];
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < AT_ONCE; i++) {
            uint64_t p0 = (uint64_t)c0[i] * 0xD2511F53u;
            uint64_t p1 = (uint64_t)c2[i] * 0xCD9E8D57u;
            c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0;
            c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
            c1[i] = (uint32_t)p1;
            c3[i] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < AT_ONCE; i++) {
        words[0][i] = c0[i];
        words[1][i] = c1[i];
        words[2][i] = c2[i];
        words[3][i] = c3[i];
    }
}

/* rows: [num_rows][5], the upper counter words (position, salt, stream) and the key (low, high).
 * out: [num_rows][num_blocks][4], the words rounded to float. */
void specgate_philox_rows(
    const uint64_t *rows, int64_t num_rows, int64_t num_blocks, float *out, int64_t num_threads)
{
    int64_t pieces = (num_blocks + AT_ONCE - 1) / AT_ONCE;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_rows * pieces > 256)
    for (int64_t piece = 0; piece < num_rows * pieces; piece++) {
        int64_t row = piece / pieces, first = piece % pieces * AT_ONCE;
        int64_t count = num_blocks - first < AT_ONCE ? num_blocks - first : AT_ONCE;
        uint32_t words[4][AT_ONCE];
        philox_blocks(rows + 5 * row, (uint32_t)first, words);
        float *to = out + 4 * (row * num_blocks + first);
        for (int64_t i = 0; i < count; i++)
            for (int lane = 0; lane < 4; lane++)
                to[4 * i + lane] = (float)words[lane][i];
    }
}
