/* Divides a product among a team of threads: rows of a weight, or heads of attention.
 *
 * A step through many layers has hundreds of products of some microseconds. So a thread that waits for the next product
 * spins during a step. Outside a step, a waiting thread sleeps and leaves its core to torch's own threads; only large
 * products are worth waking the thread. The team works for one caller at a time; a second caller computes without the team.
 * Results do not depend on the thread that computes them. */

#ifndef PARALLELFORMERS_NG_TEAM_H
#define PARALLELFORMERS_NG_TEAM_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>

#include "../collectives/_kernel_api.h"

/* A product of fewer than WORTH_HEARING bytes is done before a spinning thread notices it; one of fewer than WORTH_WAKING
 * bytes is done before a sleeping thread wakes. Parts begin at multiples of WHOLE, so tiles and blocks are not divided. */
enum { MAX_THREADS = 256, WHOLE = 32, WORTH_HEARING = 16 << 10, WORTH_WAKING = 1 << 20, SPINS = 5000 };

/* Computes the items of a job from `first` to `end`. `thread` differs between all threads of the job. */
typedef void (*Part)(const void *job, size_t first, size_t end, size_t thread);

static struct {
    pthread_mutex_t at_work, door;
    pthread_cond_t called;
    size_t threads, present;       /* number of threads wanted, and started; includes the caller */
    size_t since[MAX_THREADS];    /* value of `calls` when each thread started */
    Part part;
    const void *job;
    size_t count, each;
    atomic_size_t calls, unfinished, asleep;
    atomic_int in_step;
} team = {.at_work = PTHREAD_MUTEX_INITIALIZER, .door = PTHREAD_MUTEX_INITIALIZER, .called = PTHREAD_COND_INITIALIZER,
          .threads = 1, .present = 1};

static void compute_part(size_t thread)
{
    const size_t first = thread * team.each, end = first + team.each;
    if (first < team.count) team.part(team.job, first, end < team.count ? end : team.count, thread);
}

static void *serve_team(void *number)
{
    const size_t thread = (size_t)number;
    for (size_t heard = team.since[thread];; heard++) {
        for (size_t spin = 0; spin < SPINS && team.in_step && atomic_load(&team.calls) == heard; spin++) cpu_pause();
        if (atomic_load(&team.calls) == heard) {
            pthread_mutex_lock(&team.door);
            atomic_fetch_add(&team.asleep, 1);
            while (atomic_load(&team.calls) == heard) pthread_cond_wait(&team.called, &team.door);
            atomic_fetch_sub(&team.asleep, 1);
            pthread_mutex_unlock(&team.door);
        }
        compute_part(thread);
        atomic_fetch_sub(&team.unfinished, 1);
    }
    return NULL;
}

/* Starts missing threads; the team becomes smaller if that fails. The threads block signals, which Python handles. */
static void fill_team(void)
{
    sigset_t all, before;
    pthread_attr_t detached;
    pthread_t thread;
    if (team.present >= team.threads) return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    while (team.present < team.threads) {
        team.since[team.present] = atomic_load(&team.calls);
        if (pthread_create(&thread, &detached, serve_team, (void *)team.present)) team.threads = team.present;
        else team.present++;
    }
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Runs a job of `count` equal items with `bytes` bytes in total. Blocks of `whole` items are not divided. */
static void share_out(Part part, const void *job, size_t count, size_t whole, size_t bytes)
{
    const size_t threads = team.threads, blocks = (count + whole - 1) / whole;
    const size_t worth = team.in_step ? WORTH_HEARING : WORTH_WAKING;
    if (threads == 1 || bytes < worth || blocks < 2 || pthread_mutex_trylock(&team.at_work)) {
        part(job, 0, count, 0);
        return;
    }
    fill_team();
    team.part = part, team.job = job, team.count = count;
    team.each = (blocks + team.threads - 1) / team.threads * whole;
    atomic_store(&team.unfinished, team.present - 1);
    atomic_fetch_add(&team.calls, 1);
    if (atomic_load(&team.asleep)) {
        pthread_mutex_lock(&team.door);
        pthread_cond_broadcast(&team.called);
        pthread_mutex_unlock(&team.door);
    }
    compute_part(0);
    for (size_t spin = 0; atomic_load(&team.unfinished); spin++) spin < SPINS ? cpu_pause() : (void)sched_yield();
    pthread_mutex_unlock(&team.at_work);
}

/* Mark the beginning and the end of a step with many products. */
static void begin_step(void) { atomic_fetch_add(&team.in_step, 1); }
static void end_step(void) { atomic_fetch_sub(&team.in_step, 1); }

/* Resets the team in a forked child, which has only the thread that called fork. */
static void forget_team(void)
{
    pthread_mutex_init(&team.at_work, NULL);
    pthread_mutex_init(&team.door, NULL);
    pthread_cond_init(&team.called, NULL);
    team.present = 1;
    atomic_store(&team.asleep, 0);
    atomic_store(&team.in_step, 0);
}

/* Sets the largest number of threads for a product, the caller's thread included. */
static void set_team(size_t threads)
{
    static int watched;
    if (!watched) watched = !pthread_atfork(NULL, NULL, forget_team);
    pthread_mutex_lock(&team.at_work);
    team.threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    pthread_mutex_unlock(&team.at_work);
}

#endif
