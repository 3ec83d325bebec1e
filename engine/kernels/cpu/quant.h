/* Weights in 4 or 8 bits, activations in 8, products in integers. See quant.c. */
#ifndef SPECGATE_QUANT_H
#define SPECGATE_QUANT_H

#include <stdint.h>

#define BLOCK 32 /* input features that share a scale, in weights and in activations */
#define PANEL 16 /* output features that are computed together */

enum {
    WEIGHTS_4BIT = 4, /* w = scale * q + least, q in 0..15 */
    WEIGHTS_8BIT = 8, /* w = scale * (q - 128), q in 1..255 */
};

/* A weight matrix [num_rows outputs, num_cols inputs], packed. */
typedef struct {
    const uint8_t *data;
    const float *bias; /* [num_rows] or NULL */
    int64_t num_rows;
    int64_t num_cols;
    int64_t kind;
} quant_matrix;

/* Quantised activations [num_rows, num_cols], one scale per block of BLOCK. */
typedef struct {
    int8_t *values;     /* [num_rows, num_blocks * BLOCK] */
    float *scales;      /* [num_rows, num_blocks] */
    float *sums;        /* the block's sum, dequantised: what `least` is multiplied with */
    int32_t *offsets;   /* -128 * the block's integer sum: what 8-bit weights' offset adds */
    int64_t num_blocks;
} quant_rows;

int64_t specgate_packed_bytes(int64_t num_rows, int64_t num_cols, int64_t kind);
int64_t specgate_has_16_levels(const float *weight, int64_t num_rows, int64_t num_cols, int64_t num_threads);
void specgate_pack(const float *weight, int64_t num_rows, int64_t num_cols, int64_t kind, uint8_t *packed,
                   int64_t num_threads);
void specgate_unpack_row(const quant_matrix *matrix, int64_t row, float *out);
int64_t specgate_linear(const quant_matrix *matrix, const float *input, int64_t num_rows, float *out,
                        int64_t num_threads);

/* Within the C code. */
int64_t quant_rows_bytes(int64_t num_rows, int64_t num_cols);
quant_rows quant_rows_at(void *memory, int64_t num_rows, int64_t num_cols);
void quantise_block(const quant_rows *to, int64_t row, int64_t block, const float *from, int64_t count);
void quantise_row(const quant_rows *to, int64_t row, const float *from, int64_t num_cols);
/* tile[i * PANEL + lane] = output `panel * PANEL + lane` of activation row `first + i`, bias added. */
void multiply_panel(const quant_matrix *matrix, int64_t panel, const quant_rows *rows, int64_t first,
                    int64_t count, float *tile);
#define MAX_TILE 8 /* largest `count` */
int64_t num_panels(const quant_matrix *matrix);

#endif
