/* Synchronizes the ranks of an arena: the memory, the common steps, and how a rank waits for another rank.
 *
 * Memory. An arena (arena.py has the same numbers) is a header page, a 1 KiB line per place, and two slots per place:
 *
 *     | header | line 0 | line 1 | ... | slot 0,0 | slot 0,1 | slot 1,0 | slot 1,1 | ...
 *
 * Of W ranks, rank r uses place r for collectives of all ranks, and place W + r for collectives of its stage. The ranks of
 * a collective have consecutive places from `first` on, and are numbered from 0 within the collective.
 *
 * Protocol. All ranks run the same steps in the same order, numbered 1, 2, 3, ... In step s a rank writes its data
 * into its own slot s mod 2, publishes s in its line (release), waits until every line shows at least s (acquire), and
 * then reads the peers' slots s mod 2. A collective has one or several steps; data larger than a slot needs several.
 *
 * Why two slots suffice. Rank a writes slot s mod 2 in step s; its last readers were the peers in step s - 2. Rank a
 * starts step s after step s - 1, in which it saw every peer publish s - 1; a peer publishes s - 1 only after it has
 * finished step s - 2, reads included. So no peer still reads the data that a overwrites. For the same reason a
 * peer is at most one step ahead: a peer cannot finish step s + 1 before this rank has published s + 1. Hence the test
 * `counter >= s` with two slots never mixes steps. A line has two signatures as well, so ranks compare those of step s.
 *
 * The published counter is the only state of a rank, so no other state can contradict the arena after a reset.
 */

#ifndef PARALLELFORMERS_NG_KERNEL_PROTOCOL_H
#define PARALLELFORMERS_NG_KERNEL_PROTOCOL_H

#include <Python.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "_kernel_api.h"

#define MAGIC UINT64_C(0x32414e4552414650) /* "PFARENA2" */
enum { HEADER_BYTES = 4096, LINE_BYTES = 1024, PAGE_BYTES = 4096, MAX_WORLD_SIZE = 256 };
enum { DONE = 0, ABORTED = 1, TIMED_OUT = 2, DIVERGED = 3, INTERRUPTED = -1 };
enum { SPINS = 500, CACHE_LINE_BYTES = 64, LINES_AT_ONCE = 8 };
static const uint64_t YIELD_NS = 2000000;         /* a waiting rank first only yields, for this time; then it also sleeps */
static const uint64_t LONGEST_SLEEP_NS = 500000;  /* a sleeping rank sees an abort within a millisecond */
static const uint64_t SIGNAL_CHECK_NS = 50000000; /* time between checks for signals in a long wait */

typedef struct {
    uint64_t magic, world_size, slot_bytes, one_shot_bytes, may_spin;
    _Alignas(128) _Atomic uint64_t abort;
    _Alignas(128) _Atomic uint64_t cancel;
} Header;

typedef struct {
    _Atomic uint64_t counter;
    uint64_t signature[2];
} Line;

typedef struct {
    PyObject_HEAD
    Py_buffer arena;
    Header *header;
    size_t slot_bytes, one_shot_bytes;
    int rank, world_size, first, spins, busy;
    uint64_t timeout_ns;
    const char *next, *next_end; /* memory to prefetch while waiting */
    PyThreadState *thread;
} Kernel;

static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

static inline Line *line(Kernel *k, int rank)
{
    return (Line *)((char *)k->header + HEADER_BYTES + (size_t)(k->first + rank) * LINE_BYTES);
}

static size_t places(const Header *header) { return 2 * (size_t)header->world_size; }

static size_t slots_offset(const Header *header)
{
    size_t end = HEADER_BYTES + places(header) * LINE_BYTES;
    return (end + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static inline char *slot(Kernel *k, int rank, uint64_t step)
{
    size_t number = 2 * (size_t)(k->first + rank) + (step & 1);
    return (char *)k->header + slots_offset(k->header) + number * k->slot_bytes;
}

static inline uint64_t next_step(Kernel *k)
{
    return atomic_load_explicit(&line(k, k->rank)->counter, memory_order_relaxed) + 1;
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static int run_signal_handlers(Kernel *k)
{
    PyEval_RestoreThread(k->thread);
    int raised = PyErr_CheckSignals();
    k->thread = PyEval_SaveThread();
    return raised;
}

/* Prefetches some cache lines that this waiting rank reads next. Returns 0 if all lines have been prefetched. */
static inline int read_ahead(Kernel *k)
{
    if (k->next >= k->next_end) return 0;
    for (int line = 0; line < LINES_AT_ONCE; line++, k->next += CACHE_LINE_BYTES)
        __builtin_prefetch(k->next, 0, 2 /* the second-level cache */);
    return 1;
}

/* Waits until `counter` is at least `step`: prefetches, spins, then yields, then sleeps an eighth of the time waited so
 * far. So a sleep that is too long adds only a small share to the wait. */
static int wait_until(Kernel *k, _Atomic uint64_t *counter, uint64_t step)
{
    uint64_t start = 0, checked = 0;
    for (int round = 0; atomic_load_explicit(counter, memory_order_acquire) < step; round++) {
        if (atomic_load_explicit(&k->header->abort, memory_order_acquire)) return ABORTED;
        if (round < k->spins) {
            if (read_ahead(k)) round--;
            else cpu_pause();
            continue;
        }
        round = k->spins;
        uint64_t now = now_ns();
        if (!start) start = checked = now;
        if (now - start > k->timeout_ns) return TIMED_OUT;
        if (now - start < YIELD_NS) {
            sched_yield();
            continue;
        }
        if (now - checked > SIGNAL_CHECK_NS) {
            checked = now;
            if (run_signal_handlers(k)) return INTERRUPTED;
        }
        uint64_t sleep = (now - start) / 8;
        struct timespec duration = {0, (long)(sleep < LONGEST_SLEEP_NS ? sleep : LONGEST_SLEEP_NS)};
        nanosleep(&duration, NULL);
    }
    return DONE;
}

/* Publishes `step`, after this rank has written its slot, and waits for all peers. The peers' slots may then be read. */
static int exchange(Kernel *k, uint64_t step, uint64_t signature)
{
    Line *own = line(k, k->rank);
    own->signature[step & 1] = signature;
    atomic_store_explicit(&own->counter, step, memory_order_release);
    for (int peer = 0; peer < k->world_size; peer++) {
        int status = wait_until(k, &line(k, peer)->counter, step);
        if (status != DONE) return status;
    }
    for (int peer = 0; peer < k->world_size; peer++)
        if (line(k, peer)->signature[step & 1] != signature) return DIVERGED;
    return DONE;
}

static inline uint64_t sign(uint64_t operation, uint64_t detail)
{
    return operation << 48 | (detail & UINT64_C(0xffffffffffff));
}

#endif
