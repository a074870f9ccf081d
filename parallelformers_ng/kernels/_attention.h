/* Attention of new tokens over the keys and values of a cache: y = softmax(q Kᵀ · scale + mask) V.
 *
 * For a few new tokens, reading keys and values takes most of the time. The kernel reads keys and values in the cache, and
 * once for several queries: queries of consecutive tokens, and of all heads that share keys and values. No copy is made,
 * except of the values for the tile unit (`_tile_attention.h`).
 * Sums are in fp32 and begin at the first token that a query sees. The order of a sum depends neither on tokens before the
 * first one nor on other queries. */

#ifndef PARALLELFORMERS_NG_ATTENTION_H
#define PARALLELFORMERS_NG_ATTENTION_H

#include "../collectives/_floats.h"
#include "_limbs.h"
#include "_matrix.h"
#include "_pair_attention.h"
#include "_pairs.h"
#include "_queries.h"
#include "_team.h"
#include "_tile_attention.h"
#include "_vectors.h"

/* QUERIES queries use a block of TOKENS keys or values while it is in the first-level cache, HEADS queries at once. */
enum { QUERIES = 16, HEADS = 4, TOKENS = 32, COLUMNS = 2, SUMS_AT_ONCE = LANES / 2 };

typedef struct {
    const Attention *is;
    float *work, scale;
} AttentionJob;

/* Returns the number of queries to reserve working memory for, a multiple of HEADS. */
INLINE size_t max_queries(const Attention *is)
{
    const size_t queries = rounded_up(is->rows * shared_by(is), HEADS);
    return queries < QUERIES ? queries : QUERIES;
}

/* Returns the number of floats of working memory that one thread needs. */
INLINE size_t head_work(const Attention *is)
{
    const size_t own = max_queries(is) * (is->width + is->tokens + LANES + is->value_width);
    return rounded_up(larger(own, larger(pair_work(is), tile_work(is))), ALIGNED / sizeof(float));
}

#define DEFINE_ATTENTION(NAME, TYPE, LOAD)                                                                    \
    /* Computes sums of lanes `[heads, apart]` of q kᵀ for `tokens` tokens; at most SUMS_AT_ONCE sums. */     \
    INLINE void lanes_##NAME(const Attention *is, const float *q, const TYPE *k, Floats *to, size_t apart,    \
                             size_t tokens, size_t heads)                                                     \
    {                                                                                                         \
        Floats sum[SUMS_AT_ONCE] = {{0}}, a[SUMS_AT_ONCE], b;                                                 \
        size_t i = 0;                                                                                         \
        for (; i + LANES <= is->width; i += LANES) {                                                          \
            for (size_t t = 0; t < tokens; t++) LOAD(a[t], k + t * is->cached.k_token + i);                   \
            for (size_t h = 0; h < heads; h++) {                                                              \
                LOAD_F32(b, q + h * is->width + i);                                                           \
                for (size_t t = 0; t < tokens; t++) sum[h * tokens + t] += a[t] * b;                          \
            }                                                                                                 \
        }                                                                                                     \
        if (i < is->width) {                                                                                  \
            const size_t n = is->width - i;                                                                   \
            for (size_t t = 0; t < tokens; t++) LOAD_FIRST(TYPE, LOAD, a[t], k + t * is->cached.k_token + i, n); \
            for (size_t h = 0; h < heads; h++) {                                                              \
                LOAD_FIRST(float, LOAD_F32, b, q + h * is->width + i, n);                                     \
                for (size_t t = 0; t < tokens; t++) sum[h * tokens + t] += a[t] * b;                          \
            }                                                                                                 \
        }                                                                                                     \
        for (size_t h = 0; h < heads; h++)                                                                    \
            for (size_t t = 0; t < tokens; t++) to[h * apart + t] = sum[h * tokens + t];                      \
    }                                                                                                         \
    /* Computes scores s `[heads, room]` = q kᵀ. q `[heads, width]` is in fp32, and includes the scale. The lanes of \
     * LANES scores are added together. */                                                                    \
    INLINE void scores_##NAME(const Attention *is, const float *q, const TYPE *k, float *s, size_t room,      \
                              size_t tokens, size_t heads)                                                    \
    {                                                                                                         \
        const size_t row = is->cached.k_token, wide = LANES / heads, half = SUMS_AT_ONCE / heads;             \
        Floats sums[LANES];                                                                                   \
        size_t t = 0;                                                                                         \
        for (; t + wide <= tokens; t += wide, k += wide * row) {                                              \
            lanes_##NAME(is, q, k, sums, wide, half, heads);                                                  \
            lanes_##NAME(is, q, k + half * row, sums + half, wide, half, heads);                              \
            sum_lanes_of_all(sums);                                                                           \
            for (size_t h = 0; h < heads; h++)                                                                \
                memcpy(s + h * room + t, (const float *)sums + h * wide, wide * sizeof(float));               \
        }                                                                                                     \
        for (; t < tokens; t++, k += row) {                                                                   \
            lanes_##NAME(is, q, k, sums, 1, 1, heads);                                                        \
            for (size_t h = 0; h < heads; h++) s[h * room + t] = sum_lanes(&sums[h]);                         \
        }                                                                                                     \
    }                                                                                                         \
    /* Computes y `[heads, value_width]` += p v. */                                                           \
    INLINE void weigh_##NAME(const Attention *is, const float *p, const TYPE *v, float *y, size_t room,       \
                             size_t tokens, size_t heads)                                                     \
    {                                                                                                         \
        size_t i = 0;                                                                                         \
        for (; i + COLUMNS * LANES <= is->value_width; i += COLUMNS * LANES) {                                \
            Floats sum[HEADS * COLUMNS], a;                                                                   \
            for (size_t h = 0; h < heads; h++)                                                                \
                for (size_t c = 0; c < COLUMNS; c++)                                                          \
                    LOAD_F32(sum[h * COLUMNS + c], y + h * is->value_width + i + c * LANES);                  \
            for (size_t t = 0; t < tokens; t++)                                                               \
                for (size_t c = 0; c < COLUMNS; c++) {                                                        \
                    LOAD(a, v + t * is->cached.v_token + i + c * LANES);                                      \
                    for (size_t h = 0; h < heads; h++) sum[h * COLUMNS + c] += a * p[h * room + t];           \
                }                                                                                             \
            for (size_t h = 0; h < heads; h++)                                                                \
                memcpy(y + h * is->value_width + i, &sum[h * COLUMNS], COLUMNS * sizeof(Floats));             \
        }                                                                                                     \
        for (size_t n; i < is->value_width; i += n) {                                                         \
            Floats sum[HEADS], a;                                                                             \
            n = is->value_width - i < LANES ? is->value_width - i : LANES;                                    \
            for (size_t h = 0; h < heads; h++)                                                                \
                LOAD_FIRST(float, LOAD_F32, sum[h], y + h * is->value_width + i, n);                          \
            for (size_t t = 0; t < tokens; t++) {                                                             \
                LOAD_FIRST(TYPE, LOAD, a, v + t * is->cached.v_token + i, n);                                 \
                for (size_t h = 0; h < heads; h++) sum[h] += a * p[h * room + t];                             \
            }                                                                                                 \
            for (size_t h = 0; h < heads; h++)                                                                \
                memcpy(y + h * is->value_width + i, &sum[h], n * sizeof(float));                              \
        }                                                                                                     \
    }                                                                                                         \
    /* Computes the next queries of the group, up to QUERIES out of `left`. Returns how many were computed. For three \
     * queries, a fourth of zeros is computed too. */                                                         \
    CLONES static size_t attend_##NAME(const Group *g, float *work, size_t left)                              \
    {                                                                                                         \
        const Attention *is = g->is;                                                                          \
        const size_t queries = left < QUERIES ? left : QUERIES, tokens = seen_by(g, queries - 1);             \
        const size_t room = (tokens + LANES - 1) / LANES * LANES;                                             \
        const size_t most = max_queries(is), width = is->width, value_width = is->value_width;               \
        float *wide = work, *s = wide + most * width, *sums = s + most * room, total[QUERIES];                \
        memset(wide, 0, most * width * sizeof *wide);                                                         \
        memset(sums, 0, most * value_width * sizeof *sums);                                                   \
        for (size_t h = 0; h < queries; h++) {                                                                \
            const TYPE *q = (const TYPE *)is->q + row_of(g, h) * is->q_row + head_of(g, h) * is->q_head;      \
            for (size_t i = 0; i < width; i++) wide[h * width + i] = load_##NAME(q[i]) * g->scale;            \
        }                                                                                                     \
        for (size_t t = 0; t < tokens; t += TOKENS)                                                           \
            for (size_t h = 0; h < queries; h += HEADS) {                                                     \
                const size_t count = tokens - t < TOKENS ? tokens - t : TOKENS, here = queries - h;           \
                const TYPE *k = (const TYPE *)g->keys + t * is->cached.k_token;                               \
                const float *q = wide + h * width;                                                            \
                float *to = s + h * room + t;                                                                 \
                WITH_CONSTANT(here, scores_##NAME, is, q, k, to, room, count);                                \
            }                                                                                                 \
        for (size_t h = 0; h < queries; h++) {                                                                \
            masked_##NAME(g, h, s + h * room, room);                                                          \
            total[h] = exponentiate(s + h * room, room);                                                      \
        }                                                                                                     \
        for (size_t t = 0; t < tokens; t += TOKENS)                                                           \
            for (size_t h = 0; h < queries; h += HEADS) {                                                     \
                const size_t count = tokens - t < TOKENS ? tokens - t : TOKENS, here = queries - h;           \
                const TYPE *v = (const TYPE *)g->values + t * is->cached.v_token;                             \
                const float *p = s + h * room + t;                                                            \
                float *to = sums + h * value_width;                                                           \
                WITH_CONSTANT(here, weigh_##NAME, is, p, v, to, room, count);                                 \
            }                                                                                                 \
        for (size_t h = 0; h < queries; h++) {                                                                \
            TYPE *y = (TYPE *)is->y + (row_of(g, h) * is->heads + head_of(g, h)) * value_width;               \
            for (size_t i = 0; i < value_width; i++, sums++)                                                  \
                y[i] = store_##NAME(total[h] == 0 ? 0.0f : *sums / total[h]);                                 \
        }                                                                                                     \
        return queries;                                                                                       \
    }                                                                                                         \
    /* Computes the key/value heads from `first` to `end`; the numbers run through all spans. */              \
    static void part_##NAME(const void *job, size_t first, size_t end, size_t thread)                         \
    {                                                                                                         \
        const AttentionJob *of = job;                                                                         \
        const Attention *is = of->is;                                                                         \
        const Cached *c = &is->cached;                                                                        \
        float *work = of->work + thread * head_work(is);                                                      \
        const int is_bf16 = sizeof(TYPE) == sizeof(uint16_t);                                                 \
        const int in_tiles = is_bf16 && fits_tiles(is), in_pairs = is_bf16 && !in_tiles && has_pairs();       \
        for (; first < end; first++) {                                                                        \
            const Span span = span_at(is, first / is->kv_heads);                                              \
            const size_t head = first % is->kv_heads;                                                         \
            Group group = {.is = is, .span = span, .head = head, .scale = of->scale};                         \
            group.keys = (TYPE *)c->keys + span.batch * c->k_batch + head * c->k_head + span.first * c->k_token; \
            group.values = (TYPE *)c->values + span.batch * c->v_batch + head * c->v_head + span.first * c->v_token; \
            if (in_tiles) pack_values(&group, work);                                                          \
            for (size_t left = span.count * shared_by(is), done; left; left -= done, group.first += done) {   \
                if (in_tiles) done = attend_tiles(&group, work, left);                                        \
                else if (in_pairs) done = attend_pairs(&group, work, left);                                   \
                else done = attend_##NAME(&group, work, left);                                                \
            }                                                                                                 \
        }                                                                                                     \
    }                                                                                                         \
    static void attention_##NAME(const Attention *is, const float *floats, float *work)                       \
    {                                                                                                         \
        const AttentionJob job = {is, work, *floats};                                                         \
        const size_t padding = is->rows - queries_of(is);                                                     \
        if (padding) memset(is->y, 0, is->rows * is->heads * is->value_width * sizeof(TYPE));                 \
        const size_t heads = is->span_count * is->kv_heads, token = (is->width + is->value_width) * sizeof(TYPE); \
        share_out(part_##NAME, &job, heads, 1, heads * is->tokens * token);                                   \
    }

DEFINE_ATTENTION(f32, float, LOAD_F32)
DEFINE_ATTENTION(bf16, uint16_t, LOAD_BF16)

INLINE size_t attention_work_bytes(const Attention *is) { return team.threads * head_work(is) * sizeof(float); }

DEFINE_FOR_BOTH(attention, Attention, kind)

#endif
