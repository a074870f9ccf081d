/* Computes attention of bf16 on processors that multiply bf16 in pairs (`_pairs.h`). Up to MAX_SUMS queries are multiplied
 * at a time, first by tiles of keys, then by values, which are widened to fp32. */

#ifndef PARALLELFORMERS_NG_PAIR_ATTENTION_H
#define PARALLELFORMERS_NG_PAIR_ATTENTION_H

#include "../collectives/_floats.h"
#include "_pairs.h"
#include "_queries.h"
#include "_vectors.h"

/* Returns the number of floats of working memory for a group of queries: queries, scores, and sums. */
INLINE size_t pair_work(const Attention *is)
{
    return MAX_SUMS * (is->width + is->tokens + 2 * LANES + is->value_width);
}

#if HAS_BF16_INTRINSICS

/* Computes scores s `[queries, room]` = scale · q kᵀ, with q `[queries, width]`. */
PAIRED INLINE void pair_scores(const Group *g, const uint16_t *q, float *s, size_t room, size_t tokens, size_t queries)
{
    const size_t width = g->is->width, apart = g->is->cached.k_token;
    const __m512 scale = _mm512_set1_ps(g->scale);
    const uint16_t *k = g->keys;
    for (size_t t = 0, wide; t < tokens; t += wide) {
        wide = tokens - t < SUMS ? 1 : SUMS;
        const Totals totals = any_tile(q, width, k + t * apart, apart, width, queries, wide, k + (t + wide) * apart);
        float of[2][SUMS * SUMS];
        _mm512_storeu_ps(of[0], _mm512_mul_ps(totals.four, scale));
        _mm512_storeu_ps(of[1], _mm512_mul_ps(totals.two, scale));
        for (size_t r = 0; r < queries; r++)
            memcpy(s + r * room + t, of[r / SUMS] + r % SUMS * SUMS, (wide == 1 ? 1 : SUMS) * sizeof(float));
    }
}

/* Computes y `[queries, value_width]` = p v for `vectors` vectors of columns. `mask` has a bit for each column of the last. */
PAIRED INLINE void weigh_columns(const Group *g, const float *p, const uint16_t *v, float *y, size_t room, size_t tokens,
                                 size_t queries, size_t vectors, __mmask16 mask)
{
    __m512 sums[MAX_SUMS][4];
#pragma GCC unroll 6
    for (size_t r = 0; r < MAX_SUMS; r++)
#pragma GCC unroll 4
        for (size_t c = 0; c < 4; c++) sums[r][c] = _mm512_setzero_ps();
    for (size_t t = 0; t < tokens; t++, v += g->is->cached.v_token) {
        __m512 a[4];
#pragma GCC unroll 4
        for (size_t c = 0; c < vectors; c++) {
            const __m256i held = _mm256_maskz_loadu_epi16(c + 1 < vectors ? (__mmask16)0xffff : mask, v + c * LANES);
            a[c] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(held), 16));
        }
#pragma GCC unroll 6
        for (size_t r = 0; r < queries; r++) {
            const __m512 weight = _mm512_set1_ps(p[r * room + t]);
#pragma GCC unroll 4
            for (size_t c = 0; c < vectors; c++) sums[r][c] = _mm512_fmadd_ps(weight, a[c], sums[r][c]);
        }
    }
#pragma GCC unroll 6
    for (size_t r = 0; r < queries; r++)
#pragma GCC unroll 4
        for (size_t c = 0; c < vectors; c++)
            _mm512_mask_storeu_ps(y + r * g->is->value_width + c * LANES, c + 1 < vectors ? (__mmask16)0xffff : mask, sums[r][c]);
}

PAIRED INLINE void weigh_pairs(const Group *g, const float *p, float *y, size_t room, size_t tokens, size_t queries)
{
    const uint16_t *v = g->values;
    size_t left = g->is->value_width;
    for (; left >= 4 * LANES; left -= 4 * LANES, v += 4 * LANES, y += 4 * LANES)
        weigh_columns(g, p, v, y, room, tokens, queries, 4, 0xffff);
    for (; left; v += LANES, y += LANES) {
        const size_t here = left < LANES ? left : LANES;
        weigh_columns(g, p, v, y, room, tokens, queries, 1, (__mmask16)((1u << here) - 1));
        left -= here;
    }
}

PAIRED INLINE void attend_some(const Group *g, float *work, size_t queries)
{
    const Attention *is = g->is;
    const size_t width = is->width, value_width = is->value_width, tokens = seen_by(g, queries - 1);
    const size_t room = (tokens + LANES - 1) / LANES * LANES;
    uint16_t *q = (uint16_t *)work;
    float *s = work + MAX_SUMS * width, *sums = s + MAX_SUMS * room, totals[MAX_SUMS];
    for (size_t r = 0; r < queries; r++)
        memcpy(q + r * width, (const uint16_t *)is->q + row_of(g, r) * is->q_row + head_of(g, r) * is->q_head, width * sizeof *q);
    pair_scores(g, q, s, room, tokens, queries);
    for (size_t r = 0; r < queries; r++) {
        masked_bf16(g, r, s + r * room, room);
        totals[r] = exponentiate(s + r * room, room);
    }
    weigh_pairs(g, s, sums, room, tokens, queries);
    for (size_t r = 0; r < queries; r++) {
        uint16_t *y = (uint16_t *)is->y + (row_of(g, r) * is->heads + head_of(g, r)) * value_width;
        for (size_t i = 0; i < value_width; i++, sums++) y[i] = store_bf16(totals[r] == 0 ? 0.0f : *sums / totals[r]);
    }
}

/* Compute the next queries of the group, out of `left` queries. Returns how many were computed. */
PAIRED static size_t attend_pairs(const Group *g, float *work, size_t left)
{
#define ATTEND_SOME(QUERIES_) (attend_some(g, work, QUERIES_), QUERIES_)
    RETURN_FOR_ROWS(rows_of_tile(left), ATTEND_SOME)
#undef ATTEND_SOME
}

#else

static size_t attend_pairs(const Group *g, float *work, size_t left) { return (void)g, (void)work, left; }

#endif
#endif
