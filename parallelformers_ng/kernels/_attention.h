/* Attention of one query token for each sequence: y = softmax(q Kᵀ · scale + mask) V.
 *
 * It is bound by the speed at which keys and values are read: each is read once for all query heads that share it (up to
 * HEADS at a time), where it lies in the cache. Sums are taken in fp32, in an order that depends on the sizes alone. */

#ifndef PARALLELFORMERS_NG_ATTENTION_H
#define PARALLELFORMERS_NG_ATTENTION_H

#include <math.h>

#include "../collectives/_floats.h"
#include "_team.h"
#include "_vectors.h"

enum { HEADS = 4, TOKENS = 32, COLUMNS = 2 };
enum { NO_MASK = 0, BOOL_MASK = 1, ADDED_MASK = 2 };

/* Distances between rows are in numbers of the tensor's type, those of the mask, which has one of two types, in bytes; the
 * last dimensions are dense. */

/* Keys `[batch, kv_heads, tokens, width]` and values `[batch, kv_heads, tokens, value_width]`. */
typedef struct {
    void *keys, *values;
    size_t k_batch, k_head, k_token, v_batch, v_head, v_token;
} Cached;

/* `[batch, heads, tokens]`. */
typedef struct {
    const void *at;
    size_t batch, head, kind;
} Mask;

/* q is `[batch, heads, width]`, y `[batch, heads, value_width]` and contiguous. */
typedef struct {
    const void *q;
    Cached cached;
    Mask mask;
    void *y;
    size_t batch, heads, kv_heads, tokens, width, value_width, q_batch, q_head, kind;
} Attention;

typedef struct {
    const Attention *is;
    float *work, scale;
} AttentionJob;

/* Numbers that a thread needs. */
INLINE size_t head_work(const Attention *is) { return HEADS * (is->width + is->tokens + LANES + is->value_width); }

/* eˣ for x ≤ 0, 0 below -87: 2ⁿ · eʳ with n whole and |r| ≤ ln 2 / 2, the latter by its Taylor series to r⁶ / 6!, whose
 * remainder is below 2e-7 of it. */
INLINE void exponentials(Floats *x)
{
    const float log2_e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f, to_whole = 12582912.0f;
    Words zero = (Words)(*x < -87.0f);
    Floats n = *x * log2_e + to_whole;
    n -= to_whole;
    Floats r = *x - n * ln2_high - n * ln2_low;
    Floats e = r * (1.0f / 720) + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r + 1.0f;
    e = e * r + 1.0f;
    Words power = (Words)((__builtin_convertvector(n, Integers) + 127) << 23);
    Floats scaled = e * (Floats)power;
    *x = (Floats)((Words)scaled & ~zero);
}

/* Scores `[tokens]` to eˢ⁻ᵐᵃˣ. Returns their sum, 0 where every token is masked. `tokens` is a multiple of LANES. */
INLINE float exponentiate(float *s, size_t tokens)
{
    float highest = -INFINITY;
    for (size_t t = 0; t < tokens; t++) highest = s[t] > highest ? s[t] : highest;
    Floats sum = {0}, x;
    if (highest == -INFINITY) highest = 0.0f;
    for (size_t t = 0; t < tokens; t += LANES) {
        LOAD_F32(x, s + t);
        x -= highest;
        exponentials(&x);
        memcpy(s + t, &x, sizeof x);
        sum += x;
    }
    return sum_lanes(&sum);
}

#define DEFINE_ATTENTION(NAME, TYPE, LOAD)                                                                    \
    /* s `[heads, room]` from q `[heads, width]` in fp32, scaled. */                                          \
    INLINE void scores_##NAME(const Attention *is, const float *q, const TYPE *k, float *s, size_t room,      \
                              size_t heads)                                                                   \
    {                                                                                                         \
        for (size_t t = 0; t < is->tokens; t++, k += is->cached.k_token) {                                    \
            Floats sum[HEADS] = {{0}}, a, b;                                                                  \
            size_t i = 0;                                                                                     \
            for (; i + LANES <= is->width; i += LANES) {                                                      \
                LOAD(a, k + i);                                                                               \
                for (size_t h = 0; h < heads; h++) {                                                          \
                    LOAD_F32(b, q + h * is->width + i);                                                       \
                    sum[h] += a * b;                                                                          \
                }                                                                                             \
            }                                                                                                 \
            for (size_t h = 0; h < heads; h++) {                                                              \
                float total = sum_lanes(&sum[h]);                                                             \
                for (size_t j = i; j < is->width; j++) total += load_##NAME(k[j]) * q[h * is->width + j];     \
                s[h * room + t] = total;                                                                      \
            }                                                                                                 \
        }                                                                                                     \
    }                                                                                                         \
    INLINE void mask_##NAME(const Attention *is, const void *mask, float *s)                                  \
    {                                                                                                         \
        const TYPE *added = mask;                                                                             \
        const uint8_t *seen = mask;                                                                           \
        if (is->mask.kind == ADDED_MASK)                                                                      \
            for (size_t t = 0; t < is->tokens; t++) s[t] += load_##NAME(added[t]);                            \
        else                                                                                                  \
            for (size_t t = 0; t < is->tokens; t++) s[t] = seen[t] ? s[t] : -INFINITY;                        \
    }                                                                                                         \
    /* y `[heads, value_width]` += p v, in blocks of tokens that stay in the first-level cache. */            \
    INLINE void weigh_##NAME(const Attention *is, const float *p, const TYPE *v, float *y, size_t room,       \
                             size_t heads)                                                                    \
    {                                                                                                         \
        for (size_t start = 0; start < is->tokens; start += TOKENS) {                                         \
            size_t stop = start + TOKENS < is->tokens ? start + TOKENS : is->tokens, i = 0;                   \
            for (; i + COLUMNS * LANES <= is->value_width; i += COLUMNS * LANES) {                            \
                Floats sum[HEADS * COLUMNS], a;                                                               \
                for (size_t h = 0; h < heads; h++)                                                            \
                    for (size_t c = 0; c < COLUMNS; c++)                                                      \
                        LOAD_F32(sum[h * COLUMNS + c], y + h * is->value_width + i + c * LANES);              \
                for (size_t t = start; t < stop; t++)                                                         \
                    for (size_t c = 0; c < COLUMNS; c++) {                                                    \
                        LOAD(a, v + t * is->cached.v_token + i + c * LANES);                                  \
                        for (size_t h = 0; h < heads; h++) sum[h * COLUMNS + c] += a * p[h * room + t];       \
                    }                                                                                         \
                for (size_t h = 0; h < heads; h++)                                                            \
                    memcpy(y + h * is->value_width + i, &sum[h * COLUMNS], COLUMNS * sizeof(Floats));         \
            }                                                                                                 \
            for (size_t t = start; t < stop; t++)                                                             \
                for (size_t j = i; j < is->value_width; j++)                                                  \
                    for (size_t h = 0; h < heads; h++)                                                        \
                        y[h * is->value_width + j] += p[h * room + t] * load_##NAME(v[t * is->cached.v_token + j]); \
        }                                                                                                     \
    }                                                                                                         \
    INLINE void attend_##NAME(const Attention *is, const TYPE *q, const TYPE *k, const TYPE *v,               \
                              const char *mask, TYPE *y, float scale, float *work, size_t heads)              \
    {                                                                                                         \
        size_t room = (is->tokens + LANES - 1) / LANES * LANES;                                               \
        float *wide = work, *s = wide + HEADS * is->width, *sums = s + HEADS * room, total[HEADS];            \
        for (size_t h = 0; h < heads; h++)                                                                    \
            for (size_t i = 0; i < is->width; i++)                                                            \
                wide[h * is->width + i] = load_##NAME(q[h * is->q_head + i]) * scale;                         \
        scores_##NAME(is, wide, k, s, room, heads);                                                           \
        for (size_t h = 0; h < heads; h++) {                                                                  \
            if (is->mask.kind) mask_##NAME(is, mask + h * is->mask.head, s + h * room);                       \
            for (size_t t = is->tokens; t < room; t++) s[h * room + t] = -INFINITY;                           \
            total[h] = exponentiate(s + h * room, room);                                                      \
        }                                                                                                     \
        memset(sums, 0, heads * is->value_width * sizeof(float));                                             \
        weigh_##NAME(is, s, v, sums, room, heads);                                                            \
        for (size_t h = 0; h < heads; h++)                                                                    \
            for (size_t i = 0; i < is->value_width; i++, sums++)                                              \
                y[h * is->value_width + i] = store_##NAME(total[h] == 0 ? 0.0f : *sums / total[h]);           \
    }                                                                                                         \
    /* Heads of keys and values from `first` to `end`, those of all sequences counted. */                    \
    CLONES static void heads_##NAME(const Attention *is, float scale, float *work, size_t first, size_t end)  \
    {                                                                                                         \
        const size_t shared = is->heads / is->kv_heads;                                                       \
        const Cached *c = &is->cached;                                                                        \
        for (; first < end; first++) {                                                                        \
            const size_t b = first / is->kv_heads, start = first % is->kv_heads * shared;                     \
            for (size_t head = start, count; head < start + shared; head += count) {                          \
                size_t left = start + shared - head;                                                          \
                const TYPE *q = (const TYPE *)is->q + b * is->q_batch + head * is->q_head;                    \
                const TYPE *k = (const TYPE *)c->keys + b * c->k_batch + head / shared * c->k_head;           \
                const TYPE *v = (const TYPE *)c->values + b * c->v_batch + head / shared * c->v_head;         \
                const char *mask = (const char *)is->mask.at + b * is->mask.batch + head * is->mask.head;     \
                TYPE *y = (TYPE *)is->y + (b * is->heads + head) * is->value_width;                           \
                count = left >= HEADS ? HEADS : left >= 2 ? 2 : 1;                                            \
                if (count == HEADS) attend_##NAME(is, q, k, v, mask, y, scale, work, HEADS);                  \
                else if (count == 2) attend_##NAME(is, q, k, v, mask, y, scale, work, 2);                     \
                else attend_##NAME(is, q, k, v, mask, y, scale, work, 1);                                     \
            }                                                                                                 \
        }                                                                                                     \
    }                                                                                                         \
    static void part_##NAME(const void *job, size_t first, size_t end, size_t thread)                         \
    {                                                                                                         \
        const AttentionJob *of = job;                                                                         \
        heads_##NAME(of->is, of->scale, of->work + thread * head_work(of->is), first, end);                   \
    }                                                                                                         \
    static void attention_##NAME(const Attention *is, const float *floats, float *work)                       \
    {                                                                                                         \
        const AttentionJob job = {is, work, *floats};                                                         \
        const size_t heads = is->batch * is->kv_heads, token = (is->width + is->value_width) * sizeof(TYPE);  \
        share_out(part_##NAME, &job, heads, 1, heads * is->tokens * token);                                   \
    }

DEFINE_ATTENTION(f32, float, LOAD_F32)
DEFINE_ATTENTION(bf16, uint16_t, LOAD_BF16)

INLINE size_t attention_work_bytes(const Attention *is) { return team.threads * head_work(is) * sizeof(float); }

DEFINE_FOR_BOTH(attention, Attention, kind)

#endif
