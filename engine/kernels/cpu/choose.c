/* From rows of logits to the token each decides: argmax, or Gumbel-max over what the filters leave.
 *
 * The readable definition is engine/kernels/reference_verify.py, the noise engine/spec/randomness.py. A row is
 * read once from memory and once more from a cache; neither a copy nor a softmax nor a sorted vocabulary is
 * written. Most of a row cannot win whatever its noise, so logarithms are taken of the few words that are small
 * enough: noise is -log(-log(1 - v)) with v = (word + 1/2) / 2^32, so small words are large noise.
 *
 * A row's token is a function of the row alone: one thread decides it, in one order.
 */
#include "choose.h"

#include <stdlib.h>
#include <string.h>

#include "philox.h"
#include "vec.h"

#define TILE 128             /* tokens that share a bound; a multiple of 4 * LANES */
#define AHEAD 1024           /* logits to be read soon: the processor itself foresees no page after this one */
#define FEW 1024             /* candidates that need no memory of their own */
#define MOST_NOISE 22.9f     /* of the smallest word */
#define FIRST_WINDOW 8.0f    /* nats below the best token within which survivors of the filters are sought first */

/* --- a row, tile by tile ---------------------------------------------------------------------- */

/* The scores of tokens [first, first + count): the row's own, or a copy in `room` where some were changed. `at`
 * goes on from tile to tile: the first changed token not before `first`. */
INLINE const float *scores_of(const choice_row *row, int64_t first, int64_t count, int64_t *at, float *room) {
    const float *logits = row->logits + first;
    if (*at >= row->num_changed || row->changed[*at] >= first + count) return logits;
    memcpy(room, logits, (size_t)count * sizeof(float));
    for (; *at < row->num_changed && row->changed[*at] < first + count; (*at)++)
        room[row->changed[*at] - first] = row->scores[*at];
    return room;
}

INLINE int64_t tile_size(int64_t first, int64_t vocab) { return vocab - first < TILE ? vocab - first : TILE; }

/* The largest score of a tile; NaN where it holds one. */
INLINE float best_of_tile(const float *scores, int64_t count) {
    vf32 best[4];
    vi32 odd[4];
    for (int k = 0; k < 4; k++) {
        best[k] = splat(-INFINITY);
        odd[k] = (vi32){0};
    }
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES) {
        for (int k = 0; k < 4 * LANES; k += 16) __builtin_prefetch(scores + i + k + AHEAD);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const vf32 x = load_f32(scores + i + k * LANES);
            best[k] = max_f32(x, best[k]);
            odd[k] |= x != x;
        }
    }
    float highest = max_lanes(max_f32(max_f32(best[0], best[1]), max_f32(best[2], best[3])));
    const vi32 any = odd[0] | odd[1] | odd[2] | odd[3];
    int is_odd = sum_lanes(__builtin_convertvector(any, vf32)) != 0.0f;
    for (; i < count; i++) {
        highest = scores[i] > highest ? scores[i] : highest;
        is_odd |= scores[i] != scores[i];
    }
    return is_odd ? NAN : highest;
}

INLINE int64_t place_of(const float *scores, int64_t count, float wanted) {
    int64_t i = 0;
    while (i < count && scores[i] != wanted) i++;
    return i;
}

/* The first best token of the row, or -1 where the row holds NaN, its best is infinite or nothing is left.
 * bests: the best of each tile, or NULL. */
static int64_t best_token(const choice_row *row, int64_t vocab, float *bests, float *score) {
    float room[TILE] ALIGNED, highest = -INFINITY;
    int64_t at = 0, before = 0, token = -1;
    for (int64_t first = 0; first < vocab; first += TILE) {
        const int64_t count = tile_size(first, vocab), at_first = at;
        const float best = best_of_tile(scores_of(row, first, count, &at, room), count);
        if (best != best || best == INFINITY) return -1;
        if (bests != NULL) bests[first / TILE] = best;
        if (best > highest) {
            highest = best;
            token = first;
            before = at_first;
        }
    }
    if (token < 0) return -1;
    *score = highest;
    const int64_t count = tile_size(token, vocab);
    return token + place_of(scores_of(row, token, count, &before, room), count, highest);
}

/* --- noise -------------------------------------------------------------------------------------- */

INLINE float noise_of(uint32_t word) {
    float negative = (float)word * -0x1p-32f - 0x1p-33f;
    if (negative < 0x1p-24f - 1.0f) negative = 0x1p-24f - 1.0f;
    return -logf(-log1pf(negative));
}

INLINE float noise_of_token(const choice_row *row, int64_t token) {
    vu32 words[4];
    philox_lanes(row->counter, (uint32_t)(token / 4), words);
    return noise_of(words[token % 4][0]);
}

/* No larger word is noise above `least`: a little more than 2^32 (1 - exp(-exp(-least))). */
INLINE uint32_t largest_word(float least) {
    const double limit = -expm1(-exp(-(double)least)) * 0x1p32 * 1.00002 + 1024.0;
    return limit >= 4294967295.0 ? UINT32_MAX : (uint32_t)limit;
}

typedef struct {
    int64_t token;
    float score;
} winner;

INLINE void contend(winner *w, int64_t token, float score) {
    if (score > w->score || (score == w->score && token < w->token)) *w = (winner){token, score};
}

/* Lets the tokens of a tile contend whose noise may bring them above the winner. */
static __attribute__((noinline)) void contend_tile(const choice_row *row, const float *scores, int64_t first,
                                                   int64_t count, float tile_best, float best, winner *leader) {
    const float temperature = row->temperature, least = leader->score - (tile_best - best) / temperature;
    if (least > MOST_NOISE) return;
    const uint32_t limit = largest_word(least);
    for (int64_t block = 0; block < TILE / 4; block += LANES) {
        vu32 words[4];
        vi32 hits = {0};
        philox_lanes(row->counter, (uint32_t)(first / 4 + block), words);
        for (int w = 0; w < 4; w++) hits |= words[w] <= limit;
        if (sum_lanes(__builtin_convertvector(hits, vf32)) == 0.0f) continue;
        for (int lane = 0; lane < LANES; lane++)
            for (int w = 0; w < 4; w++) {
                const int64_t at = 4 * (block + lane) + w;
                if (at < count && words[w][lane] <= limit)
                    contend(leader, first + at, (scores[at] - best) / temperature + noise_of(words[w][lane]));
            }
    }
}

/* Gumbel-max over the whole row. */
static int64_t sample_all(const choice_row *row, int64_t vocab, const float *bests, float best, int64_t top) {
    float room[TILE] ALIGNED;
    winner w = {top, noise_of_token(row, top)}; /* (best - best) / temperature is 0 */
    int64_t at = 0;
    for (int64_t first = 0; first < vocab; first += TILE) {
        const int64_t count = tile_size(first, vocab);
        const float *scores = scores_of(row, first, count, &at, room);
        contend_tile(row, scores, first, count, bests[first / TILE], best, &w);
    }
    return w.token;
}

/* --- filters ------------------------------------------------------------------------------------ */

typedef struct {
    float score;
    int32_t token;
} candidate;

typedef struct {
    candidate few[FEW];
    candidate *all;
    int64_t count, room;
    double mass; /* of the whole row, exp(score) summed, where asked for */
} candidates;

INLINE int comes_before(candidate a, candidate b) {
    return a.score > b.score || (a.score == b.score && a.token < b.token);
}

/* Scaled scores of at least `floor`. Returns 0, or -1 when memory ran out. */
static int64_t find_candidates(const choice_row *row, int64_t vocab, const float *bests, float best, float floor,
                               int with_mass, candidates *found) {
    float room[TILE] ALIGNED;
    int64_t at = 0;
    found->count = 0;
    found->mass = 0.0;
    for (int64_t first = 0; first < vocab; first += TILE) {
        const int64_t count = tile_size(first, vocab);
        const float *scores = scores_of(row, first, count, &at, room);
        if (with_mass) {
            vf32 sum = {0};
            int64_t i = 0;
            for (; i + LANES <= count; i += LANES) sum += exp_f32((load_f32(scores + i) - best) / row->temperature);
            found->mass += sum_lanes(sum);
            for (; i < count; i++) found->mass += exp_scalar((scores[i] - best) / row->temperature);
        }
        if ((bests[first / TILE] - best) / row->temperature < floor) continue;
        if (found->count + count > found->room) {
            candidate *more = malloc((size_t)(2 * found->room + TILE) * sizeof(candidate));
            if (more == NULL) return -1;
            memcpy(more, found->all, (size_t)found->count * sizeof(candidate));
            if (found->all != found->few) free(found->all);
            found->all = more;
            found->room = 2 * found->room + TILE;
        }
        for (int64_t i = 0; i < count; i++) {
            const float score = (scores[i] - best) / row->temperature;
            found->all[found->count] = (candidate){score, (int32_t)(first + i)};
            found->count += score >= floor;
        }
    }
    return 0;
}

INLINE void sink(candidate *heap, int64_t count, int64_t at) {
    for (int64_t child = 2 * at + 1; child < count; at = child, child = 2 * at + 1) {
        if (child + 1 < count && comes_before(heap[child + 1], heap[child])) child++;
        if (!comes_before(heap[child], heap[at])) return;
        const candidate lower = heap[at];
        heap[at] = heap[child];
        heap[child] = lower;
    }
}

INLINE double sum_of_masses(const candidate *some, int64_t count) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += exp((double)some[i].score);
    return sum;
}

/* All that min_p, top_k and top_p can leave. Returns 0, or -1 when memory ran out. */
static int64_t find_survivors(const choice_row *row, int64_t vocab, const float *bests, float best, candidates *found) {
    if (row->min_p > 0.0)
        return find_candidates(row, vocab, bests, best, (float)log(row->min_p), 0, found);
    const int is_nucleus = row->top_k == 0;
    for (float window = FIRST_WINDOW;; window = window < 1e4f ? 2.0f * window : INFINITY) {
        if (find_candidates(row, vocab, bests, best, -window, is_nucleus, found)) return -1;
        if (window == INFINITY) return 0;
        if (is_nucleus ? sum_of_masses(found->all, found->count) >= row->top_p * found->mass : found->count >= row->top_k)
            return 0;
    }
}

/* Gumbel-max over what the filters leave, taken best first off a heap. */
static int64_t sample_filtered(const choice_row *row, int64_t vocab, const float *bests, float best,
                               candidates *found) {
    if (find_survivors(row, vocab, bests, best, found)) return -2;
    candidate *heap = found->all;
    int64_t left = found->count;
    for (int64_t at = left / 2 - 1; at >= 0; at--) sink(heap, left, at);
    const int64_t most = row->top_k > 0 && row->top_k < left ? row->top_k : left;
    double total = found->mass;
    if (row->top_p < 1.0 && (row->min_p > 0.0 || row->top_k > 0)) {
        if (most == left) {
            total = sum_of_masses(heap, left);
        } else { /* of the k best: take them off, count, and put them in order behind the heap */
            total = 0.0;
            for (int64_t k = 0; k < most; k++) {
                const candidate next = heap[0];
                heap[0] = heap[--left];
                heap[left] = next;
                sink(heap, left, 0);
                total += exp((double)next.score);
            }
            heap += left; /* worst first: reversed they are a heap */
            for (int64_t i = 0; i < most / 2; i++) {
                const candidate other = heap[i];
                heap[i] = heap[most - 1 - i];
                heap[most - 1 - i] = other;
            }
            left = most;
        }
    }
    winner w = {-1, -INFINITY};
    double before = 0.0;
    for (int64_t k = 0; k < most; k++) {
        const candidate next = heap[0];
        if (k > 0 && row->top_p < 1.0 && before >= row->top_p * total) break;
        before += exp((double)next.score);
        const float score = next.score + noise_of_token(row, next.token);
        if (w.token < 0 || score > w.score) w = (winner){next.token, score};
        heap[0] = heap[--left];
        sink(heap, left, 0);
    }
    return w.token;
}

/* --- rows --------------------------------------------------------------------------------------- */

static int64_t choose_row(const choice_row *row, int64_t vocab, float *bests) {
    float best;
    if (row->temperature == 0.0f) return best_token(row, vocab, NULL, &best);
    const int64_t top = best_token(row, vocab, bests, &best);
    if (top < 0) return top;
    if (row->min_p <= 0.0 && row->top_k == 0 && row->top_p >= 1.0) return sample_all(row, vocab, bests, best, top);
    candidates found = {.room = FEW};
    found.all = found.few;
    const int64_t token = sample_filtered(row, vocab, bests, best, &found);
    if (found.all != found.few) free(found.all);
    return token;
}

/* tokens[i]: what row i decides; -1 where it holds NaN, its best is infinite or nothing is left; -2 when memory
 * ran out. */
void specgate_choose_rows(const choice_row *rows, int64_t num_rows, int64_t vocab, int64_t *tokens,
                          int64_t num_threads) {
    const int64_t num_tiles = (vocab + TILE - 1) / TILE;
    if (num_threads > num_rows) num_threads = num_rows;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic) if (num_threads > 1)
    for (int64_t i = 0; i < num_rows; i++) {
        float *bests = malloc((size_t)num_tiles * sizeof(float));
        tokens[i] = bests == NULL ? -2 : choose_row(&rows[i], vocab, bests);
        free(bests);
    }
}
