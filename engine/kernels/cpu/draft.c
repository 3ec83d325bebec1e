/* Greedy chains of a draft head: catch up on what was accepted, then token by token, in one call.
 *
 * A head's forward is so short that calling it costs as much as running it; and what the target's
 * step leaves in the caches is none of it. So everything between two tokens happens here.
 */
#include "draft.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t *token_ids, *before, *positions, *slots;  /* [T] */
    int32_t *query_start, *context_lens, *tables;     /* [N + 1], [N], [N, stride] */
    const float **hidden;                             /* [T] */
    float *inputs, *joined, *out, *logits, *kept;     /* see below */
    int64_t *live;                                    /* [N] */
    int64_t stride;
    void *memory;
} room;

static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

/* Everything of a call in one piece. Returns -1 when memory ran out. */
static int64_t make_room(room *r, const draft_head *head, const draft_sequence *sequences, int64_t num,
                         int64_t block_size) {
    const int64_t hidden = head->layers->hidden, wide = (head->num_input_tokens + 1) * hidden;
    int64_t num_tokens = 0;
    r->stride = 1;
    for (int64_t s = 0; s < num; s++) {
        const draft_sequence *sequence = &sequences[s];
        const int64_t end = sequence->start + sequence->num_new + largest(sequence->num_draft - 1, 0);
        num_tokens += sequence->num_new;
        r->stride = largest(r->stride, (end + block_size - 1) / block_size);
    }
    const int64_t sizes[] = {
        num_tokens * 8, num_tokens * 8, num_tokens * 8, num_tokens * 8, (num + 1) * 4, num * 4, num * r->stride * 4,
        num_tokens * (int64_t)sizeof(float *), num_tokens * hidden * 4, num_tokens * wide * 4, num_tokens * hidden * 4,
        num * head->vocabulary.num_rows * 4, num * hidden * 4, num * 8,
    };
    enum { PARTS = sizeof(sizes) / sizeof(sizes[0]) };
    char *at[PARTS];
    int64_t total = 0;
    for (int i = 0; i < PARTS; i++) total += (sizes[i] + 63) / 64 * 64;
    if (posix_memalign(&r->memory, 64, (size_t)total) != 0) return -1;
    at[0] = r->memory;
    for (int i = 1; i < PARTS; i++) at[i] = at[i - 1] + (sizes[i - 1] + 63) / 64 * 64;
    r->token_ids = (int64_t *)at[0];
    r->before = (int64_t *)at[1];
    r->positions = (int64_t *)at[2];
    r->slots = (int64_t *)at[3];
    r->query_start = (int32_t *)at[4];
    r->context_lens = (int32_t *)at[5];
    r->tables = (int32_t *)at[6];
    r->hidden = (const float **)at[7];
    r->inputs = (float *)at[8];
    r->joined = (float *)at[9];
    r->out = (float *)at[10];
    r->logits = (float *)at[11];
    r->kept = (float *)at[12];
    r->live = (int64_t *)at[13];
    return 0;
}

/* Row `row` of the batch becomes sequence s with its entries from `start` on; `count` of them. */
static void place_sequence(room *r, const draft_sequence *sequence, int64_t row, int64_t start, int64_t count,
                           int64_t block_size) {
    const int64_t end = start + count, num_blocks = (end + block_size - 1) / block_size;
    memcpy(r->tables + row * r->stride, sequence->blocks, (size_t)num_blocks * sizeof(int32_t));
    memset(r->tables + row * r->stride + num_blocks, 0, (size_t)(r->stride - num_blocks) * sizeof(int32_t));
    const int64_t first = r->query_start[row];
    for (int64_t i = 0; i < count; i++) {
        const int64_t position = start + i;
        r->positions[first + i] = position;
        r->slots[first + i] = (int64_t)sequence->blocks[position / block_size] * block_size + position % block_size;
    }
    r->query_start[row + 1] = (int32_t)(first + count);
    r->context_lens[row] = (int32_t)end;
}

/* The guessed hidden states of the batch's entries, into r->out. */
static int64_t run(const draft_head *head, room *r, int64_t num_sequences, const kv_layer *cache, int64_t layer_bytes,
                   int64_t *work, int64_t num_threads) {
    const int64_t hidden = head->layers->hidden, parts = head->num_input_tokens + 1;
    const int64_t num_tokens = r->query_start[num_sequences];
    for (int64_t t = 0; t < num_tokens; t++) {
        float *joined = r->joined + t * parts * hidden;
        specgate_unpack_row(&head->layers->embedding, r->token_ids[t], joined);
        if (parts == 3) specgate_unpack_row(&head->layers->embedding, r->before[t], joined + hidden);
        memcpy(joined + (parts - 1) * hidden, r->hidden[t], (size_t)hidden * sizeof(float));
    }
    const ragged_batch batch = {
        .positions = r->positions,
        .slots = r->slots,
        .query_start = r->query_start,
        .context_lens = r->context_lens,
        .block_tables = r->tables,
        .table_stride = r->stride,
        .num_sequences = num_sequences,
        .num_tokens = num_tokens,
    };
    work[0]++;
    for (int64_t s = 0; s < num_sequences; s++) work[1] += r->context_lens[s];
    if (specgate_linear(&head->fc, r->joined, num_tokens, r->inputs, num_threads)) return -1;
    return specgate_decoder_forward(head->layers, &batch, r->token_ids, r->inputs, cache, layer_bytes, r->out,
                                    num_threads);
}

/* The best of a row, lowest place on a tie, and its probability; -1 where it is no number. */
static int64_t best_of(const float *logits, int64_t count, double *probability) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (logits[i] > logits[best]) best = i;
    float sum = 0.0f;
    for (int64_t i = 0; i < count; i++) sum += expf(logits[i] - logits[best]);
    *probability = 1.0 / (double)sum;
    return isfinite(logits[best]) && isfinite(sum) ? best : -1;
}

static int64_t draft(const draft_head *head, room *r, draft_sequence *sequences, int64_t num_sequences, double least,
                     const kv_layer *cache, int64_t layer_bytes, int64_t *work, int64_t num_threads) {
    const int64_t hidden = head->layers->hidden, vocab = head->vocabulary.num_rows, size = cache->block_size;
    int64_t num_live = 0;
    r->query_start[0] = 0;
    for (int64_t s = 0; s < num_sequences; s++) {
        draft_sequence *sequence = &sequences[s];
        const int64_t first = r->query_start[s];
        place_sequence(r, sequence, s, sequence->start, sequence->num_new, size);
        for (int64_t i = 0; i < sequence->num_new; i++) {
            r->token_ids[first + i] = sequence->token_ids[i + 1];
            r->before[first + i] = sequence->token_ids[i];
            r->hidden[first + i] = sequence->hidden + i * hidden;
        }
        sequence->num_drafted = 0;
        sequence->reach = 1.0;
        sequence->expected = 0.0;
    }
    if (run(head, r, num_sequences, cache, layer_bytes, work, num_threads)) return -1;
    for (int64_t s = 0; s < num_sequences; s++)
        if (sequences[s].num_draft > 0) {
            memcpy(r->kept + num_live * hidden, r->out + (r->query_start[s + 1] - 1) * hidden,
                   (size_t)hidden * sizeof(float));
            r->live[num_live++] = s;
        }
    while (num_live > 0) {
        if (specgate_linear(&head->vocabulary, r->kept, num_live, r->logits, num_threads)) return -1;
        int64_t going_on = 0;
        for (int64_t row = 0; row < num_live; row++) {
            draft_sequence *sequence = &sequences[r->live[row]];
            double probability;
            const int64_t best = best_of(r->logits + row * vocab, vocab, &probability);
            if (best < 0) return -2;
            const double reach = sequence->reach * probability;
            if (least > 0.0 && reach * sequence->truth < least) continue;
            sequence->reach = reach;
            sequence->expected += reach;
            const int64_t count = sequence->num_drafted++;
            sequence->drafted[count] = head->draft_token_ids[best];
            if (sequence->num_drafted == sequence->num_draft) continue;
            /* Rows only move up, so what a later row needs is still there. */
            place_sequence(r, sequence, going_on, sequence->start + sequence->num_new + count, 1, size);
            r->before[going_on] = count > 0 ? sequence->drafted[count - 1] : sequence->token_ids[sequence->num_new];
            r->token_ids[going_on] = sequence->drafted[count];
            memmove(r->kept + going_on * hidden, r->kept + row * hidden, (size_t)hidden * sizeof(float));
            r->hidden[going_on] = r->kept + going_on * hidden;
            r->live[going_on++] = r->live[row];
        }
        num_live = going_on;
        if (num_live == 0) break;
        if (run(head, r, num_live, cache, layer_bytes, work, num_threads)) return -1;
        memcpy(r->kept, r->out, (size_t)(num_live * hidden) * sizeof(float));
    }
    return 0;
}

int64_t specgate_draft_chains(const draft_head *head, draft_sequence *sequences, int64_t num_sequences, double least,
                              const kv_layer *cache, int64_t layer_bytes, int64_t *work, int64_t num_threads) {
    room r;
    work[0] = work[1] = 0;
    if (num_sequences == 0) return 0;
    if (make_room(&r, head, sequences, num_sequences, cache->block_size)) return -1;
    const int64_t failed =
        draft(head, &r, sequences, num_sequences, least, cache, layer_bytes, work, num_threads);
    free(r.memory);
    return failed;
}
