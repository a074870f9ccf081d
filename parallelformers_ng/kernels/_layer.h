/* The two halves of Llama's decoder layer for one new token of each sequence, up to what is summed over the ranks:
 *
 *     attend: y = Wo · attention(rope(Wq n), rope(Wk n), Wv n),   n = norm(x)
 *     feed:   r = x + a,   y = Wd · (silu(Wg n) ⊙ Wu n),          n = norm(r)
 *
 * Rotary positions as in Su et al. 2021 (arXiv:2104.09864), halves of a head turned against each other; gated units as
 * in Shazeer 2020 (arXiv:2002.05202). Whatever the modelling code of transformers keeps in a 16-bit tensor is rounded
 * here, too. Intermediate results stay in `work`, small enough for the caches. */

#ifndef PARALLELFORMERS_NG_LAYER_H
#define PARALLELFORMERS_NG_LAYER_H

#include "_attention.h"
#include "_linear.h"

/* Addresses and sizes come as Python integers, in this order. A bias or a norm at 0 is none. */
typedef struct {
    size_t wq, bq, wk, bk, wv, bv, wo, bo;         /* weights `[out, in]` and biases `[out]` */
    size_t norm, q_norm, k_norm;                   /* their weights, `[in]` or `[width]` */
    size_t q_stride, k_stride, v_stride, o_stride; /* numbers from one row of a weight to the next */
    size_t hidden, heads, kv_heads, width;
    size_t x, y;           /* `[rows, hidden]` */
    size_t cos, sin;       /* `[rows, width]` */
    size_t cos_row, sin_row; /* the distance between their rows, 0 where all share one */
    size_t keys, values;   /* `[rows, kv_heads, tokens, width]`; the last token's are written here */
    size_t k_batch, k_head, k_token, v_batch, v_head, v_token;
    size_t mask, mask_batch, mask_head, mask_kind;
    size_t rows, tokens, kind;
} AttentionHalf;

typedef struct {
    size_t wg, bg, wu, bu, wd, bd, norm;
    size_t g_stride, u_stride, d_stride;
    size_t hidden, inner;
    size_t x, a, r, y; /* `[rows, hidden]` */
    size_t rows, kind;
} FeedHalf;

INLINE Attention attention_of(const AttentionHalf *is, float scale)
{
    return (Attention){
        .batch = is->rows, .heads = is->heads, .kv_heads = is->kv_heads, .tokens = is->tokens, .width = is->width,
        .value_width = is->width, .q_batch = is->heads * is->width, .q_head = is->width, .k_batch = is->k_batch,
        .k_head = is->k_head, .k_token = is->k_token, .v_batch = is->v_batch, .v_head = is->v_head,
        .v_token = is->v_token, .mask_batch = is->mask_batch, .mask_head = is->mask_head, .mask_kind = is->mask_kind,
        .scale = scale,
    };
}

INLINE size_t attention_half_work_bytes(const AttentionHalf *is)
{
    const Attention attention = attention_of(is, 1.0f);
    size_t q = is->heads * is->width, kv = is->kv_heads * is->width, widest = is->hidden > q ? is->hidden : q;
    return is->rows * (2 * widest + 2 * q + 2 * kv) * sizeof(float) + attention_work_bytes(&attention);
}

INLINE size_t feed_half_work_bytes(const FeedHalf *is)
{
    return is->rows * (2 * is->hidden + 3 * is->inner) * sizeof(float);
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

INLINE const float *widened_f32(const float *x, float *unused, size_t count)
{
    (void)unused, (void)count;
    return x;
}

INLINE const float *widened_bf16(const uint16_t *x, float *wide, size_t count)
{
    for (size_t i = 0; i < count; i++) wide[i] = load_bf16(x[i]);
    return wide;
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
        const TYPE *cos = (const TYPE *)is->cos, *sin = (const TYPE *)is->sin;                                        \
        TYPE *keys = (TYPE *)is->keys + (is->tokens - 1) * is->k_token;                                               \
        TYPE *values = (TYPE *)is->values + (is->tokens - 1) * is->v_token;                                           \
        const size_t width = is->width;                                                                               \
        for (size_t r = 0; r < is->rows; r++, cos += is->cos_row, sin += is->sin_row) {                               \
            rotate_##NAME(q + r * is->heads * width, cos, sin, is->heads, width);                                     \
            rotate_##NAME(k + r * is->kv_heads * width, cos, sin, is->kv_heads, width);                               \
            for (size_t h = 0; h < is->kv_heads; h++) {                                                               \
                const size_t at = (r * is->kv_heads + h) * width;                                                     \
                memcpy(keys + r * is->k_batch + h * is->k_head, k + at, width * sizeof(TYPE));                        \
                memcpy(values + r * is->v_batch + h * is->v_head, v + at, width * sizeof(TYPE));                      \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    static void attention_half_##NAME(const AttentionHalf *is, const Attention *attention, float epsilon,             \
                                      float q_epsilon, float k_epsilon, float *work)                                  \
    {                                                                                                                 \
        const size_t rows = is->rows, hidden = is->hidden, q_width = is->heads * is->width;                           \
        const size_t kv_width = is->kv_heads * is->width, widest = hidden > q_width ? hidden : q_width;               \
        float *wide = work;                                                                                           \
        TYPE *n = (TYPE *)(wide + rows * widest), *q = (TYPE *)((float *)n + rows * widest);                          \
        TYPE *k = q + rows * q_width, *v = k + rows * kv_width, *seen = v + rows * kv_width;                          \
        work = (float *)q + rows * (2 * q_width + 2 * kv_width);                                                      \
        rms_norm_##NAME((const TYPE *)is->x, (const TYPE *)is->norm, n, rows, hidden, epsilon);                       \
        const float *x = widened_##NAME(n, wide, rows * hidden);                                                      \
        linear_##NAME(x, (const TYPE *)is->wq, (const TYPE *)is->bq, q, rows, hidden, is->q_stride, q_width);         \
        linear_##NAME(x, (const TYPE *)is->wk, (const TYPE *)is->bk, k, rows, hidden, is->k_stride, kv_width);        \
        linear_##NAME(x, (const TYPE *)is->wv, (const TYPE *)is->bv, v, rows, hidden, is->v_stride, kv_width);        \
        const TYPE *q_norm = (const TYPE *)is->q_norm, *k_norm = (const TYPE *)is->k_norm;                            \
        if (q_norm) rms_norm_##NAME(q, q_norm, q, rows * is->heads, is->width, q_epsilon);                            \
        if (k_norm) rms_norm_##NAME(k, k_norm, k, rows * is->kv_heads, is->width, k_epsilon);                         \
        positioned_##NAME(is, q, k, v);                                                                               \
        attention_##NAME(attention, q, (const TYPE *)is->keys, (const TYPE *)is->values, (const char *)is->mask,      \
                         seen, work);                                                                                 \
        x = widened_##NAME(seen, wide, rows * q_width);                                                               \
        linear_##NAME(x, (const TYPE *)is->wo, (const TYPE *)is->bo, (TYPE *)is->y, rows, q_width, is->o_stride,      \
                      hidden);                                                                                        \
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
    static void feed_half_##NAME(const FeedHalf *is, float epsilon, float *work)                                      \
    {                                                                                                                 \
        const size_t rows = is->rows, hidden = is->hidden, inner = is->inner;                                         \
        float *wide = work, *gated = wide + rows * hidden;                                                            \
        TYPE *n = (TYPE *)(gated + rows * inner), *g = (TYPE *)((float *)n + rows * hidden);                          \
        TYPE *u = g + rows * inner;                                                                                   \
        TYPE *r = (TYPE *)is->r;                                                                                      \
        add_##NAME((const TYPE *)is->x, (const TYPE *)is->a, r, rows * hidden);                                       \
        rms_norm_##NAME(r, (const TYPE *)is->norm, n, rows, hidden, epsilon);                                         \
        const float *x = widened_##NAME(n, wide, rows * hidden);                                                      \
        linear_##NAME(x, (const TYPE *)is->wg, (const TYPE *)is->bg, g, rows, hidden, is->g_stride, inner);           \
        linear_##NAME(x, (const TYPE *)is->wu, (const TYPE *)is->bu, u, rows, hidden, is->u_stride, inner);           \
        gated_##NAME(g, u, gated, rows * inner);                                                                      \
        linear_##NAME(gated, (const TYPE *)is->wd, (const TYPE *)is->bd, (TYPE *)is->y, rows, inner, is->d_stride,    \
                      hidden);                                                                                        \
    }

DEFINE_LAYER(f32, float, LOAD_F32)
DEFINE_LAYER(bf16, uint16_t, LOAD_BF16)

enum { F32 = 0, BF16 = 1 };

/* `floats`: the epsilons of the norms, 0 for one that is not there, and the scale of the scores. */
static void attend(const AttentionHalf *is, const float *floats, float *work)
{
    const Attention attention = attention_of(is, floats[3]);
    if (is->kind == F32) attention_half_f32(is, &attention, floats[0], floats[1], floats[2], work);
    else attention_half_bf16(is, &attention, floats[0], floats[1], floats[2], work);
}

static void feed(const FeedHalf *is, float epsilon, float *work)
{
    if (is->kind == F32) feed_half_f32(is, epsilon, work);
    else feed_half_bf16(is, epsilon, work);
}

#endif
