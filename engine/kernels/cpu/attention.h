/* Paged attention and KV write: what crosses from Python. Mirrored field by field in binding.py. */
#ifndef SPECGATE_ATTENTION_H
#define SPECGATE_ATTENTION_H

#include <stdint.h>

#include "team.h"

enum { TYPE_F32 = 0, TYPE_BF16 = 1 };

/* One layer's cache: [num_blocks, num_kv_heads, block_size, head_dim], contiguous. */
typedef struct {
    void *key;
    void *value;
    int64_t num_kv_heads;
    int64_t block_size;
    int64_t head_dim;
    int64_t type;
} kv_layer;

/* The ragged batch; see engine/batch.py. */
typedef struct {
    const int64_t *positions;    /* [num_tokens] */
    const int64_t *slots;        /* [num_tokens] */
    const int64_t *visible;      /* [num_tokens] or NULL; see ForwardBatch.visible */
    const int32_t *query_start;  /* [num_sequences + 1] */
    const int32_t *context_lens; /* [num_sequences] */
    const int32_t *block_tables; /* [num_sequences, table_stride] */
    int64_t table_stride;
    int64_t num_sequences;
    int64_t num_tokens;
} ragged_batch;

/* Rows of heads: element (token, head, d) lies at data + (token * stride + head * head_dim + d). */
typedef struct {
    void *data;
    int64_t stride;
    int64_t num_heads;
    int64_t type;
} head_rows;

void specgate_write_kv(const head_rows *key, const head_rows *value, const kv_layer *cache,
                       const ragged_batch *batch, int64_t num_threads);

int64_t specgate_paged_attention(const head_rows *query, const head_rows *out,
                                 const kv_layer *cache, const ragged_batch *batch, double scale,
                                 int64_t num_threads);

/* Within the C code. A plan serves all layers of a forward. */
typedef struct {
    struct tile *tiles;
    struct partial *partials; /* NULL where no chunk is an item of its own */
    int64_t num_tiles;
    int64_t num_items;
    int64_t num_products; /* pairs of query head and key, twice: scores and sums */
} attention_plan;

int64_t attention_plan_make(attention_plan *plan, const ragged_batch *batch, int64_t group, int64_t num_kv_heads);
void attention_plan_free(attention_plan *plan);
void attention_run(const worker *w, const attention_plan *plan, const head_rows *query, const head_rows *out,
                   const kv_layer *cache, const ragged_batch *batch, float scale);
void write_kv_token(const head_rows *key, const head_rows *value, const kv_layer *cache, const ragged_batch *batch,
                    int64_t token);

#endif
