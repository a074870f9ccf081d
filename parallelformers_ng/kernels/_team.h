/* Threads of one process that share out the rows of a weight, or the heads of an attention.
 *
 * A step through many layers has hundreds of products of some microseconds, so there a thread that waits for the next one
 * spins. Elsewhere it sleeps, and leaves its core to torch's own threads, and products must be large enough to wake it
 * for. The team works for one caller at a time; whoever finds it at work computes alone. What a number is does not depend
 * on who computes it. */

#ifndef PARALLELFORMERS_NG_TEAM_H
#define PARALLELFORMERS_NG_TEAM_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>

#include "../collectives/_kernel_api.h"

/* A product of fewer bytes is done sooner than a thread has heard of it that spins, or sleeps. Spans begin at multiples of
 * WHOLE: tiles and blocks of rows stay whole. */
enum { MOST_THREADS = 256, WHOLE = 32, WORTH_HEARING = 16 << 10, WORTH_WAKING = 1 << 20, SPINS = 5000 };

/* Computes what lies from `first` to `end`. No two threads of a job have the same number. */
typedef void (*Part)(const void *job, size_t first, size_t end, size_t thread);

static struct {
    pthread_mutex_t at_work, door;
    pthread_cond_t called;
    size_t threads, present;       /* as many as are wanted, and as there are; the caller is one */
    size_t since[MOST_THREADS];    /* the calls that there had been when a thread began */
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

/* Without those that cannot be started the others do more. Signals are for the threads that Python knows. */
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

/* Do a job of `count` like parts, `bytes` in all, of which `whole` stay together. */
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

/* Many products follow, or are done. */
static void begin_step(void) { atomic_fetch_add(&team.in_step, 1); }
static void end_step(void) { atomic_fetch_sub(&team.in_step, 1); }

/* A forked child has the thread that forked, and no other. */
static void forget_team(void)
{
    pthread_mutex_init(&team.at_work, NULL);
    pthread_mutex_init(&team.door, NULL);
    pthread_cond_init(&team.called, NULL);
    team.present = 1;
    atomic_store(&team.asleep, 0);
    atomic_store(&team.in_step, 0);
}

/* As many threads as products may use from now on, the caller's among them. */
static void set_team(size_t threads)
{
    static int watched;
    if (!watched) watched = !pthread_atfork(NULL, NULL, forget_team);
    pthread_mutex_lock(&team.at_work);
    team.threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    pthread_mutex_unlock(&team.at_work);
}

#endif
