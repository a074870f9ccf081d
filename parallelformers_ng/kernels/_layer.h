/* Computes the two halves of Llama's decoder layer for new tokens, without the sums over the ranks:
 *
 *     attention: y = Wo · attention(rope(Wq n), rope(Wk n), Wv n),   n = norm(x)
 *     feed:      r = x + a,   y = Wd · (silu(Wg n) ⊙ Wu n),          n = norm(r)
 *
 * Rotary positions follow Su et al. 2021 (arXiv:2104.09864): number i of a head rotates with number i + width / 2. Gated
 * units follow Shazeer 2020 (arXiv:2002.05202). Results that the modelling code of transformers stores in a 16-bit tensor
 * are rounded here, too. Intermediate results are in `work`, and small enough for the processor's caches. */

#ifndef PARALLELFORMERS_NG_LAYER_H
#define PARALLELFORMERS_NG_LAYER_H

#include "../collectives/_floats.h"
#include "_attention.h"
#include "_integers.h"
#include "_limbs.h"
#include "_linear.h"
#include "_matrix.h"
#include "_vectors.h"

/* The weights of each half. A missing norm has address 0. */
typedef struct {
    Matrix q, k, v, o;
    const void *norm, *q_norm, *k_norm; /* weights of the norms, `[hidden]` or `[width]` */
    size_t hidden, heads, kv_heads, width;
} AttentionWeights;

typedef struct {
    Matrix gate, up, down;
    const void *norm;
    size_t hidden, inner;
} FeedWeights;

/* The arguments that all layers of a step share. A step has `queries` new tokens for each sequence of the cache: the last
 * tokens of the sequence. Spans may divide a sequence of the cache into several sequences. */
typedef struct {
    const void *cos, *sin; /* `[sequences, queries, width]`; a batch distance is 0 if sequences share positions */
    size_t cos_batch, sin_batch, cos_row, sin_row;
    Mask mask;
    const Span *spans;
    size_t span_count, queries, rows, tokens, kind;
} Step;

typedef struct {
    AttentionWeights weights;
    Cached cached; /* gets the keys and values of the new tokens */
    const void *x; /* x and y, and the arrays of `FeedHalf`, are `[rows, hidden]` */
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
        .q = q, .cached = is->cached, .mask = s->mask, .y = y, .spans = s->spans, .span_count = s->span_count,
        .rows = s->rows, .heads = w->heads, .kv_heads = w->kv_heads, .tokens = s->tokens, .width = w->width, .value_width = w->width,
        .q_row = w->heads * w->width, .q_head = w->width, .kind = s->kind,
    };
}

/* Halves of the same layer, for tokens over different caches: `x` and `y` of the first half have the rows of all halves. */
typedef struct {
    const AttentionHalf *halves;
    size_t count;
} AttentionHalves;

INLINE size_t rows_of(AttentionHalves all)
{
    size_t rows = 0;
    for (size_t i = 0; i < all.count; i++) rows += all.halves[i].step.rows;
    return rows;
}

INLINE size_t attention_halves_work_bytes(AttentionHalves all)
{
    const AttentionWeights *w = &all.halves->weights;
    const size_t rows = rows_of(all), q = w->heads * w->width, kv = w->kv_heads * w->width;
    const size_t own = rounded_up(rows * (w->hidden + 2 * q + 2 * kv) * sizeof(float), ALIGNED);
    size_t most = integers_work_bytes(rows, larger(w->hidden, q), larger(w->hidden, q));
    for (size_t i = 0; i < all.count; i++) {
        const Attention attention = attention_of(all.halves + i, NULL, NULL);
        most = larger(most, attention_work_bytes(&attention));
    }
    return own + larger(input_work_bytes(rows, w->hidden), input_work_bytes(rows, q)) + most;
}

INLINE size_t attention_half_work_bytes(const AttentionHalf *is) { return attention_halves_work_bytes((AttentionHalves){is, 1}); }

INLINE size_t feed_half_work_bytes(const FeedHalf *is)
{
    const size_t rows = is->rows, hidden = is->weights.hidden, inner = is->weights.inner, widest = larger(hidden, inner);
    const size_t own = rounded_up(rows * (hidden + 2 * inner) * sizeof(float), ALIGNED);
    return own + larger(input_work_bytes(rows, hidden), input_work_bytes(rows, inner)) + integers_work_bytes(rows, widest, widest);
}

/* Computes silu(g) = g / (1 + e⁻ᵍ) from e^-|g|, which cannot overflow. */
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
    /* Rotates x `[heads, width]` in place. */                                                                        \
    INLINE void rotate_##NAME(TYPE *x, const TYPE *cos, const TYPE *sin, size_t heads, size_t width)                  \
    {                                                                                                                 \
        const size_t half = width / 2;                                                                                \
        for (; heads; heads--, x += width) {                                                                          \
            size_t i = 0, j = half;                                                                                   \
            for (; i + LANES <= half; i += LANES, j += LANES) {                                                       \
                Floats a, b, c, d, e, f;                                                                              \
                LOAD(a, x + i);                                                                                       \
                LOAD(b, x + j);                                                                                       \
                LOAD(c, cos + i);                                                                                     \
                LOAD(d, cos + j);                                                                                     \
                LOAD(e, sin + i);                                                                                     \
                LOAD(f, sin + j);                                                                                     \
                c *= a, d *= b, e *= b, f *= a;                                                                       \
                round_##NAME(&c), round_##NAME(&d), round_##NAME(&e), round_##NAME(&f);                               \
                c -= e, d += f;                                                                                       \
                store_vector_##NAME(&c, x + i);                                                                       \
                store_vector_##NAME(&d, x + j);                                                                       \
            }                                                                                                         \
            for (; i < half; i++, j++) {                                                                              \
                float a = load_##NAME(x[i]), b = load_##NAME(x[j]);                                                   \
                x[i] = store_##NAME(rounded_##NAME(a * load_##NAME(cos[i])) -                                         \
                                    rounded_##NAME(b * load_##NAME(sin[i])));                                         \
                x[j] = store_##NAME(rounded_##NAME(b * load_##NAME(cos[j])) +                                         \
                                    rounded_##NAME(a * load_##NAME(sin[j])));                                         \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    CLONES static void positioned_##NAME(const AttentionHalf *is, TYPE *q, TYPE *k, const TYPE *v)                    \
    {                                                                                                                 \
        const size_t width = is->weights.width, heads = is->weights.heads, kv_heads = is->weights.kv_heads;           \
        const Cached *to = &is->cached;                                                                               \
        const Step *s = &is->step;                                                                                    \
        for (size_t r = 0; r < s->rows; r++) {                                                                        \
            const size_t b = r / s->queries, i = r % s->queries, token = s->tokens - s->queries + i;                  \
            const TYPE *cos = (const TYPE *)s->cos + b * s->cos_batch + i * s->cos_row;                               \
            const TYPE *sin = (const TYPE *)s->sin + b * s->sin_batch + i * s->sin_row;                               \
            TYPE *keys = (TYPE *)to->keys + b * to->k_batch + token * to->k_token;                                    \
            TYPE *values = (TYPE *)to->values + b * to->v_batch + token * to->v_token;                                \
            rotate_##NAME(q + r * heads * width, cos, sin, heads, width);                                             \
            rotate_##NAME(k + r * kv_heads * width, cos, sin, kv_heads, width);                                       \
            for (size_t h = 0; h < kv_heads; h++) {                                                                   \
                const size_t at = (r * kv_heads + h) * width;                                                         \
                memcpy(keys + h * to->k_head, k + at, width * sizeof(TYPE));                                          \
                memcpy(values + h * to->v_head, v + at, width * sizeof(TYPE));                                        \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    static void attention_halves_##NAME(AttentionHalves all, const float *floats, float *work)                        \
    {                                                                                                                 \
        const AttentionHalf *is = all.halves;                                                                         \
        const AttentionWeights *w = &is->weights;                                                                     \
        const size_t rows = rows_of(all), hidden = w->hidden, q_width = w->heads * w->width;                          \
        const size_t kv_width = w->kv_heads * w->width;                                                               \
        TYPE *n = (TYPE *)work, *q = (TYPE *)(work + rows * hidden), *k = q + rows * q_width;                         \
        TYPE *v = k + rows * kv_width, *seen = v + rows * kv_width;                                                   \
        work += rounded_up(rows * (hidden + 2 * q_width + 2 * kv_width), ALIGNED / sizeof *work);                     \
        Input x = {.x = n, .rows = rows, .in = hidden, .work = (char *)work};                                         \
        Input y = {.x = seen, .rows = rows, .in = q_width, .work = (char *)work};                                     \
        work = (float *)(x.work + larger(input_work_bytes(rows, hidden), input_work_bytes(rows, q_width)));           \
        rms_norm_##NAME(is->x, w->norm, n, rows, hidden, floats[0]);                                                  \
        matrix_##NAME(&x, &w->q, q, q_width, work);                                                                   \
        matrix_##NAME(&x, &w->k, k, kv_width, work);                                                                  \
        matrix_##NAME(&x, &w->v, v, kv_width, work);                                                                  \
        if (w->q_norm) rms_norm_##NAME(q, w->q_norm, q, rows * w->heads, w->width, floats[1]);                        \
        if (w->k_norm) rms_norm_##NAME(k, w->k_norm, k, rows * w->kv_heads, w->width, floats[2]);                     \
        for (size_t i = 0, r = 0; i < all.count; r += is[i].step.rows, i++) {                                         \
            const Attention attention = attention_of(is + i, q + r * q_width, seen + r * q_width);                    \
            positioned_##NAME(is + i, q + r * q_width, k + r * kv_width, v + r * kv_width);                           \
            attention_##NAME(&attention, floats + 3, work);                                                           \
        }                                                                                                             \
        matrix_##NAME(&y, &w->o, is->y, hidden, work);                                                                \
    }                                                                                                                 \
    CLONES static void add_##NAME(const TYPE *x, const TYPE *a, TYPE *r, size_t count)                                \
    {                                                                                                                 \
        Floats b, c;                                                                                                  \
        size_t i = 0;                                                                                                 \
        for (; i + LANES <= count; i += LANES) {                                                                      \
            LOAD(b, x + i);                                                                                           \
            LOAD(c, a + i);                                                                                           \
            b += c;                                                                                                   \
            store_vector_##NAME(&b, r + i);                                                                           \
        }                                                                                                             \
        for (; i < count; i++) r[i] = store_##NAME(load_##NAME(x[i]) + load_##NAME(a[i]));                            \
    }                                                                                                                 \
    INLINE void gate_##NAME(TYPE *g, const TYPE *u)                                                                   \
    {                                                                                                                 \
        Floats a, b;                                                                                                  \
        LOAD(a, g);                                                                                                   \
        LOAD(b, u);                                                                                                   \
        silu(&a);                                                                                                     \
        round_##NAME(&a);                                                                                             \
        a *= b;                                                                                                       \
        store_vector_##NAME(&a, g);                                                                                   \
    }                                                                                                                 \
    /* Computes g ← silu(g) ⊙ u. */                                                                                   \
    CLONES static void gated_##NAME(TYPE *g, const TYPE *u, size_t count)                                             \
    {                                                                                                                 \
        for (; count >= LANES; count -= LANES, g += LANES, u += LANES) gate_##NAME(g, u);                             \
        TYPE ends[2 * LANES] = {0};                                                                                   \
        memcpy(ends, g, count * sizeof(TYPE)), memcpy(ends + LANES, u, count * sizeof(TYPE));                         \
        gate_##NAME(ends, ends + LANES);                                                                              \
        memcpy(g, ends, count * sizeof(TYPE));                                                                        \
    }                                                                                                                 \
    static void feed_half_##NAME(const FeedHalf *is, const float *epsilon, float *work)                               \
    {                                                                                                                 \
        const FeedWeights *w = &is->weights;                                                                          \
        const size_t rows = is->rows, hidden = w->hidden, inner = w->inner;                                           \
        TYPE *n = (TYPE *)work, *g = (TYPE *)(work + rows * hidden), *u = g + rows * inner;                           \
        work += rounded_up(rows * (hidden + 2 * inner), ALIGNED / sizeof *work);                                      \
        Input x = {.x = n, .rows = rows, .in = hidden, .work = (char *)work};                                         \
        Input y = {.x = g, .rows = rows, .in = inner, .work = (char *)work};                                          \
        work = (float *)(x.work + larger(input_work_bytes(rows, hidden), input_work_bytes(rows, inner)));             \
        add_##NAME(is->x, is->a, is->r, rows * hidden);                                                               \
        rms_norm_##NAME(is->r, w->norm, n, rows, hidden, *epsilon);                                                   \
        matrix_##NAME(&x, &w->gate, g, inner, work);                                                                  \
        matrix_##NAME(&x, &w->up, u, inner, work);                                                                    \
        gated_##NAME(g, u, rows * inner);                                                                             \
        matrix_##NAME(&y, &w->down, is->y, hidden, work);                                                             \
    }

DEFINE_LAYER(f32, float, LOAD_F32)
DEFINE_LAYER(bf16, uint16_t, LOAD_BF16)

/* `floats` has the epsilons of the norms, 0 for a missing norm, and for attention the scale of the scores. */
static void attention_halves(AttentionHalves all, const float *floats, float *work)
{
    (all.halves->step.kind == F32 ? attention_halves_f32 : attention_halves_bf16)(all, floats, work);
}

static void attention_half(const AttentionHalf *is, const float *floats, float *work)
{
    attention_halves((AttentionHalves){is, 1}, floats, work);
}

DEFINE_FOR_BOTH(feed_half, FeedHalf, kind)

#endif
