/* Linear layers whose weights are 8-bit integers, with a scale for each output: y = s ⊙ (x Qᵀ) + b.
 *
 * Q, `[out, in]` in rows `stride` bytes apart, is read once and in the order of memory, BLOCK bytes at a time, which are
 * LANES words of WORD integers. One integer of each word, shifted to its top, is a number 2²⁴ times as large. So the first
 * integers of all words meet every fourth number of x, the second ones the numbers next to these: x is laid out for that
 * once. WORD sums for each row of Q and of x wait for nobody, and are taken in an order that depends on `in` alone. */

#ifndef PARALLELFORMERS_NG_INTEGERS_H
#define PARALLELFORMERS_NG_INTEGERS_H

#include <stdlib.h>

#include "_vectors.h"

enum { ROWS = 4, WORD = 4, BLOCK = WORD * LANES, TOGETHER = 8, BYTES_AHEAD = 4096 };

static const float OF_TOP_BYTE = 1.0f / (1 << 24);

/* The integers at `at` of each word, 2²⁴ times as large, as floats. */
#define LOAD_INTEGERS(target, words, at)                                                                  \
    do {                                                                                                  \
        Words shifted_ = ((words) << (8 * (WORD - 1 - (at)))) & ((at) ? 0xff000000u : 0xffffffffu);       \
        target = __builtin_convertvector((Integers)shifted_, Floats);                                     \
    } while (0)

INLINE size_t rows_together(size_t left) { return left >= ROWS ? ROWS : left >= 2 ? 2 : 1; }

/* `count` rows of x into blocks of `[WORD, count, LANES]`, the last one filled up with zeros. */
INLINE void lay_out(const float *x, float *laid, size_t count, size_t in)
{
    for (size_t i = 0; i < in; i += BLOCK)
        for (size_t at = 0; at < WORD; at++)
            for (size_t r = 0; r < count; r++)
                for (size_t lane = 0; lane < LANES; lane++) {
                    const size_t from = i + lane * WORD + at;
                    *laid++ = from < in ? x[r * in + from] : 0.0f;
                }
}

/* One row of Q and `rows` rows of x, a constant where it is inlined. */
INLINE void integer_products(const float *laid, const int8_t *q, float *products, size_t in, size_t rows)
{
    Floats sum[ROWS * WORD] = {{0}}, a, b;
    int8_t end[BLOCK] = {0};
    memcpy(end, q + in / BLOCK * BLOCK, in % BLOCK);
    for (size_t i = 0; i < in; i += BLOCK) {
        Words words;
        memcpy(&words, i + BLOCK <= in ? q + i : end, sizeof words);
        __builtin_prefetch(q + i + BYTES_AHEAD, 0, 3);
#pragma GCC unroll 4
        for (size_t at = 0; at < WORD; at++) {
            LOAD_INTEGERS(a, words, at);
#pragma GCC unroll 4
            for (size_t r = 0; r < rows; r++, laid += LANES) {
                LOAD_F32(b, laid);
                sum[r * WORD + at] += a * b;
            }
        }
    }
#pragma GCC unroll 4
    for (size_t r = 0; r < rows; r++) {
        Floats total = (sum[r * WORD] + sum[r * WORD + 1]) + (sum[r * WORD + 2] + sum[r * WORD + 3]);
        products[r] = sum_lanes(&total) * OF_TOP_BYTE;
    }
}

/* Some rows of Q meet the same rows of x one after another, for as long as these are in the first-level cache. */
#define DEFINE_INTEGERS(NAME, TYPE)                                                                                  \
    INLINE void several_##NAME(const float *laid, const int8_t *q, const float *scale, const TYPE *bias, TYPE *y,    \
                               size_t in, size_t stride, size_t outs, size_t out, size_t rows)                       \
    {                                                                                                                \
        float products[ROWS];                                                                                        \
        for (size_t o = 0; o < outs; o++, q += stride) {                                                             \
            integer_products(laid, q, products, in, rows);                                                           \
            for (size_t r = 0; r < rows; r++)                                                                        \
                y[r * out + o] = store_##NAME(products[r] * scale[o] + (bias ? load_##NAME(bias[o]) : 0.0f));        \
        }                                                                                                            \
    }                                                                                                                \
    CLONES static void integers_##NAME(const float *x, const int8_t *q, const float *scale, const TYPE *bias,        \
                                       TYPE *y, size_t rows, size_t in, size_t stride, size_t out, float *laid)      \
    {                                                                                                                \
        const size_t row = (in + BLOCK - 1) / BLOCK * BLOCK;                                                         \
        for (size_t r = 0; r < rows; r += rows_together(rows - r))                                                   \
            lay_out(x + r * in, laid + r * row, rows_together(rows - r), in);                                        \
        for (size_t o = 0; o < out; o += TOGETHER) {                                                                 \
            const size_t outs = out - o < TOGETHER ? out - o : TOGETHER;                                             \
            const int8_t *from = q + o * stride;                                                                     \
            const TYPE *added = bias ? bias + o : bias;                                                              \
            for (size_t r = 0, count; r < rows; r += count) {                                                        \
                const float *of = laid + r * row;                                                                    \
                TYPE *to = y + r * out + o;                                                                          \
                count = rows_together(rows - r);                                                                     \
                if (count == ROWS) several_##NAME(of, from, scale + o, added, to, in, stride, outs, out, ROWS);      \
                else if (count == 2) several_##NAME(of, from, scale + o, added, to, in, stride, outs, out, 2);       \
                else several_##NAME(of, from, scale + o, added, to, in, stride, outs, out, 1);                       \
            }                                                                                                        \
        }                                                                                                            \
    }

DEFINE_INTEGERS(f32, float)
DEFINE_INTEGERS(bf16, uint16_t)

INLINE size_t integers_work_bytes(size_t rows, size_t in)
{
    return rows * ((in + BLOCK - 1) / BLOCK * BLOCK) * sizeof(float);
}

#endif
