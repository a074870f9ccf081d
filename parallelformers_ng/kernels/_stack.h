/* One decoder layer after another, sums over the ranks included:
 *
 *     a = Σ attend(x),   r = x + a,   x ← r + Σ feed(r)
 *
 * Between two layers there is nothing to wake up: what else a rank does lies in no cache any more when a layer has
 * passed through. And while a rank waits for its peers, what it will read next is on its way. */

#ifndef PARALLELFORMERS_NG_STACK_H
#define PARALLELFORMERS_NG_STACK_H

#include "../collectives/_kernel_api.h"
#include "_layer.h"

enum { NEXT_BYTES = 128 << 10 }; /* what a short wait leaves time for */

/* What stays the same from step to step. The numbers are the first of `AttentionHalf` and of `FeedHalf`. */
typedef struct {
    size_t attention[offsetof(AttentionHalf, x) / sizeof(size_t)];
    size_t feed[offsetof(FeedHalf, x) / sizeof(size_t)];
    size_t attention_is_partial, feed_is_partial; /* whether its outputs are summed over the ranks */
    float floats[4]; /* of `attend` */
    float feed_epsilon, unused;
} Layer;

/* A layer's part of `AttentionHalf`, where it keeps its tokens. */
typedef struct {
    size_t keys, values, k_batch, k_head, k_token, v_batch, v_head, v_token;
} Cached;

/* What the layers share. `x` becomes the output of the last. */
typedef struct {
    size_t x, hidden, cos, sin, cos_row, sin_row;
    size_t mask, mask_batch, mask_head, mask_kind;
    size_t rows, tokens, kind;
} Shared;

typedef struct {
    const Layer *layers;
    const Cached *caches;
    size_t count, sum_kind;
    Shared shared;
    PyObject *kernel;
    const KernelAPI *sums; /* NULL where nothing is to be summed */
} Stack;

static AttentionHalf attention_half_of(const Stack *s, size_t index, float *y)
{
    const Shared *with = &s->shared;
    AttentionHalf half = {
        .x = with->x, .y = (size_t)y, .cos = with->cos, .sin = with->sin, .cos_row = with->cos_row,
        .sin_row = with->sin_row, .mask = with->mask, .mask_batch = with->mask_batch, .mask_head = with->mask_head,
        .mask_kind = with->mask_kind, .rows = with->rows, .tokens = with->tokens, .kind = with->kind,
    };
    memcpy(&half, s->layers[index].attention, sizeof s->layers[index].attention);
    if (s->caches) memcpy(&half.keys, &s->caches[index], sizeof s->caches[index]);
    return half;
}

static FeedHalf feed_half_of(const Stack *s, size_t index, float *a, float *r, float *y)
{
    const Shared *with = &s->shared;
    FeedHalf half = {
        .x = with->x, .a = (size_t)a, .r = (size_t)r, .y = (size_t)y, .rows = with->rows, .kind = with->kind,
    };
    memcpy(&half, s->layers[index].feed, sizeof s->layers[index].feed);
    return half;
}

static size_t stack_work_bytes(const Stack *s)
{
    size_t most = 0;
    for (size_t i = 0; i < s->count; i++) {
        AttentionHalf attention = attention_half_of(s, i, NULL);
        FeedHalf feed = feed_half_of(s, i, NULL, NULL, NULL);
        size_t bytes[] = {attention_half_work_bytes(&attention), feed_half_work_bytes(&feed)};
        for (size_t half = 0; half < 2; half++) most = bytes[half] > most ? bytes[half] : most;
    }
    return most + 3 * s->shared.rows * s->shared.hidden * sizeof(float);
}

/* `y` becomes its sum over the ranks. `w` is read next, `numbers` of them. */
static int sum(const Stack *s, float *y, size_t w, size_t numbers)
{
    size_t bytes = numbers * (s->shared.kind == F32 ? sizeof(float) : sizeof(uint16_t));
    if (bytes > NEXT_BYTES) bytes = NEXT_BYTES;
    return s->sums->all_reduce(s->kernel, y, s->shared.rows * s->shared.hidden, s->sum_kind, (const void *)w, bytes);
}

static int run_layers(const Stack *s, float *work)
{
    const size_t count = s->shared.rows * s->shared.hidden;
    float *a = work, *r = a + count, *y = r + count;
    int status = 0;
    work = y + count;
    for (size_t i = 0; i < s->count; i++) {
        const Layer *layer = &s->layers[i];
        AttentionHalf attention = attention_half_of(s, i, a);
        AttentionHalf next = attention_half_of(s, i + 1 < s->count ? i + 1 : 0, NULL);
        FeedHalf fed = feed_half_of(s, i, a, r, y);

        attend(&attention, layer->floats, work);
        if (layer->attention_is_partial) status = sum(s, a, fed.wg, fed.inner * fed.g_stride);
        if (status) return status;

        feed(&fed, layer->feed_epsilon, work);
        if (layer->feed_is_partial) status = sum(s, y, next.wq, next.heads * next.width * next.q_stride);
        if (status) return status;

        if (s->shared.kind == F32) add_f32(r, y, (float *)s->shared.x, count);
        else add_bf16((uint16_t *)r, (uint16_t *)y, (uint16_t *)s->shared.x, count);
    }
    return status;
}

/* The status of the sums as a Python int, or NULL with an exception. */
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
