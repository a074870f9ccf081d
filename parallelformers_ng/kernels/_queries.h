/* The arguments of attention over a cache, and the softmax of scores. */

#ifndef PARALLELFORMERS_NG_QUERIES_H
#define PARALLELFORMERS_NG_QUERIES_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../collectives/_floats.h"
#include "_vectors.h"

enum { NO_MASK = 0, BOOL_MASK = 1, ADDED_MASK = 2 };

/* Distances between rows are counted in elements of the tensor; distances in the mask, in bytes, since a mask has one of two
 * types. Last dimensions are contiguous. */

/* Keys `[batch, kv_heads, tokens, width]` and values `[batch, kv_heads, tokens, value_width]`. */
typedef struct {
    void *keys, *values;
    size_t k_batch, k_head, k_token, v_batch, v_head, v_token;
} Cached;

/* A mask `[batch, heads, tokens]`. */
typedef struct {
    const void *at;
    size_t batch, head, kind;
} Mask;

/* The last `count` tokens of a sequence of the cache, which has the tokens from `first` up to `end`. Their queries begin at
 * row `row` of q. Each query sees the tokens of the sequence up to its own. */
typedef struct {
    size_t batch, first, end, row, count;
} Span;

/* q is `[rows, heads, width]`; y is `[rows, heads, value_width]` and contiguous. Rows that belong to no span are padding, and
 * become zeros. Without spans, row `b` is one query; it sees all tokens of sequence `b` except those that the mask hides. */
typedef struct {
    const void *q;
    Cached cached;
    Mask mask;
    void *y;
    const Span *spans;
    size_t span_count; /* number of sequences if `spans` is NULL */
    size_t rows, heads, kv_heads, tokens, width, value_width, q_row, q_head, kind;
} Attention;

INLINE size_t queries_of(const Attention *is)
{
    size_t queries = is->spans ? 0 : is->rows;
    for (size_t at = 0; is->spans && at < is->span_count; at++) queries += is->spans[at].count;
    return queries;
}

INLINE Span span_at(const Attention *is, size_t at)
{
    return is->spans ? is->spans[at] : (Span){.batch = at, .end = is->tokens, .row = at, .count = 1};
}

/* Queries that use the same head of keys and values, which is read once for all of them. The order of the queries is token
 * by token, and within a token head by head. */
typedef struct {
    const Attention *is;
    Span span;
    size_t head, first; /* head of keys and values; index of the first query */
    const void *keys, *values; /* keys and values of the first token of the span */
    float scale;
} Group;

INLINE size_t shared_by(const Attention *is) { return is->heads / is->kv_heads; }
INLINE size_t row_of(const Group *g, size_t query) { return g->span.row + (g->first + query) / shared_by(g->is); }
INLINE size_t head_of(const Group *g, size_t query)
{
    return g->head * shared_by(g->is) + (g->first + query) % shared_by(g->is);
}
/* Returns the number of tokens that a query sees. */
INLINE size_t seen_by(const Group *g, size_t query)
{
    return g->span.end - g->span.first - g->span.count + (g->first + query) / shared_by(g->is) + 1;
}

/* Replaces x ≤ 0 by eˣ, and x below -87 by 0. eˣ is 2ⁿ · eʳ with n whole and |r| ≤ ln 2 / 2. eʳ is the Taylor series up to
 * r⁶ / 6!, whose relative error is below 2e-7. */
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

/* Replace scores `[tokens]` by eˢ⁻ᵐᵃˣ. Returns the sum; 0 if every token is masked. `tokens` is a multiple of LANES. */
INLINE float exponentiate(float *s, size_t tokens)
{
    Floats most, sum = {0}, x;
    float lanes[LANES], highest = -INFINITY;
    LOAD_F32(most, s);
    for (size_t t = LANES; t < tokens; t += LANES) {
        LOAD_F32(x, s + t);
        const Words larger = (Words)(x > most);
        most = (Floats)(((Words)x & larger) | ((Words)most & ~larger));
    }
    memcpy(lanes, &most, sizeof lanes);
    for (size_t lane = 0; lane < LANES; lane++) highest = lanes[lane] > highest ? lanes[lane] : highest;
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

/* Apply the mask to the scores `[room]` of a query, and set the scores of tokens that the query does not see to -∞. */
#define DEFINE_MASKED(NAME, TYPE)                                                                              \
    INLINE void masked_##NAME(const Group *g, size_t query, float *s, size_t room)                            \
    {                                                                                                         \
        const Mask *m = &g->is->mask;                                                                         \
        const char *at = (const char *)m->at + g->span.batch * m->batch + head_of(g, query) * m->head;        \
        const size_t seen = seen_by(g, query);                                                                \
        for (size_t t = 0; m->kind == ADDED_MASK && t < seen; t++) s[t] += load_##NAME(((const TYPE *)at)[t]); \
        for (size_t t = 0; m->kind == BOOL_MASK && t < seen; t++) s[t] = at[t] ? s[t] : -INFINITY;            \
        for (size_t t = seen; t < room; t++) s[t] = -INFINITY;                                                \
    }

DEFINE_MASKED(f32, float)
DEFINE_MASKED(bf16, uint16_t)

#endif
