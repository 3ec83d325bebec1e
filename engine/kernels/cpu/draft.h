/* Greedy chains of a draft head in one call. Mirrored field by field in native_draft.py. */
#ifndef SPECGATE_DRAFT_H
#define SPECGATE_DRAFT_H

#include <stdint.h>

#include "decoder.h"

typedef struct {
    const decoder *layers;           /* the head's own; its embedding is the target's */
    quant_matrix fc;                 /* [hidden, (num_input_tokens + 1) * hidden] */
    quant_matrix vocabulary;         /* the target's head, rows of the draft vocabulary alone */
    const int64_t *draft_token_ids;  /* [vocabulary.num_rows] */
    int64_t num_input_tokens;        /* 1, or 2: the token before is read too */
} draft_head;

/* One sequence. Its new entries are made of tokens 1 to num_new of `token_ids` and of `hidden`. */
typedef struct {
    const int64_t *token_ids; /* [num_new + 1] */
    const float *hidden;      /* [num_new, hidden] of token_ids[0] to [num_new - 1] */
    const int32_t *blocks;    /* its block table */
    int64_t start;            /* position of the first new entry */
    int64_t num_new;          /* at least 1 */
    int64_t num_draft;        /* wanted; 0 where more entries are still to come */
    double truth;             /* what its products of probabilities are worth */
    int64_t *drafted;         /* [num_draft], out */
    int64_t num_drafted;      /* out */
    double reach;             /* out: the last product that was drawn from */
    double expected;          /* out: the sum of all of them */
} draft_sequence;

/* `least`: nothing is drawn where reach * truth is below it; 0: all of num_draft is. `work`: forwards,
 * and KV tokens they attended to. Returns 0, -1 when memory ran out, -2 where scores are no numbers. */
int64_t specgate_draft_chains(const draft_head *head, draft_sequence *sequences, int64_t num_sequences,
                              double least, const kv_layer *cache, int64_t layer_bytes, int64_t *work,
                              int64_t num_threads);

#endif
