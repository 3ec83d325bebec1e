/* Attention over block tables for a ragged batch, on the CPU.
 *
 * The batch is cut into tiles: a few consecutive tokens of one sequence, all query heads of one KV
 * head. A tile reads each key and value once for all its rows. Keys are walked in spans of SPAN
 * positions with an online softmax; spans are grouped into chunks of CHUNK positions, each with a
 * partial result of its own, and partial results are merged in order of position. Where spans and
 * chunks begin depends on the position alone, and a row's sums never mix with its neighbours', so
 * a token's output is the same bit for bit alone, in any batch, and however a prompt is chunked.
 * (Split softmax as in Flash-Decoding, Dao et al. 2023.)
 */
#include "attention.h"

#include <stdlib.h>

#include "attention_span.h"

#define CHUNK 256         /* key positions of one partial result; a multiple of SPAN */
#define MAX_TILE_TOKENS 16

/* A few tokens of one sequence. */
struct tile {
    int64_t sequence, first_token, num_tokens;
    int64_t num_keys;   /* positions that some row of the tile sees */
    int64_t num_items;  /* work items per KV head: its chunks, or 1 */
    int64_t first_item; /* over all KV heads */
    int64_t scratch;    /* first partial result, where chunks are separate items, else -1 */
};

/* What one chunk contributes to the rows of a tile: unnormalised sums, maxima, weights' sums. */
struct partial {
    float acc[MAX_TILE_ROWS * MAX_HEAD_DIM] ALIGNED;
    float max[MAX_TILE_ROWS];
    float sum[MAX_TILE_ROWS];
};

typedef struct tile tile;
typedef struct partial partial;

typedef struct {
    const head_rows *query, *out;
    const kv_layer *cache;
    const ragged_batch *batch;
    float scale;
    int64_t group; /* query heads per KV head */
} call;

/* The number of leading key positions a token can see; gaps between them are `sees`'s matter. */
INLINE int64_t keys_seen(const ragged_batch *b, int64_t sequence, int64_t token) {
    if (b->visible == NULL || b->visible[token] == 0) return b->positions[token] + 1;
    int64_t fresh = b->query_start[sequence + 1] - b->query_start[sequence];
    int64_t highest = 63 - __builtin_clzll((unsigned long long)b->visible[token]);
    return b->context_lens[sequence] - fresh + highest + 1;
}

/* Which of the LANES key positions from `first` a token sees, one bit each. */
INLINE uint32_t sees(const ragged_batch *b, int64_t sequence, int64_t token, int64_t first) {
    int64_t causal = keys_seen(b, sequence, token) - first;
    uint32_t mask = causal >= LANES ? (1u << LANES) - 1 : causal <= 0 ? 0 : (1u << causal) - 1;
    if (b->visible == NULL || b->visible[token] == 0) return mask;
    int64_t fresh = b->query_start[sequence + 1] - b->query_start[sequence];
    int64_t shift = b->context_lens[sequence] - fresh - first; /* lane of the first new token */
    if (shift >= LANES) return mask;
    uint64_t tree = (uint64_t)b->visible[token];
    uint64_t lanes = shift <= -64 ? 0 : shift < 0 ? tree >> -shift : (tree << shift) | ((1u << shift) - 1);
    return mask & (uint32_t)lanes;
}

INLINE void attend_span(const call *c, const tile *t, const float *query, const char *const *keys,
                        const char *const *values, int64_t first, int64_t count, int64_t dim, int64_t type,
                        partial *p) {
    float scores[MAX_TILE_ROWS * SPAN] ALIGNED;
    const int64_t rows = t->num_tokens * c->group;
    const int subs = (int)((count + LANES - 1) / LANES);
    const int has_pairs = HAS_BF16_PAIRS && type == TYPE_BF16 && dim % 32 == 0;
    if (has_pairs) score_span_pairs(query, rows, keys, count, dim, scores);
    else score_span(query, rows, keys, count, dim, type, scores);
    for (int64_t token = 0, r = 0; token < t->num_tokens; token++) {
        uint32_t masks[SPAN / LANES];
        for (int i = 0; i < subs; i++) masks[i] = sees(c->batch, t->sequence, t->first_token + token, first + i * LANES);
        for (int64_t g = 0; g < c->group; g++, r++)
            weigh_row(scores + r * SPAN, masks, subs, &p->max[r], &p->sum[r], p->acc + r * dim, dim);
    }
    if (has_pairs) add_span_pairs(scores, rows, values, count, dim, p->acc);
    else add_span(scores, rows, values, count, dim, type, p->acc);
}

/* Where the keys and values of positions [first, first + count) lie. */
typedef struct {
    const char *keys[SPAN], *values[SPAN];
} places;

INLINE void find_places(const call *c, const tile *t, int64_t kv_head, int64_t first, int64_t count, int64_t token_bytes,
                        places *to) {
    const kv_layer *cache = c->cache;
    const int32_t *table = c->batch->block_tables + t->sequence * c->batch->table_stride;
    int64_t block = first / cache->block_size, offset = first % cache->block_size;
    for (int64_t k = 0; k < count; block++, offset = 0) {
        const int64_t start = (table[block] * cache->num_kv_heads + kv_head) * cache->block_size * token_bytes;
        for (; offset < cache->block_size && k < count; offset++, k++) {
            to->keys[k] = (const char *)cache->key + start + offset * token_bytes;
            to->values[k] = (const char *)cache->value + start + offset * token_bytes;
        }
    }
}

/* The weights have passed through the caches since these were last read, and blocks are too short for the
 * processor to foresee them. */
INLINE void prefetch(const char *const *rows, int64_t count, int64_t token_bytes) {
    for (int64_t k = 0; k < count; k++)
        for (int64_t at = 0; at < token_bytes; at += 64) __builtin_prefetch(rows[k] + at);
}

/* One chunk of keys against one tile of queries. */
INLINE void attend_chunk_typed(const call *c, const tile *t, int64_t kv_head, int64_t chunk, const float *query,
                               int64_t dim, int64_t type, partial *p) {
    const int64_t token_bytes = dim * type_size(type);
    const int64_t end = (chunk + 1) * CHUNK < t->num_keys ? (chunk + 1) * CHUNK : t->num_keys;
    places two[2];
    for (int64_t r = 0; r < t->num_tokens * c->group; r++) {
        p->max[r] = -INFINITY;
        p->sum[r] = 0.0f;
        memset(p->acc + r * dim, 0, (size_t)dim * sizeof(float));
    }
    for (int64_t first = chunk * CHUNK, count = 0; first < end; first += count) {
        const places *here = &two[first / SPAN % 2];
        places *next = &two[(first / SPAN + 1) % 2];
        count = end - first < SPAN ? end - first : SPAN;
        if (first == chunk * CHUNK) {
            find_places(c, t, kv_head, first, count, token_bytes, &two[first / SPAN % 2]);
            prefetch(here->keys, count, token_bytes);
        }
        prefetch(here->values, count, token_bytes);
        if (first + SPAN < end) {
            const int64_t more = end - first - SPAN < SPAN ? end - first - SPAN : SPAN;
            find_places(c, t, kv_head, first + SPAN, more, token_bytes, next);
            prefetch(next->keys, more, token_bytes);
        }
        attend_span(c, t, query, here->keys, here->values, first, count, dim, type, p);
    }
}

#define SPECIALISE(name, dim, type)                                                                            \
    static __attribute__((noinline)) void name(const call *c, const tile *t, int64_t kv_head, int64_t chunk,   \
                                               const float *query, partial *p) {                               \
        attend_chunk_typed(c, t, kv_head, chunk, query, dim, type, p);                                         \
    }
SPECIALISE(attend_f32_64, 64, TYPE_F32)
SPECIALISE(attend_f32_128, 128, TYPE_F32)
SPECIALISE(attend_bf16_64, 64, TYPE_BF16)
SPECIALISE(attend_bf16_128, 128, TYPE_BF16)
SPECIALISE(attend_any, c->cache->head_dim, c->cache->type)

static void attend_chunk(const call *c, const tile *t, int64_t kv_head, int64_t chunk, const float *query,
                         partial *p) {
    const int is_f32 = c->cache->type == TYPE_F32;
    if (c->cache->head_dim == 64) (is_f32 ? attend_f32_64 : attend_bf16_64)(c, t, kv_head, chunk, query, p);
    else if (c->cache->head_dim == 128) (is_f32 ? attend_f32_128 : attend_bf16_128)(c, t, kv_head, chunk, query, p);
    else attend_any(c, t, kv_head, chunk, query, p);
}

/* total += part. Not inlined, so that every caller rounds alike. */
static __attribute__((noinline)) void merge(partial *total, const partial *part, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; r++) {
        if (part->max[r] == -INFINITY) continue;
        float *to = total->acc + r * dim;
        const float *from = part->acc + r * dim;
        float max = total->max[r] > part->max[r] ? total->max[r] : part->max[r];
        float keep = total->max[r] == -INFINITY ? 0.0f : exp_scalar(total->max[r] - max);
        float take = exp_scalar(part->max[r] - max);
        for (int64_t d = 0; d < dim; d++) {
            to[d] *= keep;
            to[d] += from[d] * take;
        }
        total->sum[r] *= keep;
        total->sum[r] += part->sum[r] * take;
        total->max[r] = max;
    }
}

static void write_out(const call *c, const tile *t, int64_t kv_head, const partial *p) {
    const int64_t dim = c->cache->head_dim;
    for (int64_t token = 0, r = 0; token < t->num_tokens; token++)
        for (int64_t g = 0; g < c->group; g++, r++) {
            const float inverse = 1.0f / p->sum[r];
            const float *from = p->acc + r * dim;
            int64_t at = (t->first_token + token) * c->out->stride + (kv_head * c->group + g) * dim;
            if (c->out->type == TYPE_F32)
                for (int64_t d = 0; d < dim; d++) ((float *)c->out->data)[at + d] = from[d] * inverse;
            else
                for (int64_t d = 0; d < dim; d++) ((uint16_t *)c->out->data)[at + d] = f32_to_bf16(from[d] * inverse);
        }
}

static void load_query(const call *c, const tile *t, int64_t kv_head, float *query) {
    const int64_t dim = c->cache->head_dim;
    for (int64_t token = 0, r = 0; token < t->num_tokens; token++)
        for (int64_t g = 0; g < c->group; g++, r++) {
            int64_t at = (t->first_token + token) * c->query->stride + (kv_head * c->group + g) * dim;
            for (int64_t d = 0; d < dim; d++)
                query[r * dim + d] = load_scalar(c->query->data, at + d, c->query->type) * c->scale;
        }
}

void attention_plan_free(attention_plan *plan) {
    free(plan->tiles);
    free(plan->partials);
}

/* Cuts the batch into tiles. Chunks become separate items only where a tile has few rows, so that
 * a lone decode still feeds all threads and a prompt needs no scratch; the sums are the same.
 * Returns 0, or -1 when memory ran out. */
int64_t attention_plan_make(attention_plan *plan, const ragged_batch *b, int64_t group, int64_t num_kv_heads) {
    int64_t per_tile = MAX_TILE_ROWS / group, num_partials = 0;
    if (per_tile > MAX_TILE_TOKENS) per_tile = MAX_TILE_TOKENS;
    *plan = (attention_plan){.tiles = malloc((size_t)(b->num_tokens + 1) * sizeof(tile))};
    if (plan->tiles == NULL) return -1;
    for (int64_t s = 0; s < b->num_sequences; s++)
        for (int64_t at = b->query_start[s]; at < b->query_start[s + 1]; at += per_tile) {
            tile *t = &plan->tiles[plan->num_tiles++];
            t->sequence = s;
            t->first_token = at;
            t->num_tokens = b->query_start[s + 1] - at < per_tile ? b->query_start[s + 1] - at : per_tile;
            t->num_keys = 0;
            for (int64_t i = 0; i < t->num_tokens; i++) {
                int64_t keys = keys_seen(b, s, at + i);
                if (keys > t->num_keys) t->num_keys = keys;
            }
            const int64_t chunks = (t->num_keys + CHUNK - 1) / CHUNK;
            const int is_split = t->num_tokens < per_tile && chunks > 1;
            t->num_items = is_split ? chunks : 1;
            t->first_item = plan->num_items;
            t->scratch = is_split ? num_partials : -1;
            plan->num_items += t->num_items * num_kv_heads;
            plan->num_products += 2 * t->num_tokens * t->num_keys * group * num_kv_heads;
            if (is_split) num_partials += t->num_items * num_kv_heads;
        }
    if (num_partials > 0 &&
        posix_memalign((void **)&plan->partials, 64, (size_t)num_partials * sizeof(partial)) != 0) {
        plan->partials = NULL;
        attention_plan_free(plan);
        return -1;
    }
    return 0;
}

static void run_item(const call *c, const tile *t, int64_t item, partial *partials) {
    float query[MAX_TILE_ROWS * MAX_HEAD_DIM] ALIGNED;
    const int64_t kv_head = item / t->num_items;
    load_query(c, t, kv_head, query);
    if (t->scratch >= 0) {
        attend_chunk(c, t, kv_head, item % t->num_items, query, &partials[t->scratch + item]);
        return;
    }
    partial total, part;
    attend_chunk(c, t, kv_head, 0, query, &total);
    for (int64_t chunk = 1; chunk * CHUNK < t->num_keys; chunk++) {
        attend_chunk(c, t, kv_head, chunk, query, &part);
        merge(&total, &part, t->num_tokens * c->group, c->cache->head_dim);
    }
    write_out(c, t, kv_head, &total);
}

static const tile *find_tile(const tile *tiles, int64_t count, int64_t item) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (tiles[middle].first_item <= item) low = middle;
        else high = middle - 1;
    }
    return &tiles[low];
}

/* Called by all threads of a team; ends with a new phase. */
void attention_run(const worker *w, const attention_plan *plan, const head_rows *query, const head_rows *out,
                   const kv_layer *cache, const ragged_batch *batch, float scale) {
    const call c = {query, out, cache, batch, scale, query->num_heads / cache->num_kv_heads};
    int64_t first, last;
    while (claim(w, plan->num_items, &first, &last))
        for (int64_t item = first; item < last; item++) {
            const tile *t = find_tile(plan->tiles, plan->num_tiles, item);
            run_item(&c, t, item - t->first_item, plan->partials);
        }
    next_phase(w);
    if (plan->partials == NULL) return;
    const int64_t num_merges = plan->num_tiles * cache->num_kv_heads;
    for (int64_t i = first_row(w, num_merges); i < last_row(w, num_merges); i++) {
        const tile *t = &plan->tiles[i / cache->num_kv_heads];
        const int64_t head = i % cache->num_kv_heads;
        if (t->scratch < 0) continue;
        partial *total = &plan->partials[t->scratch + head * t->num_items];
        for (int64_t chunk = 1; chunk < t->num_items; chunk++)
            merge(total, total + chunk, t->num_tokens * c.group, cache->head_dim);
        write_out(&c, t, head, total);
    }
    next_phase(w);
}

/* Returns 0, or -1 when memory ran out. */
int64_t specgate_paged_attention(const head_rows *query, const head_rows *out, const kv_layer *cache,
                                 const ragged_batch *batch, double scale, int64_t num_threads) {
    attention_plan plan;
    team threads = {0};
    if (attention_plan_make(&plan, batch, query->num_heads / cache->num_kv_heads, cache->num_kv_heads)) return -1;
    if (num_threads > plan.num_items) num_threads = plan.num_items;
    num_threads = useful_threads(num_threads, plan.num_products * cache->head_dim);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        const worker w = join_team(&threads);
        attention_run(&w, &plan, query, out, cache, batch, (float)scale);
    }
    attention_plan_free(&plan);
    return 0;
}

INLINE void copy_head(char *to, const char *from, int64_t at, int64_t dim, int64_t to_type, int64_t from_type) {
    if (to_type == from_type) {
        memcpy(to, from + at * type_size(from_type), (size_t)(dim * type_size(to_type)));
        return;
    }
    for (int64_t d = 0; d < dim; d++) {
        float x = load_scalar(from, at + d, from_type);
        if (to_type == TYPE_F32) ((float *)to)[d] = x;
        else ((uint16_t *)to)[d] = f32_to_bf16(x);
    }
}

void write_kv_token(const head_rows *key, const head_rows *value, const kv_layer *cache, const ragged_batch *batch,
                    int64_t t) {
    const int64_t dim = cache->head_dim, bytes = dim * type_size(cache->type);
    const int64_t block = batch->slots[t] / cache->block_size, offset = batch->slots[t] % cache->block_size;
    for (int64_t h = 0; h < cache->num_kv_heads; h++) {
        int64_t at = ((block * cache->num_kv_heads + h) * cache->block_size + offset) * bytes;
        copy_head((char *)cache->key + at, key->data, t * key->stride + h * dim, dim, cache->type, key->type);
        copy_head((char *)cache->value + at, value->data, t * value->stride + h * dim, dim, cache->type, value->type);
    }
}

void specgate_write_kv(const head_rows *key, const head_rows *value, const kv_layer *cache,
                       const ragged_batch *batch, int64_t num_threads) {
    if (batch->num_tokens < 64) num_threads = 1;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t t = 0; t < batch->num_tokens; t++) write_kv_token(key, value, cache, batch, t);
}
