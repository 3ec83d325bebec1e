/* Rows of logits, and how each decides its token. See choose.c and engine/types.py, SamplingParams. */
#ifndef SPECGATE_CHOOSE_H
#define SPECGATE_CHOOSE_H

#include <stdint.h>

typedef struct {
    const float *logits;    /* [vocab] */
    const int64_t *changed; /* [num_changed] ascending: tokens whose scores are not their logits */
    const float *scores;    /* [num_changed] */
    int64_t num_changed;
    uint64_t counter[5];    /* of the noise; see philox.h */
    double min_p;           /* 0: off */
    double top_p;           /* 1: off */
    int64_t top_k;          /* 0: off */
    float temperature;      /* 0: the best token */
} choice_row;

void specgate_choose_rows(const choice_row *rows, int64_t num_rows, int64_t vocab, int64_t *tokens,
                          int64_t num_threads);

#endif
