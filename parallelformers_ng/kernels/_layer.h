/* The two halves of Llama's decoder layer for one new token of each sequence, up to what is summed over the ranks:
 *
 *     attention: y = Wo · attention(rope(Wq n), rope(Wk n), Wv n),   n = norm(x)
 *     feed:      r = x + a,   y = Wd · (silu(Wg n) ⊙ Wu n),          n = norm(r)
 *
 * Rotary positions as in Su et al. 2021 (arXiv:2104.09864), halves of a head turned against each other; gated units as
 * in Shazeer 2020 (arXiv:2002.05202). Whatever the modelling code of transformers keeps in a 16-bit tensor is rounded
 * here, too. Intermediate results stay in `work`, small enough for the caches. */

#ifndef PARALLELFORMERS_NG_LAYER_H
#define PARALLELFORMERS_NG_LAYER_H

#include "../collectives/_floats.h"
#include "_attention.h"
#include "_integers.h"
#include "_linear.h"
#include "_matrix.h"
#include "_vectors.h"

/* The weights of each half. A norm at 0 is none. */
typedef struct {
    Matrix q, k, v, o;
    const void *norm, *q_norm, *k_norm; /* their weights, `[in]` or `[width]` */
    size_t hidden, heads, kv_heads, width;
} AttentionWeights;

typedef struct {
    Matrix gate, up, down;
    const void *norm;
    size_t hidden, inner;
} FeedWeights;

/* What all layers of a step share. */
typedef struct {
    const void *cos, *sin;   /* `[rows, width]` */
    size_t cos_row, sin_row; /* the distance between their rows, 0 where all share one */
    Mask mask;
    size_t rows, tokens, kind;
} Step;

typedef struct {
    AttentionWeights weights;
    Cached cached; /* the last token's keys and values are written there */
    const void *x; /* `[rows, hidden]`, as all that follow */
    void *y;
    Step step;
} AttentionHalf;

typedef struct {
    FeedWeights weights;
    const void *x, *a;
    void *r, *y;
    size_t rows, kind;
} FeedHalf;

INLINE Attention attention_of(const AttentionHalf *is, const void *q, void *y)
{
    const AttentionWeights *w = &is->weights;
    const Step *s = &is->step;
    return (Attention){
        .q = q, .cached = is->cached, .mask = s->mask, .y = y, .batch = s->rows, .heads = w->heads,
        .kv_heads = w->kv_heads, .tokens = s->tokens, .width = w->width, .value_width = w->width,
        .q_batch = w->heads * w->width, .q_head = w->width, .kind = s->kind,
    };
}

INLINE size_t attention_half_work_bytes(const AttentionHalf *is)
{
    const AttentionWeights *w = &is->weights;
    const Attention attention = attention_of(is, NULL, NULL);
    size_t q = w->heads * w->width, kv = w->kv_heads * w->width, widest = w->hidden > q ? w->hidden : q;
    const size_t rows = is->step.rows, own = rows * (2 * widest + 2 * q + 2 * kv) * sizeof(float);
    const size_t seen = attention_work_bytes(&attention), laid = integers_work_bytes(rows, widest, widest);
    return own + (seen > laid ? seen : laid);
}

INLINE size_t feed_half_work_bytes(const FeedHalf *is)
{
    const size_t hidden = is->weights.hidden, inner = is->weights.inner, widest = hidden > inner ? hidden : inner;
    return is->rows * (2 * hidden + 3 * inner) * sizeof(float) + integers_work_bytes(is->rows, widest, widest);
}

/* silu(g) = g / (1 + e⁻ᵍ), by way of e^-|g|, which cannot overflow. */
INLINE void silu(Floats *g)
{
    Words negative = (Words)(*g < 0.0f);
    Floats e = (Floats)((Words)*g | 0x80000000u);
    exponentials(&e);
    Words one = (Words)(Floats){1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    *g = *g * (Floats)(((Words)e & negative) | (one & ~negative)) / (e + 1.0f);
}

#define DEFINE_LAYER(NAME, TYPE, LOAD)                                                                                \
    INLINE float rounded_##NAME(float value) { return load_##NAME(store_##NAME(value)); }                             \
    /* x `[heads, width]`, in place. */                                                                               \
    INLINE void rotate_##NAME(TYPE *x, const TYPE *cos, const TYPE *sin, size_t heads, size_t width)                  \
    {                                                                                                                 \
        const size_t half = width / 2;                                                                                \
        for (; heads; heads--, x += width)                                                                            \
            for (size_t i = 0, j = half; i < half; i++, j++) {                                                        \
                float a = load_##NAME(x[i]), b = load_##NAME(x[j]);                                                   \
                x[i] = store_##NAME(rounded_##NAME(a * load_##NAME(cos[i])) -                                         \
                                    rounded_##NAME(b * load_##NAME(sin[i])));                                         \
                x[j] = store_##NAME(rounded_##NAME(b * load_##NAME(cos[j])) +                                         \
                                    rounded_##NAME(a * load_##NAME(sin[j])));                                         \
            }                                                                                                         \
    }                                                                                                                 \
    CLONES static void positioned_##NAME(const AttentionHalf *is, TYPE *q, TYPE *k, const TYPE *v)                    \
    {                                                                                                                 \
        const size_t width = is->weights.width, heads = is->weights.heads, kv_heads = is->weights.kv_heads;           \
        const Cached *to = &is->cached;                                                                               \
        const TYPE *cos = is->step.cos, *sin = is->step.sin;                                                          \
        TYPE *keys = (TYPE *)to->keys + (is->step.tokens - 1) * to->k_token;                                          \
        TYPE *values = (TYPE *)to->values + (is->step.tokens - 1) * to->v_token;                                      \
        for (size_t r = 0; r < is->step.rows; r++, cos += is->step.cos_row, sin += is->step.sin_row) {                \
            rotate_##NAME(q + r * heads * width, cos, sin, heads, width);                                             \
            rotate_##NAME(k + r * kv_heads * width, cos, sin, kv_heads, width);                                       \
            for (size_t h = 0; h < kv_heads; h++) {                                                                   \
                const size_t at = (r * kv_heads + h) * width;                                                         \
                memcpy(keys + r * to->k_batch + h * to->k_head, k + at, width * sizeof(TYPE));                        \
                memcpy(values + r * to->v_batch + h * to->v_head, v + at, width * sizeof(TYPE));                      \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    static void attention_half_##NAME(const AttentionHalf *is, const float *floats, float *work)                      \
    {                                                                                                                 \
        const AttentionWeights *w = &is->weights;                                                                     \
        const size_t rows = is->step.rows, hidden = w->hidden, q_width = w->heads * w->width;                         \
        const size_t kv_width = w->kv_heads * w->width, widest = hidden > q_width ? hidden : q_width;                 \
        float *wide = work;                                                                                           \
        TYPE *n = (TYPE *)(wide + rows * widest), *q = (TYPE *)((float *)n + rows * widest);                          \
        TYPE *k = q + rows * q_width, *v = k + rows * kv_width, *seen = v + rows * kv_width;                          \
        work = (float *)q + rows * (2 * q_width + 2 * kv_width);                                                      \
        rms_norm_##NAME(is->x, w->norm, n, rows, hidden, floats[0]);                                                  \
        const float *x = widened_##NAME(n, wide, rows * hidden);                                                      \
        matrix_##NAME(x, &w->q, q, rows, hidden, q_width, work);                                                      \
        matrix_##NAME(x, &w->k, k, rows, hidden, kv_width, work);                                                     \
        matrix_##NAME(x, &w->v, v, rows, hidden, kv_width, work);                                                     \
        if (w->q_norm) rms_norm_##NAME(q, w->q_norm, q, rows * w->heads, w->width, floats[1]);                        \
        if (w->k_norm) rms_norm_##NAME(k, w->k_norm, k, rows * w->kv_heads, w->width, floats[2]);                     \
        positioned_##NAME(is, q, k, v);                                                                               \
        const Attention attention = attention_of(is, q, seen);                                                        \
        attention_##NAME(&attention, floats + 3, work);                                                               \
        x = widened_##NAME(seen, wide, rows * q_width);                                                               \
        matrix_##NAME(x, &w->o, is->y, rows, q_width, hidden, work);                                                  \
    }                                                                                                                 \
    CLONES static void add_##NAME(const TYPE *x, const TYPE *a, TYPE *r, size_t count)                                \
    {                                                                                                                 \
        for (size_t i = 0; i < count; i++) r[i] = store_##NAME(load_##NAME(x[i]) + load_##NAME(a[i]));                \
    }                                                                                                                 \
    /* g ← silu(g) ⊙ u, widened. */                                                                                   \
    CLONES static void gated_##NAME(const TYPE *g, const TYPE *u, float *y, size_t count)                             \
    {                                                                                                                 \
        Floats a, b;                                                                                                  \
        size_t i = 0;                                                                                                 \
        for (; i < count; i += LANES) {                                                                               \
            size_t n = count - i < LANES ? count - i : LANES;                                                         \
            TYPE ends[2 * LANES] = {0};                                                                               \
            memcpy(ends, g + i, n * sizeof(TYPE)), memcpy(ends + LANES, u + i, n * sizeof(TYPE));                     \
            LOAD(a, ends);                                                                                            \
            LOAD(b, ends + LANES);                                                                                    \
            silu(&a);                                                                                                 \
            for (size_t j = 0; j < n; j++) y[i + j] = rounded_##NAME(rounded_##NAME(a[j]) * b[j]);                    \
        }                                                                                                             \
    }                                                                                                                 \
    static void feed_half_##NAME(const FeedHalf *is, const float *epsilon, float *work)                               \
    {                                                                                                                 \
        const FeedWeights *w = &is->weights;                                                                          \
        const size_t rows = is->rows, hidden = w->hidden, inner = w->inner;                                           \
        float *wide = work, *gated = wide + rows * hidden;                                                            \
        TYPE *n = (TYPE *)(gated + rows * inner), *g = (TYPE *)((float *)n + rows * hidden), *u = g + rows * inner;   \
        work = (float *)g + rows * 2 * inner;                                                                         \
        add_##NAME(is->x, is->a, is->r, rows * hidden);                                                               \
        rms_norm_##NAME(is->r, w->norm, n, rows, hidden, *epsilon);                                                   \
        const float *x = widened_##NAME(n, wide, rows * hidden);                                                      \
        matrix_##NAME(x, &w->gate, g, rows, hidden, inner, work);                                                     \
        matrix_##NAME(x, &w->up, u, rows, hidden, inner, work);                                                       \
        gated_##NAME(g, u, gated, rows * inner);                                                                      \
        matrix_##NAME(gated, &w->down, is->y, rows, inner, hidden, work);                                             \
    }

DEFINE_LAYER(f32, float, LOAD_F32)
DEFINE_LAYER(bf16, uint16_t, LOAD_BF16)

/* `floats`: the epsilons of the norms, 0 for one that is not there, and the scale of the scores. */
DEFINE_FOR_BOTH(attention_half, AttentionHalf, step.kind)
DEFINE_FOR_BOTH(feed_half, FeedHalf, kind)

#endif
