/* Computes linear layers for a few rows of input, and root-mean-square norms.
 *
 * Linear: y = x Wᵀ + b.
 * Reading W takes most of the time. W, `[out, in]`, may be a slice of a wider matrix: its rows are `stride` numbers apart.
 * W is read once, in the order of memory. Several rows at a time would be several streams of memory, which the processor's
 * own prefetcher follows badly.
 *
 * For one row of x, the processor's prefetcher is fastest alone, with two exceptions. First, it stops at the end of a page:
 * for short rows of fp32, the kernel prefetches the beginning of a page some pages ahead. Second, x in fp32 is twice as large
 * as a row of bf16: if the rows are long, x stays in the first-level cache only if W is prefetched past the second level.
 *
 * For several rows of x, the kernel multiplies tiles of OUTS rows of W. The sums are in registers, and the next tile is
 * prefetched into the second-level cache. For bf16, the tile unit of x86 (`_tiles.h`) and vector products of bf16
 * (`_pairs.h`) are faster, if the processor has them.
 *
 * Weights may be integers with scales, which `_integers.h` multiplies.
 *
 * Norm (Zhang & Sennrich 2019, arXiv:1910.07467): y = w ⊙ x / √(ε + ‖x‖² / n), in one call and two passes over a row in the
 * first-level cache; torch needs seven operators. A 16-bit row is rounded before and after the multiplication by w, as in
 * the modelling code of transformers.
 *
 * Sums are in fp32, in an order that depends on `in` alone. So equal inputs give equal bits on every rank, whatever other
 * rows are computed in the same call.
 */

#ifndef PARALLELFORMERS_NG_LINEAR_H
#define PARALLELFORMERS_NG_LINEAR_H

#include <math.h>

#include "../collectives/_floats.h"
#include "_integers.h"
#include "_matrix.h"
#include "_pairs.h"
#include "_team.h"
#include "_tiles.h"
#include "_vectors.h"

enum { OUTS = 4, CACHE_LINE_BYTES = 64, PAGE_BYTES = 4096, HEAD_LINES = 4, AHEAD_PAGES = 4, NARROW = 2048 };
enum { PASSING = 0, SECOND_LEVEL = 2 }; /* cache levels of a prefetch */

/* A tile is the product of `outs` rows of W and `rows` rows of x; both are constants after inlining. The sums of a tile fit
 * the registers, so each loaded number is used several times. Only the first tile of a block of W waits for memory, so this
 * tile prefetches the rows of W from `next` on. `x` is fp32 for any type of W. */
#define DEFINE_OPERATORS(NAME, TYPE, LOAD)                                                                     \
    INLINE void tile_##NAME(const float *x, const TYPE *w, const TYPE *bias, TYPE *y, size_t in,              \
                            size_t stride, size_t out, size_t outs, size_t rows, const TYPE *next)            \
    {                                                                                                         \
        const size_t step = CACHE_LINE_BYTES / sizeof(TYPE);                                                  \
        Floats sum[OUTS * ROWS] = {{0}}, a[OUTS], b;                                                          \
        size_t i = 0, cursor = 0;                                                                             \
        for (; i + LANES <= in; i += LANES) {                                                                 \
            if (next && i % step == 0)                                                                        \
                for (size_t o = 0; o < outs; o++) {                                                           \
                    __builtin_prefetch(next + cursor, 0, SECOND_LEVEL);                                       \
                    cursor += step;                                                                           \
                    if (cursor >= in) next += stride, cursor = 0;                                             \
                }                                                                                             \
            for (size_t o = 0; o < outs; o++) LOAD(a[o], w + o * stride + i);                                 \
            for (size_t r = 0; r < rows; r++) {                                                               \
                LOAD_F32(b, x + r * in + i);                                                                  \
                for (size_t o = 0; o < outs; o++) sum[o * ROWS + r] += a[o] * b;                              \
            }                                                                                                 \
        }                                                                                                     \
        if (i < in)                                                                                           \
            for (size_t o = 0; o < outs; o++) LOAD_FIRST(TYPE, LOAD, a[o], w + o * stride + i, in - i);       \
        for (size_t r = 0; i < in && r < rows; r++) {                                                         \
            LOAD_FIRST(float, LOAD_F32, b, x + r * in + i, in - i);                                           \
            for (size_t o = 0; o < outs; o++) sum[o * ROWS + r] += a[o] * b;                                  \
        }                                                                                                     \
        sum_lanes_of_all(sum);                                                                                \
        for (size_t o = 0; o < outs; o++)                                                                     \
            for (size_t r = 0; r < rows; r++)                                                                 \
                y[r * out + o] = store_##NAME(sum[0][o * ROWS + r] + (bias ? load_##NAME(bias[o]) : 0.0f));   \
    }                                                                                                         \
    INLINE void tiles_##NAME(const float *x, const TYPE *w, const TYPE *bias, TYPE *y, size_t rows, size_t in,\
                             size_t stride, size_t out, size_t outs)                                          \
    {                                                                                                         \
        const TYPE *next = w + outs * stride;                                                                 \
        size_t r = 0;                                                                                         \
        for (; r + ROWS <= rows; r += ROWS, next = NULL)                                                      \
            tile_##NAME(x + r * in, w, bias, y + r * out, in, stride, out, outs, ROWS, next);                 \
        for (; r + 2 <= rows; r += 2, next = NULL)                                                            \
            tile_##NAME(x + r * in, w, bias, y + r * out, in, stride, out, outs, 2, next);                    \
        if (r < rows) tile_##NAME(x + r * in, w, bias, y + r * out, in, stride, out, outs, 1, next);          \
    }                                                                                                         \
    /* Multiplies a row of W by a row of x. If `passing`, prefetches W a page ahead, past level 2. */         \
    INLINE float dot_##NAME(const float *x, const TYPE *w, size_t in, size_t stride, int passing)             \
    {                                                                                                         \
        const size_t page = PAGE_BYTES / sizeof(TYPE), line = CACHE_LINE_BYTES / sizeof(TYPE);                \
        Floats sum = {0}, a, b;                                                                               \
        size_t i = 0;                                                                                         \
        for (; i + LANES <= in; i += LANES) {                                                                 \
            if (passing && i % line == 0)                                                                     \
                __builtin_prefetch(w + i + page + (i + page < in ? 0 : stride - in), 0, PASSING);             \
            LOAD(a, w + i);                                                                                   \
            LOAD_F32(b, x + i);                                                                               \
            sum += a * b;                                                                                     \
        }                                                                                                     \
        if (i < in) {                                                                                         \
            LOAD_FIRST(TYPE, LOAD, a, w + i, in - i);                                                         \
            LOAD_FIRST(float, LOAD_F32, b, x + i, in - i);                                                    \
            sum += a * b;                                                                                     \
        }                                                                                                     \
        return sum_lanes(&sum);                                                                               \
    }                                                                                                         \
    INLINE void dots_##NAME(const float *x, const TYPE *w, const TYPE *bias, TYPE *y, size_t in,              \
                            size_t stride, size_t out, int heads, int passing)                                \
    {                                                                                                         \
        const size_t page = PAGE_BYTES / sizeof(TYPE), line = CACHE_LINE_BYTES / sizeof(TYPE);                \
        const size_t ahead = AHEAD_PAGES * page / in * stride + AHEAD_PAGES * page % in;                      \
        for (size_t o = 0; o < out; o++, w += stride) {                                                       \
            for (size_t i = 0; heads && i < in; i += page)                                                    \
                for (size_t j = 0; j < HEAD_LINES; j++)                                                       \
                    __builtin_prefetch(w + ahead + i + j * line, 0, SECOND_LEVEL);                            \
            y[o] = store_##NAME(dot_##NAME(x, w, in, stride, passing) + (bias ? load_##NAME(bias[o]) : 0.0f));\
        }                                                                                                     \
    }                                                                                                         \
    /* Multiplies x by `outs` rows of W, and writes `outs` columns of y (distance of rows: `out`). */         \
    CLONES static void vectors_##NAME(const float *x, const TYPE *w, const TYPE *bias, TYPE *y, size_t rows,   \
                                      size_t in, size_t stride, size_t out, size_t outs)                      \
    {                                                                                                         \
        if (rows == 1) {                                                                                      \
            if (in > NARROW) dots_##NAME(x, w, bias, y, in, stride, outs, 0, sizeof(TYPE) < sizeof(float));   \
            else dots_##NAME(x, w, bias, y, in, stride, outs, sizeof(TYPE) == sizeof(float), 0);              \
            return;                                                                                           \
        }                                                                                                     \
        size_t o = 0;                                                                                         \
        for (; o + OUTS <= outs; o += OUTS)                                                                   \
            tiles_##NAME(x, w + o * stride, bias ? bias + o : bias, y + o, rows, in, stride, out, OUTS);      \
        for (; o < outs; o++)                                                                                 \
            tiles_##NAME(x, w + o * stride, bias ? bias + o : bias, y + o, rows, in, stride, out, 1);         \
    }                                                                                                         \
    CLONES static void rms_norm_##NAME(const TYPE *x, const TYPE *w, TYPE *y, size_t rows, size_t width,      \
                                       float epsilon)                                                         \
    {                                                                                                         \
        for (size_t r = 0; r < rows; r++, x += width, y += width) {                                           \
            Floats sum[2] = {{0}, {0}}, a;                                                                    \
            size_t i = 0;                                                                                     \
            for (; i + 2 * LANES <= width; i += 2 * LANES)                                                    \
                for (size_t j = 0; j < 2; j++) {                                                              \
                    LOAD(a, x + i + j * LANES);                                                               \
                    sum[j] += a * a;                                                                          \
                }                                                                                             \
            sum[0] += sum[1];                                                                                 \
            float total = sum_lanes(&sum[0]);                                                                 \
            for (; i < width; i++) total += load_##NAME(x[i]) * load_##NAME(x[i]);                            \
            float scale = 1.0f / sqrtf(total / (float)width + epsilon);                                       \
            for (i = 0; i + LANES <= width; i += LANES) {                                                     \
                Floats b;                                                                                     \
                LOAD(a, x + i);                                                                               \
                LOAD(b, w + i);                                                                               \
                a *= scale;                                                                                   \
                round_##NAME(&a);                                                                             \
                b *= a;                                                                                       \
                store_vector_##NAME(&b, y + i);                                                               \
            }                                                                                                 \
            for (; i < width; i++)                                                                            \
                y[i] = store_##NAME(load_##NAME(w[i]) * load_##NAME(store_##NAME(load_##NAME(x[i]) * scale)));\
        }                                                                                                     \
    }

DEFINE_OPERATORS(f32, float, LOAD_F32)
DEFINE_OPERATORS(bf16, uint16_t, LOAD_BF16)

/* Bytes and addresses of the forms of x in `work`: see `Input`. */
INLINE size_t wide_bytes(size_t rows, size_t in) { return rounded_up(rows * in * sizeof(float), ALIGNED); }
INLINE size_t tiled_bytes(size_t rows, size_t in) { return rounded_up(tiles_work_bytes(rows, in, team.threads), ALIGNED); }
INLINE size_t input_work_bytes(size_t rows, size_t in)
{
    return wide_bytes(rows, in) + tiled_bytes(rows, in) + rounded_up(met_bytes(rows, in), ALIGNED);
}
INLINE char *met_by_integers(const Input *is) { return is->work + wide_bytes(is->rows, is->in) + tiled_bytes(is->rows, is->in); }

INLINE const float *widened_f32(Input *is) { return is->x; }

INLINE const float *widened_bf16(Input *is)
{
    const uint16_t *x = is->x;
    float *wide = (float *)is->work;
    for (size_t i = 0; !is->is_wide && i < is->rows * is->in; i++) wide[i] = load_bf16(x[i]);
    is->is_wide = 1;
    return wide;
}

INLINE uint16_t *tiled(Input *is)
{
    uint16_t *tiles = (uint16_t *)(is->work + wide_bytes(is->rows, is->in));
    if (!is->is_tiled) pack_tiles(is->x, tiles, is->rows, is->in);
    is->is_tiled = 1;
    return tiles;
}

/* Returns the bytes of a matrix in memory. */
INLINE size_t matrix_bytes(const Matrix *m, size_t out, size_t kind)
{
    return out * m->stride * (m->scale ? sizeof(int8_t) : kind == F32 ? sizeof(float) : sizeof(uint16_t));
}

typedef struct {
    const Input *input;
    const float *wide; /* forms of x; NULL if the product does not use the form */
    uint16_t *tiles;
    const Matrix *m;
    void *y;
    size_t out;
} Product;

static void product_f32(const void *job, size_t first, size_t end, size_t thread)
{
    const Product *is = job;
    const float *w = is->m->w, *bias = is->m->bias;
    (void)thread;
    vectors_f32(is->wide, w + first * is->m->stride, bias ? bias + first : bias, (float *)is->y + first, is->input->rows,
                is->input->in, is->m->stride, is->out, end - first);
}

static void product_bf16(const void *job, size_t first, size_t end, size_t thread)
{
    const Product *is = job;
    const size_t rows = is->input->rows, in = is->input->in, stride = is->m->stride;
    const uint16_t *w = (const uint16_t *)is->m->w + first * stride, *bias = is->m->bias;
    uint16_t *y = (uint16_t *)is->y + first;
    bias = bias ? bias + first : bias;
    if (is->tiles) linear_tiles(is->tiles, thread, w, bias, y, rows, in, stride, is->out, end - first);
    else if (is->wide) vectors_bf16(is->wide, w, bias, y, rows, in, stride, is->out, end - first);
    else linear_pairs(is->input->x, w, bias, y, rows, in, stride, is->out, end - first);
}

/* Computes y `[rows, out]`. bf16 uses the tile unit, or products in pairs. A single row does, too, so that the sums of a row
 * do not depend on other rows. For integers, `work` has `integers_work_bytes` bytes. */
#define DEFINE_MATRIX(NAME, TYPE, KIND)                                                                            \
    INLINE void matrix_##NAME(Input *input, const Matrix *m, TYPE *y, size_t out, float *work)                    \
    {                                                                                                             \
        Product product = {.input = input, .m = m, .y = y, .out = out};                                           \
        if (m->scale) {                                                                                           \
            integers_##NAME(widened_##NAME(input), input, met_by_integers(input), m, y, out, work);               \
            return;                                                                                               \
        }                                                                                                         \
        if (KIND == BF16 && has_tiles()) product.tiles = tiled(input);                                            \
        else if (KIND == F32 || !has_pairs()) product.wide = widened_##NAME(input);                               \
        share_out(product_##NAME, &product, out, WHOLE, matrix_bytes(m, out, KIND));                              \
    }

DEFINE_MATRIX(f32, float, F32)
DEFINE_MATRIX(bf16, uint16_t, BF16)

typedef struct {
    const void *x;
    Matrix matrix;
    void *y;
    size_t rows, in, out, kind;
} Linear;

typedef struct {
    const void *x, *w;
    void *y;
    size_t rows, width, kind;
} RmsNorm;

INLINE size_t linear_work_bytes(const Linear *is)
{
    const size_t products = is->matrix.scale ? integers_work_bytes(is->rows, is->in, is->out) : 0;
    return input_work_bytes(is->rows, is->in) + products;
}
INLINE size_t rms_norm_work_bytes(const RmsNorm *is) { return (void)is, 0; }

static void linear(const Linear *is, const float *none, float *work)
{
    (void)none;
    Input input = {.x = is->x, .rows = is->rows, .in = is->in, .work = (char *)work};
    work = (float *)(input.work + input_work_bytes(is->rows, is->in));
    if (is->kind == F32) matrix_f32(&input, &is->matrix, is->y, is->out, work);
    else matrix_bf16(&input, &is->matrix, is->y, is->out, work);
}

static void rms_norm(const RmsNorm *is, const float *epsilon, float *unused)
{
    (void)unused;
    if (is->kind == F32) rms_norm_f32(is->x, is->w, is->y, is->rows, is->width, *epsilon);
    else rms_norm_bf16(is->x, is->w, is->y, is->rows, is->width, *epsilon);
}

#endif
