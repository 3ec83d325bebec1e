/* A whole decoder in one call. Mirrored field by field in native_decoder.py. */
#ifndef SPECGATE_DECODER_H
#define SPECGATE_DECODER_H

#include <stdint.h>

#include "attention.h"
#include "quant.h"

typedef struct {
    const float *attention_norm; /* [hidden] */
    const float *mlp_norm;       /* [hidden] */
    const float *query_norm;     /* [head_dim] or NULL */
    const float *key_norm;       /* [head_dim] or NULL */
    quant_matrix qkv;            /* query, key and value heads, in this order */
    quant_matrix output;
    quant_matrix gate;
    quant_matrix up;
    quant_matrix down;
} decoder_layer;

typedef struct {
    const decoder_layer *layers;
    const float *frequencies; /* [head_dim / 2] rotary */
    const float *norm;        /* [hidden] */
    quant_matrix embedding;
    quant_matrix head;
    int64_t num_layers;
    int64_t hidden;
    int64_t intermediate;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    double eps;
} decoder;

/* hidden: [num_tokens, hidden] after the final norm. The first layer's input is the tokens' embedding,
 * or `inputs` [num_tokens, hidden] where that is not NULL. `cache` is layer 0's; layer l lies
 * l * layer_bytes further on. Returns 0, or -1 when memory ran out. */
int64_t specgate_decoder_forward(const decoder *d, const ragged_batch *batch, const int64_t *token_ids,
                                 const float *inputs, const kv_layer *cache, int64_t layer_bytes, float *hidden,
                                 int64_t num_threads);

#endif
