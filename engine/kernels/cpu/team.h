/* Threads that work through phases together.
 *
 * A forward has some 300 phases of a few microseconds, so waiting must be cheap; and where another
 * process takes a core, it must not be a spin, or two threads on one core wait for each other's time
 * slices. Hence: spin for some microseconds, then sleep until woken. OpenMP only starts the threads.
 */
#ifndef SPECGATE_TEAM_H
#define SPECGATE_TEAM_H

#include <omp.h>
#include <stdatomic.h>
#include <stdint.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define SPINS 400 /* about 10 microseconds */

typedef struct {
    _Alignas(64) _Atomic int32_t phase;
    _Atomic int32_t num_asleep;
    _Alignas(64) _Atomic int32_t num_arrived;
    _Alignas(64) _Atomic int64_t next; /* first piece of the phase that nobody has claimed */
} team;

typedef struct {
    team *team;
    int64_t index; /* of this thread */
    int64_t size;  /* threads in the team */
} worker;

/* Within a parallel region. */
static inline worker join_team(team *t) { return (worker){t, omp_get_thread_num(), omp_get_num_threads()}; }

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Waits until all threads have come here, and starts the next phase. */
static inline void next_phase(const worker *w) {
    team *t = w->team;
    if (w->size == 1) {
        atomic_store_explicit(&t->next, 0, memory_order_relaxed);
        return;
    }
    const int32_t phase = atomic_load(&t->phase);
    if (atomic_fetch_add(&t->num_arrived, 1) == w->size - 1) {
        atomic_store(&t->num_arrived, 0);
        atomic_store(&t->next, 0);
        atomic_store(&t->phase, phase + 1);
#ifdef __linux__
        if (atomic_load(&t->num_asleep) > 0) syscall(SYS_futex, &t->phase, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&t->phase, memory_order_acquire) != phase) return;
        relax();
    }
    atomic_fetch_add(&t->num_asleep, 1);
    while (atomic_load(&t->phase) == phase) {
#ifdef __linux__
        syscall(SYS_futex, &t->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
#else
        sched_yield();
#endif
    }
    atomic_fetch_sub(&t->num_asleep, 1);
}

/* The next unclaimed pieces [*first, *last) of `count`; 0 when none is left in this phase. A thread
 * that lost its core so leaves the rest to the others. */
static inline int claim(const worker *w, int64_t count, int64_t *first, int64_t *last) {
    const int64_t chunk = count / (8 * w->size) + 1;
    *first = atomic_fetch_add_explicit(&w->team->next, chunk, memory_order_relaxed);
    *last = *first + chunk < count ? *first + chunk : count;
    return *first < count;
}

/* No more threads than `num_products` multiplications keep busy: waking one takes as long as a million. */
static inline int64_t useful_threads(int64_t num_threads, int64_t num_products) {
    const int64_t most = 1 + num_products / 1000000;
    return num_threads < most ? num_threads : most;
}

/* This thread's share of `count` rows, for phases too short to claim pieces. */
static inline int64_t first_row(const worker *w, int64_t count) { return count * w->index / w->size; }
static inline int64_t last_row(const worker *w, int64_t count) { return count * (w->index + 1) / w->size; }

#endif
