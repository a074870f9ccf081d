/* Runs one decoder layer after another, sums over the ranks included:
 *
 *     a = Σ attend(x),   r = x + a,   x ← r + Σ feed(r)
 *
 * No Python code runs between two layers. Such code would be slow after a layer, because the weights of the layer have
 * displaced it from the processor's caches. While a rank waits for its peers, it prefetches weights that it reads next. */

#ifndef PARALLELFORMERS_NG_STACK_H
#define PARALLELFORMERS_NG_STACK_H

#include "../collectives/_kernel_api.h"
#include "_attention.h"
#include "_layer.h"
#include "_linear.h"
#include "_matrix.h"
#include "_team.h"
#include "_vectors.h"

/* Most bytes that a rank prefetches during a wait: half of a second-level cache of 2 MB. Ranks with fewer heads wait long
 * enough for all of them (`fill_waits` of sharding/partition.py). */
enum { NEXT_BYTES = 1 << 20 };

/* Arguments of a layer that are the same in every step. */
typedef struct {
    AttentionWeights attention;
    FeedWeights feed;
    size_t attention_is_partial, feed_is_partial; /* whether the half's outputs are summed over the ranks */
    float floats[4];                              /* floats of `attention_half` */
    float feed_epsilon, unused;
} Layer;

enum { MAX_STEPS = 16 };

typedef struct {
    const Layer *layers;
    size_t count, sum_kind, steps; /* numbers of layers, and of steps that run together */
    void *x;                       /* input of the first layer; becomes the output of the last layer */
    Step step[MAX_STEPS];         /* the rows of x are the rows of all steps, in order */
    const Cached *caches[MAX_STEPS]; /* of each step, one for each layer */
    PyObject *kernel;
    const KernelAPI *sums; /* NULL if no outputs are summed over the ranks */
} Stack;

INLINE size_t rows_of_stack(const Stack *s)
{
    size_t rows = 0;
    for (size_t i = 0; i < s->steps; i++) rows += s->step[i].rows;
    return rows;
}

static size_t stack_work_bytes(const Stack *s)
{
    size_t most = 0, rows = rows_of_stack(s);
    for (const Layer *layer = s->layers; layer < s->layers + s->count; layer++) {
        AttentionHalf halves[MAX_STEPS];
        for (size_t i = 0; i < s->steps; i++) halves[i] = (AttentionHalf){.weights = layer->attention, .step = s->step[i]};
        const FeedHalf feed = {.weights = layer->feed, .rows = rows};
        most = larger(most, attention_halves_work_bytes((AttentionHalves){halves, s->steps}));
        most = larger(most, feed_half_work_bytes(&feed));
    }
    return most + 3 * rows * s->layers->attention.hidden * sizeof(float);
}

/* Replaces `count` numbers at `y` by their sums over the ranks. Meanwhile prefetches `next`, a matrix with `out` rows. */
static int sum(const Stack *s, float *y, size_t count, const Matrix *next, size_t out)
{
    const size_t bytes = matrix_bytes(next, out, s->step->kind);
    return s->sums->all_reduce(s->kernel, y, count, s->sum_kind, next->w, bytes < NEXT_BYTES ? bytes : NEXT_BYTES);
}

static int run_layers(const Stack *s, float *work)
{
    const size_t rows = rows_of_stack(s), kind = s->step->kind, count = rows * s->layers->attention.hidden;
    void *x = s->x;
    float *a = work, *r = a + count, *y = r + count;
    int status = 0;
    work = y + count;
    begin_step();
    for (size_t i = 0; i < s->count; i++) {
        const Layer *layer = &s->layers[i];
        const FeedHalf feed = {layer->feed, x, a, r, y, rows, kind};
        const AttentionWeights *next = &s->layers[i + 1 < s->count ? i + 1 : 0].attention;

        AttentionHalf halves[MAX_STEPS];
        for (size_t j = 0; j < s->steps; j++)
            halves[j] = (AttentionHalf){layer->attention, s->caches[j][i], x, a, s->step[j]};

        attention_halves((AttentionHalves){halves, s->steps}, layer->floats, work);
        if (layer->attention_is_partial) status = sum(s, a, count, &layer->feed.gate, layer->feed.inner);
        if (status) break;

        feed_half(&feed, &layer->feed_epsilon, work);
        if (layer->feed_is_partial) status = sum(s, y, count, &next->q, next->heads * next->width);
        if (status) break;

        if (kind == F32) add_f32(r, y, x, count);
        else add_bf16((uint16_t *)r, (uint16_t *)y, x, count);
    }
    end_step();
    return status;
}

/* Runs all layers. Returns the status of the sums as a Python int, or NULL with an exception. */
static PyObject *run_stack(const Stack *s, float *work)
{
    int status;
    if (s->sums) return s->sums->enter(s->kernel) < 0 ? NULL : s->sums->leave(s->kernel, run_layers(s, work));
    Py_BEGIN_ALLOW_THREADS
    status = run_layers(s, work);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

#endif
