/* Computes attention of bf16 in the tile unit of x86 (`_tiles.h`), for up to SIDE queries at a time:
 *
 *     s = K qᵀ · scale,   p = e^(s - max),   y = p V / Σ p
 *
 * p is split into two numbers of bf16, whose sum has 16 bits, so that y is as exact as with p in fp32. V is packed into tiles once for all queries of a head of keys and values. */

#ifndef PARALLELFORMERS_NG_TILE_ATTENTION_H
#define PARALLELFORMERS_NG_TILE_ATTENTION_H

#include "../collectives/_floats.h"
#include "_matrix.h"
#include "_queries.h"
#include "_tiles.h"
#include "_vectors.h"

#if HAS_BF16_INTRINSICS

enum { VALUE_TILES = 4 }; /* tiles of columns of V that are multiplied at a time */

typedef struct {
    uint16_t *values, *q, *last_keys, *p; /* tiles of V, of qᵀ, and of p; keys of the last tokens, if they fill no tile */
    float *s, *y;                         /* scores `[SIDE, tokens]`; sums `[VALUE_TILES, SIDE, SIDE]` */
} TileWork;

INLINE int fits_tiles(const Attention *is)
{
    return has_tiles() && is->width % DEEP == 0 && is->value_width % DEEP == 0;
}

INLINE TileWork tile_work_at(const Attention *is, float *work)
{
    const size_t room = rounded_up(is->tokens, DEEP);
    TileWork at = {.values = (uint16_t *)work};
    at.q = at.values + room * is->value_width;
    at.last_keys = at.q + SIDE * is->width;
    at.p = at.last_keys + SIDE * is->width;
    at.s = (float *)(at.p + 2 * room * SIDE);
    at.y = at.s + room * SIDE;
    return at;
}

/* Returns the number of floats of working memory for a head of keys and values. */
INLINE size_t tile_work(const Attention *is)
{
    const size_t room = rounded_up(is->tokens, DEEP);
    const size_t halves = room * is->value_width + 2 * SIDE * is->width + 2 * room * SIDE;
    return fits_tiles(is) ? halves / 2 + room * SIDE + VALUE_TILES * SIDE * SIDE : 0;
}

/* Packs the values of a span into tiles `[tokens / DEEP, value_width / SIDE, DEEP / 2, SIDE, 2]`. */
TILED static void pack_values(const Group *g, float *work)
{
    const Attention *is = g->is;
    const size_t tokens = g->span.end - g->span.first, apart = is->cached.v_token;
    const uint16_t *v = g->values;
    uint16_t *to = tile_work_at(is, work).values, order[DEEP];
    for (size_t i = 0; i < DEEP; i++) order[i] = (uint16_t)(i / 2 + i % 2 * DEEP);
    const __m512i low = _mm512_loadu_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(SIDE));
    for (size_t t = 0; t < tokens; t += DEEP, to += DEEP * is->value_width)
        for (size_t pair = 0; pair < SIDE; pair++) {
            const size_t even = t + 2 * pair;
            const __mmask32 first = even < tokens ? 0xffffffff : 0, second = even + 1 < tokens ? 0xffffffff : 0;
            for (size_t c = 0; c < is->value_width; c += DEEP) {
                const __m512i a = _mm512_maskz_loadu_epi16(first, v + even * apart + c);
                const __m512i b = _mm512_maskz_loadu_epi16(second, v + (even + 1) * apart + c);
                uint16_t *tile = to + c * DEEP + pair * DEEP;
                _mm512_storeu_si512(tile, _mm512_permutex2var_epi16(a, low, b));
                _mm512_storeu_si512(tile + TILE, _mm512_permutex2var_epi16(a, high, b));
            }
        }
}

/* Computes scores s `[queries, room]` = scale · q Kᵀ. */
TILED INLINE void tile_scores(const Group *g, const TileWork *at, size_t tokens, size_t room, size_t queries)
{
    const size_t width = g->is->width, row = g->is->cached.k_token;
    const __m512 scale = _mm512_set1_ps(g->scale);
    for (size_t t = 0; t < tokens; t += SIDE) {
        const uint16_t *keys = (const uint16_t *)g->keys + t * row;
        size_t apart = row;
        __m512i scores[SIDE];
        if (tokens - t < SIDE) {
            memset(at->last_keys, 0, SIDE * width * sizeof *keys);
            for (size_t i = 0; i < tokens - t; i++) memcpy(at->last_keys + i * width, keys + i * row, width * sizeof *keys);
            keys = at->last_keys, apart = width;
        }
        SETTLE_MEMORY();
        _tile_zero(0);
        for (size_t k = 0; k < width; k += DEEP) {
            _tile_loadd(1, keys + k, apart * sizeof *keys);
            _tile_loadd(2, at->q + k * SIDE, DEEP * sizeof *keys);
            _tile_dpbf16ps(0, 1, 2);
        }
        _tile_stored(0, at->y, SIDE * sizeof(float));
#pragma GCC unroll 16
        for (size_t i = 0; i < SIDE; i++) scores[i] = _mm512_loadu_si512(at->y + i * SIDE);
        transpose(scores);
        for (size_t query = 0; query < queries; query++)
            _mm512_storeu_ps(at->s + query * room + t, _mm512_mul_ps((__m512)scores[query], scale));
    }
}

/* Rounds the weights of a query for DEEP tokens to bf16, and stores the rounding errors in the next tile. */
TILED INLINE void store_weights(__m512 first, __m512 second, uint16_t *to)
{
    const __m512i p = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    const __m512i low = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(p)), 16);
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(p, 1)), 16);
    const __m512 left = _mm512_sub_ps(second, (__m512)high);
    _mm512_storeu_si512(to, p);
    _mm512_storeu_si512(to + TILE, (__m512i)_mm512_cvtne2ps_pbh(left, _mm512_sub_ps(first, (__m512)low)));
}

/* Computes p in tiles `[tokens / DEEP, 2, SIDE, DEEP]`, and the sum of each query. Rows without a query stay as they are. */
TILED INLINE void tile_weights(const Group *g, const TileWork *at, size_t room, size_t queries, float totals[SIDE])
{
    for (size_t query = 0; query < queries; query++) {
        float *s = at->s + query * room;
        masked_bf16(g, query, s, room);
        totals[query] = exponentiate(s, room);
        for (size_t t = 0; t < room; t += DEEP)
            store_weights(_mm512_loadu_ps(s + t), _mm512_loadu_ps(s + t + SIDE), at->p + 2 * t * SIDE + query * DEEP);
    }
}

#define WEIGH_TILE(SUM, V, FROM)                       \
    do {                                               \
        _tile_loadd(V, FROM, DEEP * sizeof(uint16_t)); \
        _tile_dpbf16ps(SUM, 4, V);                     \
        _tile_dpbf16ps(SUM, 5, V);                     \
    } while (0)

/* Computes y = p V / Σ p. */
TILED INLINE void weigh_tiles(const Group *g, const TileWork *at, size_t room, size_t queries, const float totals[SIDE])
{
    const Attention *is = g->is;
    const size_t tiles = is->value_width / SIDE;
    SETTLE_MEMORY();
    for (size_t c = 0, wide; c < tiles; c += wide) {
        wide = tiles - c < VALUE_TILES ? 2 : VALUE_TILES;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (size_t t = 0; t < room; t += DEEP) {
            const uint16_t *v = at->values + t * is->value_width + c * TILE, *p = at->p + 2 * t * SIDE;
            _tile_loadd(4, p, DEEP * sizeof *v);
            _tile_loadd(5, p + TILE, DEEP * sizeof *v);
            WEIGH_TILE(0, 6, v);
            WEIGH_TILE(1, 7, v + TILE);
            if (wide < VALUE_TILES) continue;
            WEIGH_TILE(2, 6, v + 2 * TILE);
            WEIGH_TILE(3, 7, v + 3 * TILE);
        }
        _tile_stored(0, at->y, SIDE * sizeof(float));
        _tile_stored(1, at->y + SIDE * SIDE, SIDE * sizeof(float));
        _tile_stored(2, at->y + 2 * SIDE * SIDE, SIDE * sizeof(float));
        _tile_stored(3, at->y + 3 * SIDE * SIDE, SIDE * sizeof(float));
        for (size_t query = 0; query < queries; query++) {
            uint16_t *y = (uint16_t *)is->y + (row_of(g, query) * is->heads + head_of(g, query)) * is->value_width + c * SIDE;
            for (size_t tile = 0; tile < wide; tile++) {
                const __m512 sum = _mm512_loadu_ps(at->y + (tile * SIDE + query) * SIDE);
                const __m512 mean = totals[query] == 0 ? _mm512_setzero_ps() : _mm512_div_ps(sum, _mm512_set1_ps(totals[query]));
                _mm256_storeu_si256((__m256i *)(y + tile * SIDE), (__m256i)_mm512_cvtneps_pbh(mean));
            }
        }
    }
}

/* Computes the next queries of the group, out of `left` queries, with the values from `pack_values`. Returns how many were
 * computed. */
TILED static size_t attend_tiles(const Group *g, float *work, size_t left)
{
    const Attention *is = g->is;
    const TileWork at = tile_work_at(is, work);
    const size_t queries = left < SIDE ? left : SIDE, tokens = seen_by(g, queries - 1);
    const size_t room = rounded_up(tokens, DEEP);
    TileShapes shapes = {.palette = 1};
    float totals[SIDE];
    for (size_t tile = 0; tile < 8; tile++) shapes.row_bytes[tile] = DEEP * sizeof(uint16_t), shapes.rows[tile] = SIDE;
    for (size_t k = 0; k < is->width; k += DEEP) {
        __m512i pairs[SIDE];
        for (size_t query = 0; query < SIDE; query++) {
            const uint16_t *q = (const uint16_t *)is->q;
            if (query < queries) q += row_of(g, query) * is->q_row + head_of(g, query) * is->q_head + k;
            pairs[query] = _mm512_maskz_loadu_epi16(query < queries ? 0xffffffff : 0, q);
        }
        transpose(pairs);
        for (size_t pair = 0; pair < SIDE; pair++) _mm512_storeu_si512(at.q + k * SIDE + pair * DEEP, pairs[pair]);
    }
    load_shapes(&shapes);
    tile_scores(g, &at, tokens, room, queries);
    tile_weights(g, &at, room, queries, totals);
    weigh_tiles(g, &at, room, queries, totals);
    _tile_release();
    return queries;
}

#else

INLINE int fits_tiles(const Attention *is) { return (void)is, 0; }
INLINE size_t tile_work(const Attention *is) { return (void)is, 0; }
static void pack_values(const Group *g, float *work) { (void)g, (void)work; }
static size_t attend_tiles(const Group *g, float *work, size_t left) { return (void)g, (void)work, left; }

#endif
#endif
