/* Computes products of bf16 in vectors of AVX-512, whose instruction takes the numbers in pairs (`vdpbf16ps`):
 *
 *     y = x Wᵀ
 *
 * The instruction reads x and W where they are in memory: no number is packed or widened first. Lane l of a sum takes the
 * numbers 2l and 2l + 1 of each 32, in their order; a tree adds the lanes. So a sum depends on `in` alone, and not on the
 * number of rows and outputs that are computed with it. Up to MAX_SUMS times SUMS sums stay in registers, enough to hide
 * the latency of the instruction.
 *
 * For several rows of x, a block of W stays in the second-level cache. Each tile of the block is prefetched into the first
 * level while the tile before it is multiplied. For one row of x, the processor's own prefetcher is fastest alone. */

#ifndef PARALLELFORMERS_NG_PAIRS_H
#define PARALLELFORMERS_NG_PAIRS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../collectives/_floats.h"
#include "_vectors.h"

enum { MAX_SUMS = 6, SUMS = 4, DOZEN = 32, BLOCK_BYTES = 256 << 10 };

#if HAS_BF16_INTRINSICS

#define PAIRED __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

static int has_pairs(void)
{
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

PAIRED INLINE __m512bh loaded_pairs(const uint16_t *from) { return (__m512bh)_mm512_loadu_si512(from); }
PAIRED INLINE __m512bh first_pairs(const uint16_t *from, size_t count)
{
    return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), from);
}

/* Add the halves, quarters or eighths of each of two vectors; the results are side by side in one vector. */
#define MEET_IN_BLOCKS(A, B) _mm512_add_ps(_mm512_shuffle_f32x4(A, B, 0x88), _mm512_shuffle_f32x4(A, B, 0xdd))
#define MEET_IN_HALVES(A, B)                                                                        \
    _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(A), _mm512_castps_pd(B))),   \
                  _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(A), _mm512_castps_pd(B))))
#define MEET_IN_PAIRS(A, B) _mm512_add_ps(_mm512_shuffle_ps(A, B, 0x88), _mm512_shuffle_ps(A, B, 0xdd))

/* Add the lanes of each of 16 sums. The total of `sums[o][r]` is in lane 4 r + o. */
PAIRED INLINE __m512 meet(__m512 sums[SUMS][MAX_SUMS], size_t first)
{
    __m512 of[SUMS];
    const __m512 none = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (size_t o = 0; o < SUMS; o++) {
        const __m512 low = MEET_IN_BLOCKS(sums[o][first], sums[o][first + 1]);
        of[o] = first ? MEET_IN_BLOCKS(low, none) : MEET_IN_BLOCKS(low, MEET_IN_BLOCKS(sums[o][2], sums[o][3]));
    }
    return MEET_IN_PAIRS(MEET_IN_HALVES(of[0], of[1]), MEET_IN_HALVES(of[2], of[3]));
}

typedef struct {
    __m512 four, two; /* totals of the first four rows of x, and of the next two; lane 4 r + o */
} Totals;

/* Multiply `outs` rows of W (distance `stride`) by `rows` rows of x (distance `apart`); both counts are constants after
 * inlining. Prefetch `outs` rows of W from `next` on into the first-level cache. */
PAIRED INLINE Totals tile_of_pairs(const uint16_t *x, size_t apart, const uint16_t *w, size_t stride, size_t in, size_t rows,
                                   size_t outs, const uint16_t *next)
{
    __m512 sums[SUMS][MAX_SUMS];
    __m512bh a[SUMS];
    size_t i = 0;
#pragma GCC unroll 4
    for (size_t o = 0; o < SUMS; o++)
#pragma GCC unroll 6
        for (size_t r = 0; r < MAX_SUMS; r++) sums[o][r] = _mm512_setzero_ps();
    for (; i + DOZEN <= in; i += DOZEN) {
#pragma GCC unroll 4
        for (size_t o = 0; o < outs; o++) __builtin_prefetch(next + o * stride + i, 0, 3);
#pragma GCC unroll 4
        for (size_t o = 0; o < outs; o++) a[o] = loaded_pairs(w + o * stride + i);
#pragma GCC unroll 6
        for (size_t r = 0; r < rows; r++) {
            const __m512bh b = loaded_pairs(x + r * apart + i);
#pragma GCC unroll 4
            for (size_t o = 0; o < outs; o++) sums[o][r] = _mm512_dpbf16_ps(sums[o][r], a[o], b);
        }
    }
    if (i < in) {
#pragma GCC unroll 4
        for (size_t o = 0; o < outs; o++) a[o] = first_pairs(w + o * stride + i, in - i);
#pragma GCC unroll 6
        for (size_t r = 0; r < rows; r++) {
            const __m512bh b = first_pairs(x + r * apart + i, in - i);
#pragma GCC unroll 4
            for (size_t o = 0; o < outs; o++) sums[o][r] = _mm512_dpbf16_ps(sums[o][r], a[o], b);
        }
    }
    return (Totals){meet(sums, 0), rows > 4 ? meet(sums, 4) : _mm512_setzero_ps()};
}

/* Returns CALL(n) for n = ROWS_, with n as a constant, so that the compiler keeps the sums of the rows in registers. */
#define RETURN_FOR_ROWS(ROWS_, CALL) \
    switch (ROWS_) {                 \
    case 6: return CALL(6);          \
    case 5: return CALL(5);          \
    case 4: return CALL(4);          \
    case 3: return CALL(3);          \
    case 2: return CALL(2);          \
    default: return CALL(1);         \
    }

/* Multiply a tile of 1 or SUMS outputs and of up to MAX_SUMS rows. */
PAIRED INLINE Totals any_tile(const uint16_t *x, size_t apart, const uint16_t *w, size_t stride, size_t in, size_t rows,
                              size_t outs, const uint16_t *next)
{
#define TILE_OF(ROWS_) outs == 1 ? tile_of_pairs(x, apart, w, stride, in, ROWS_, 1, next) : tile_of_pairs(x, apart, w, stride, in, ROWS_, SUMS, next)
    RETURN_FOR_ROWS(rows, TILE_OF)
#undef TILE_OF
}

/* Rows in the next tile, out of `left` rows. 7 and 8 rows are divided into two tiles of at least 3 rows. */
INLINE size_t rows_of_tile(size_t left) { return left > 8 ? 6 : left > 6 ? 4 : left; }

/* Multiply one row of x by up to 16 rows of W, row by row. The product of row o is in lane o. */
PAIRED INLINE __m512 dots_of_pairs(const uint16_t *x, const uint16_t *w, size_t stride, size_t in, size_t outs)
{
    __m512 sums[SUMS][MAX_SUMS];
    for (size_t o = 0; o < SUMS * SUMS; o++, w += stride) {
        __m512 sum = _mm512_setzero_ps();
        size_t i = 0;
        if (o < outs) {
            for (; i + DOZEN <= in; i += DOZEN) sum = _mm512_dpbf16_ps(sum, loaded_pairs(w + i), loaded_pairs(x + i));
            if (i < in) sum = _mm512_dpbf16_ps(sum, first_pairs(w + i, in - i), first_pairs(x + i, in - i));
        }
        sums[o % SUMS][o / SUMS] = sum;
    }
    return meet(sums, 0);
}

/* Add the bias, round, and store lane r * `width` + o in column o of row r of y (distance `out`). The `width` biases repeat. */
PAIRED INLINE void store_totals(__m512 totals, __m512 bias, uint16_t *y, size_t out, size_t rows, size_t outs, size_t width)
{
    uint16_t narrow[SUMS * SUMS];
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(totals, bias));
    memcpy(narrow, &rounded, sizeof narrow);
    for (size_t r = 0; r < rows; r++) memcpy(y + r * out, narrow + r * width, outs * sizeof *y);
}

PAIRED INLINE __m512 biases_of(const uint16_t *bias, size_t outs)
{
    if (!bias) return _mm512_setzero_ps();
    const __m256i held = _mm256_maskz_loadu_epi16((__mmask16)((1u << outs) - 1), bias);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(held), 16));
}

/* Multiplies x by `outs` rows of W, and writes `outs` columns of y, whose rows are `out` apart. */
PAIRED static void linear_pairs(const uint16_t *x, const uint16_t *w, const uint16_t *bias, uint16_t *y, size_t rows,
                                size_t in, size_t stride, size_t out, size_t outs)
{
    for (size_t o = 0; rows == 1 && o < outs; o += SUMS * SUMS) {
        const size_t here = outs - o < SUMS * SUMS ? outs - o : SUMS * SUMS;
        const __m512 totals = dots_of_pairs(x, w + o * stride, stride, in, here);
        store_totals(totals, biases_of(bias ? bias + o : NULL, here), y + o, out, 1, here, SUMS * SUMS);
    }
    if (rows == 1) return;
    size_t block = BLOCK_BYTES / (in * sizeof *w) / SUMS * SUMS;
    if (block < SUMS) block = SUMS;
    for (size_t first = 0; first < outs; first += block) {
        const size_t end = outs - first < block ? outs : first + block;
        for (size_t r = 0, many; r < rows; r += many) {
            many = rows_of_tile(rows - r);
            for (size_t o = first, wide; o < end; o += wide) {
                wide = end - o < SUMS ? 1 : SUMS;
                const uint16_t *from = w + o * stride, *next = o + wide < end ? from + wide * stride : w + first * stride;
                const Totals totals = any_tile(x + r * in, in, from, stride, in, many, wide, next);
                const __m512 biases = _mm512_broadcast_f32x4(_mm512_castps512_ps128(biases_of(bias ? bias + o : NULL, wide)));
                uint16_t *to = y + r * out + o;
                if (wide == SUMS) store_totals(totals.four, biases, to, out, many < 4 ? many : 4, SUMS, SUMS);
                else store_totals(totals.four, biases, to, out, many < 4 ? many : 4, 1, SUMS);
                if (many > 4 && wide == SUMS) store_totals(totals.two, biases, to + 4 * out, out, many - 4, SUMS, SUMS);
                else if (many > 4) store_totals(totals.two, biases, to + 4 * out, out, many - 4, 1, SUMS);
            }
        }
    }
}

#else

static int has_pairs(void) { return 0; }
#define linear_pairs(...) ((void)0) /* never runs, because `has_pairs` is 0 */

#endif
#endif
