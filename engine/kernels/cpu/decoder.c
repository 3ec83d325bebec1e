/* The forward of a Llama-like decoder over quantised weights, all layers in one parallel region.
 *
 * Between two products lies one pass over the rows: norm + quantise, rotary + KV write, attention,
 * SiLU * up + quantise. Every sum over a row has a fixed order, so a token's hidden state is the
 * same bit for bit in any batch and on any number of threads.
 */
#include "decoder.h"

#include <stdlib.h>
#include <string.h>

#include "vec.h"

typedef struct {
    const decoder *d;
    const ragged_batch *batch;
    float *x;        /* [T, hidden] the residual stream */
    float *qkv;      /* [T, (heads + 2 kv heads) * head_dim] */
    float *attended; /* [T, heads * head_dim] */
    float *cosines;  /* [T, head_dim / 2] */
    float *sines;
    quant_rows narrow; /* quantised rows of `hidden` or heads * head_dim features */
    quant_rows wide;   /* quantised rows of `intermediate` features */
} state;

/* --- rows ----------------------------------------------------------------------------------- */

/* 1 / rms of a row; LANES running sums, then their sum. */
INLINE float inverse_rms(const float *x, int64_t count, double eps) {
    vf32 squares = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf32 v = load_f32(x + i);
        squares += v * v;
    }
    float sum = sum_lanes(squares);
    for (; i < count; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)count + (float)eps);
}

INLINE void norm_row(const float *x, const float *weight, int64_t count, double eps, float *out) {
    const float inverse = inverse_rms(x, count, eps);
    for (int64_t i = 0; i < count; i++) out[i] = x[i] * inverse * weight[i];
}

INLINE void norm_and_quantise(const float *x, const float *weight, int64_t count, double eps, const quant_rows *to,
                              int64_t row) {
    const float inverse = inverse_rms(x, count, eps);
    for (int64_t block = 0; block < to->num_blocks; block++) {
        const int64_t at = block * BLOCK, left = count - at < BLOCK ? count - at : BLOCK;
        float normed[BLOCK] ALIGNED;
        for (int64_t i = 0; i < left; i++) normed[i] = x[at + i] * inverse * weight[at + i];
        quantise_block(to, row, block, normed, left);
    }
}

/* Pairs (i, i + dim / 2), as in engine/layers/rotary.py. */
INLINE void rotate(float *head, const float *cosines, const float *sines, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cosines[i] - b * sines[i];
        head[i + half] = b * cosines[i] + a * sines[i];
    }
}

/* One token's query and key heads normed (where the model does that) and rotated; K and V stored. */
static void place_token(const state *s, const decoder_layer *layer, const kv_layer *cache, int64_t t) {
    const decoder *d = s->d;
    const int64_t dim = d->head_dim, half = dim / 2, width = (d->num_heads + 2 * d->num_kv_heads) * dim;
    float *heads = s->qkv + t * width;
    for (int64_t h = 0; h < d->num_heads + d->num_kv_heads; h++) {
        const float *norm = h < d->num_heads ? layer->query_norm : layer->key_norm;
        if (norm != NULL) norm_row(heads + h * dim, norm, dim, d->eps, heads + h * dim);
        rotate(heads + h * dim, s->cosines + t * half, s->sines + t * half, half);
    }
    const head_rows key = {s->qkv + d->num_heads * dim, width, d->num_kv_heads, TYPE_F32};
    const head_rows value = {s->qkv + (d->num_heads + d->num_kv_heads) * dim, width, d->num_kv_heads, TYPE_F32};
    write_kv_token(&key, &value, cache, s->batch, t);
}

static void start_token(const state *s, const int64_t *token_ids, const float *inputs, int64_t t) {
    const int64_t half = s->d->head_dim / 2, hidden = s->d->hidden;
    if (inputs != NULL)
        memcpy(s->x + t * hidden, inputs + t * hidden, (size_t)hidden * sizeof(float));
    else
        specgate_unpack_row(&s->d->embedding, token_ids[t], s->x + t * hidden);
    for (int64_t i = 0; i < half; i++) {
        const float angle = (float)s->batch->positions[t] * s->d->frequencies[i];
        s->cosines[t * half + i] = cosf(angle);
        s->sines[t * half + i] = sinf(angle);
    }
}

/* --- products ------------------------------------------------------------------------------- */

INLINE int64_t tile_rows(int64_t num_rows) {
    const int64_t tiles = (num_rows + MAX_TILE - 1) / MAX_TILE;
    return (num_rows + tiles - 1) / tiles;
}

/* out = rows x matrix^T, or out += where `is_added`. Called by all threads; ends with a new phase. */
static void project(const worker *w, const quant_matrix *matrix, const quant_rows *rows, int64_t num_rows, float *out,
                    int is_added) {
    const int64_t step = tile_rows(num_rows), width = matrix->num_rows;
    int64_t first_panel, last_panel;
    while (claim(w, num_panels(matrix), &first_panel, &last_panel))
        for (int64_t panel = first_panel; panel < last_panel; panel++) {
            const int64_t left = width - panel * PANEL < PANEL ? width - panel * PANEL : PANEL;
            for (int64_t first = 0; first < num_rows; first += step) {
                const int64_t count = num_rows - first < step ? num_rows - first : step;
                float tile[MAX_TILE * PANEL] ALIGNED;
                multiply_panel(matrix, panel, rows, first, count, tile);
                for (int64_t r = 0; r < count; r++) {
                    float *to = out + (first + r) * width + panel * PANEL;
                    if (is_added)
                        for (int64_t i = 0; i < left; i++) to[i] += tile[r * PANEL + i];
                    else
                        for (int64_t i = 0; i < left; i++) to[i] = tile[r * PANEL + i];
                }
            }
        }
    next_phase(w);
}

/* One block of `wide` for rows [first, first + count): quantised silu(gate) * up. */
static void gate_up_block(const state *s, const decoder_layer *layer, int64_t block, int64_t first, int64_t count) {
    const int64_t width = layer->gate.num_rows, panels = num_panels(&layer->gate);
    const int64_t left = width - block * BLOCK < BLOCK ? width - block * BLOCK : BLOCK;
    float gate[2][MAX_TILE * PANEL] ALIGNED, up[2][MAX_TILE * PANEL] ALIGNED;
    for (int64_t half = 0; half < 2 && 2 * block + half < panels; half++) {
        multiply_panel(&layer->gate, 2 * block + half, &s->narrow, first, count, gate[half]);
        multiply_panel(&layer->up, 2 * block + half, &s->narrow, first, count, up[half]);
    }
    for (int64_t r = 0; r < count; r++) {
        float product[BLOCK] ALIGNED;
        for (int64_t half = 0; half < 2 && 2 * block + half < panels; half++) {
            for (int64_t i = 0; i < PANEL; i += LANES) {
                const vf32 g = load_f32(gate[half] + r * PANEL + i), u = load_f32(up[half] + r * PANEL + i);
                store_f32(product + half * PANEL + i, g / (1.0f + exp_f32(-g)) * u);
            }
        }
        quantise_block(&s->wide, first + r, block, product, left);
    }
}

static void project_gate_up(const worker *w, const state *s, const decoder_layer *layer, int64_t num_rows) {
    const int64_t step = tile_rows(num_rows);
    int64_t first_block, last_block;
    while (claim(w, s->wide.num_blocks, &first_block, &last_block))
        for (int64_t block = first_block; block < last_block; block++)
            for (int64_t first = 0; first < num_rows; first += step)
                gate_up_block(s, layer, block, first, num_rows - first < step ? num_rows - first : step);
    next_phase(w);
}

/* --- layers --------------------------------------------------------------------------------- */

/* Called by all threads of the team. */
static void run_layer(const worker *w, const state *s, const attention_plan *plan, const decoder_layer *layer,
                      const kv_layer *cache) {
    const decoder *d = s->d;
    const int64_t num_tokens = s->batch->num_tokens, dim = d->head_dim, width = d->num_heads * dim;
    const int64_t first = first_row(w, num_tokens), last = last_row(w, num_tokens);
    const head_rows query = {s->qkv, width + 2 * d->num_kv_heads * dim, d->num_heads, TYPE_F32};
    const head_rows attended = {s->attended, width, d->num_heads, TYPE_F32};
    quant_rows heads = s->narrow;
    heads.num_blocks = (width + BLOCK - 1) / BLOCK;
    for (int64_t t = first; t < last; t++)
        norm_and_quantise(s->x + t * d->hidden, layer->attention_norm, d->hidden, d->eps, &s->narrow, t);
    next_phase(w);
    project(w, &layer->qkv, &s->narrow, num_tokens, s->qkv, 0);
    for (int64_t t = first; t < last; t++) place_token(s, layer, cache, t);
    next_phase(w);
    attention_run(w, plan, &query, &attended, cache, s->batch, 1.0f / sqrtf((float)dim));
    for (int64_t t = first; t < last; t++) quantise_row(&heads, t, s->attended + t * width, width);
    next_phase(w);
    project(w, &layer->output, &heads, num_tokens, s->x, 1);
    for (int64_t t = first; t < last; t++)
        norm_and_quantise(s->x + t * d->hidden, layer->mlp_norm, d->hidden, d->eps, &s->narrow, t);
    next_phase(w);
    project_gate_up(w, s, layer, num_tokens);
    project(w, &layer->down, &s->wide, num_tokens, s->x, 1);
}

INLINE int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* All buffers of a forward in one piece; NULL when memory ran out. */
static void *allocate(state *s, int64_t num_tokens) {
    const decoder *d = s->d;
    const int64_t heads = d->num_heads * d->head_dim, qkv = heads + 2 * d->num_kv_heads * d->head_dim;
    const int64_t narrow = d->hidden > heads ? d->hidden : heads, half = d->head_dim / 2;
    const int64_t sizes[] = {
        padded(num_tokens * d->hidden * 4), padded(num_tokens * qkv * 4),  padded(num_tokens * heads * 4),
        padded(num_tokens * half * 4),      padded(num_tokens * half * 4), quant_rows_bytes(num_tokens, narrow),
        quant_rows_bytes(num_tokens, d->intermediate),
    };
    char *at[7];
    int64_t total = 0;
    for (int i = 0; i < 7; i++) total += sizes[i];
    void *memory;
    if (posix_memalign(&memory, 64, (size_t)total) != 0) return NULL;
    at[0] = memory;
    for (int i = 1; i < 7; i++) at[i] = at[i - 1] + sizes[i - 1];
    s->x = (float *)at[0];
    s->qkv = (float *)at[1];
    s->attended = (float *)at[2];
    s->cosines = (float *)at[3];
    s->sines = (float *)at[4];
    s->narrow = quant_rows_at(at[5], num_tokens, narrow);
    s->narrow.num_blocks = (d->hidden + BLOCK - 1) / BLOCK;
    s->wide = quant_rows_at(at[6], num_tokens, d->intermediate);
    return memory;
}

static int64_t products_per_layer(const decoder *d, int64_t num_tokens) {
    const int64_t heads = 2 * d->head_dim * (d->num_heads + d->num_kv_heads);
    return num_tokens * d->hidden * (heads + 3 * d->intermediate);
}

int64_t specgate_decoder_forward(const decoder *d, const ragged_batch *batch, const int64_t *token_ids,
                                 const float *inputs, const kv_layer *cache, int64_t layer_bytes, float *hidden,
                                 int64_t num_threads) {
    state s = {.d = d, .batch = batch};
    attention_plan plan;
    team threads = {0};
    if (batch->num_tokens == 0) return 0;
    if (attention_plan_make(&plan, batch, d->num_heads / d->num_kv_heads, d->num_kv_heads)) return -1;
    num_threads = useful_threads(num_threads, products_per_layer(d, batch->num_tokens));
    void *memory = allocate(&s, batch->num_tokens);
    if (memory == NULL) {
        attention_plan_free(&plan);
        return -1;
    }
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        const worker w = join_team(&threads);
        const int64_t first = first_row(&w, batch->num_tokens), last = last_row(&w, batch->num_tokens);
        for (int64_t t = first; t < last; t++) start_token(&s, token_ids, inputs, t);
        for (int64_t l = 0; l < d->num_layers; l++) {
            kv_layer layer_cache = *cache;
            layer_cache.key = (char *)cache->key + l * layer_bytes;
            layer_cache.value = (char *)cache->value + l * layer_bytes;
            run_layer(&w, &s, &plan, &d->layers[l], &layer_cache);
        }
        for (int64_t t = first; t < last; t++)
            norm_row(s.x + t * d->hidden, d->norm, d->hidden, d->eps, hidden + t * d->hidden);
    }
    free(memory);
    attention_plan_free(&plan);
    return 0;
}
