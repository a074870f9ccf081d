/* Computes linear layers whose weights are integers of 8 bits with a scale for each output, or of 4 bits with a scale for
 * each group of inputs:
 *
 *     y = s ⊙ (x Qᵀ) + b          y_o = Σ_g s_og Σ_i∈g x_i q_oi + b_o
 *
 * Q, `[out, in]`, is read once, row by row, in the order of memory. If the processor multiplies integers, the kernel
 * computes in integers (`_limbs.h`, and `_byte_tiles.h` for many rows). Otherwise, and for rows of x that are not finite,
 * the kernel widens Q to fp32, STEP bytes at a time: first numbers of all bytes, then second numbers. x is first copied
 * into that order. The order of a sum depends on `in` alone. */

#ifndef PARALLELFORMERS_NG_INTEGERS_H
#define PARALLELFORMERS_NG_INTEGERS_H

#include <math.h>

#include "../collectives/_floats.h"
#include "_byte_tiles.h"
#include "_limbs.h"
#include "_matrix.h"
#include "_team.h"
#include "_tiles.h"
#include "_vectors.h"

/* Multiplies one row of Q by `rows` rows of x. `rows` and `per_byte` are constants after inlining. Integers of 8 bits are
 * added in groups of CHUNK, without a scale of the group. */
INLINE void widened_products(const float *laid, const int8_t *q, const void *scales, float *products, size_t in,
                             size_t group, size_t per_byte, size_t kind, size_t rows)
{
    Floats sum[ROWS] = {{0}}, b;
    int8_t end[CHUNK] = {0};
    const size_t bytes = in / per_byte, each = per_byte == 1 ? CHUNK : group / per_byte;
    if (per_byte == 1) memcpy(end, q + bytes / CHUNK * CHUNK, bytes % CHUNK);
    for (size_t i = 0, g = 0; i < bytes; i += each, g++) {
        const int8_t *from = i + each <= bytes ? q + i : end;
        Floats part[ROWS] = {{0}};
        for (size_t j = 0; j < each; j += STEP) {
            Bytes held;
            memcpy(&held, from + j, sizeof held);
            const Integers wide = __builtin_convertvector(held, Integers);
            for (size_t at = 0; at < per_byte; at++) {
                const Integers number = per_byte == 1 ? wide : at ? wide >> 4 : (Integers)((Words)wide << 28) >> 28;
                const Floats a = __builtin_convertvector(number, Floats);
#pragma GCC unroll 4
                for (size_t r = 0; r < rows; r++, laid += LANES) {
                    LOAD_F32(b, laid);
                    part[r] += a * b;
                }
            }
        }
        const float scale = per_byte == 1 ? 1.0f : group_scale(scales, g, kind);
#pragma GCC unroll 4
        for (size_t r = 0; r < rows; r++) sum[r] += part[r] * scale;
    }
#pragma GCC unroll 4
    for (size_t r = 0; r < rows; r++) products[r] = sum_lanes(&sum[r]);
}

INLINE void widened_rows(const float *laid, const Matrix *m, size_t first, size_t outs, float *y, size_t in, size_t out,
                         size_t per_byte, size_t kind, size_t rows)
{
    float products[ROWS];
    const size_t apart = m->group ? in / m->group * (kind == F32 ? sizeof(float) : sizeof(uint16_t)) : 0;
    for (size_t o = first; o < first + outs; o++) {
        const int8_t *q = (const int8_t *)m->w + o * m->stride;
        widened_products(laid, q, (const char *)m->scale + o * apart, products, in, m->group, per_byte, kind, rows);
        const float scale = m->group ? 1.0f : ((const float *)m->scale)[o];
        for (size_t r = 0; r < rows; r++) y[r * out + o] = products[r] * scale;
    }
}

/* Copies x, in groups of up to ROWS rows, into `[per_byte, rows of the group, LANES]` for each STEP bytes of Q; the end of a
 * row is filled with zeros. */
static void lay_out_rows(const float *x, const Matrix *m, float *laid, size_t rows, size_t in)
{
    for (size_t first = 0, count; first < rows; first += count, x += count * in) {
        count = rows_together(rows - first);
        for (size_t i = 0; i < rounded_up(in, CHUNK); i += STEP * per_byte(m))
            for (size_t at = 0; at < per_byte(m); at++)
                for (size_t r = 0; r < count; r++)
                    for (size_t from = i + at; from < i + LANES * per_byte(m); from += per_byte(m))
                        *laid++ = from < in ? x[r * in + from] : 0.0f;
    }
}

/* Computes the columns from `first` to `end` of y `[rows, out]`. TOGETHER rows of Q are multiplied by the same rows of x
 * one after another, while these rows of x are in the first-level cache. */
CLONES static void widened(const float *laid, const Matrix *m, float *y, size_t rows, size_t in, size_t out, size_t kind,
                           size_t first, size_t end)
{
    const size_t row = rounded_up(in, CHUNK);
    for (size_t o = first; o < end; o += TOGETHER) {
        const size_t outs = end - o < TOGETHER ? end - o : TOGETHER;
        for (size_t r = 0, count; r < rows; r += count) {
            const float *of = laid + r * row;
            float *to = y + r * out;
            count = rows_together(rows - r);
            if (m->group) WITH_CONSTANT(count, widened_rows, of, m, o, outs, to, in, out, 2, kind);
            else WITH_CONSTANT(count, widened_rows, of, m, o, outs, to, in, out, 1, kind);
        }
    }
}

/* Returns the bytes of `rows` rows of x in the form that integers are multiplied by. */
INLINE size_t met_bytes(size_t rows, size_t in)
{
    const size_t laid = rows * rounded_up(in, CHUNK) * sizeof(float);
    const size_t limbs = rows * limbs_bytes(in) + byte_tiles_work_bytes(rows, in);
    return larger(laid, limbs) + ALIGNED;
}

/* Returns the bytes of the products, and of one row of x. */
INLINE size_t integers_work_bytes(size_t rows, size_t in, size_t out)
{
    return (rows * out + rounded_up(in, CHUNK)) * sizeof(float);
}

/* One product with integers. x is in `laid` if that is not NULL, else in `limbs`, and for many rows also in `tiles`. */
typedef struct {
    const Matrix *m;
    const float *laid; /* NULL if x is in `limbs` */
    const int8_t *limbs;
    int8_t *tiles; /* NULL if x is not in tiles */
    float *products;
    size_t rows, in, out, kind;
} Integral;

static void integral(const void *job, size_t first, size_t end, size_t thread)
{
    const Integral *is = job;
    (void)thread;
    if (is->laid) widened(is->laid, is->m, is->products, is->rows, is->in, is->out, is->kind, first, end);
    else if (is->tiles) in_byte_tiles(is->limbs, is->m, is->products, is->rows, is->in, is->out, is->tiles, first, end);
    else in_limbs(is->limbs, is->m, is->products, is->rows, is->in, is->out, is->kind, first, end);
}

/* Computes the rows of x with NaN or infinity by `widened`, because such rows cannot be rounded to integers. `work` has space
 * for a row. */
static void without_steps(const float *x, const Integral *is, float *work)
{
    for (size_t r = 0; r < is->rows; r++, x += is->in)
        if (isnan(limb_step(is->limbs + r * limbs_bytes(is->in), is->in))) {
            lay_out_rows(x, is->m, work, 1, is->in);
            widened(work, is->m, is->products + r * is->out, 1, is->in, is->out, is->kind, 0, is->out);
        }
}

/* Writes the products of x and integers to the beginning of `work`, which has `integers_work_bytes` bytes. `met` has
 * `met_bytes` bytes, and gets x in the form for the integers, if an earlier product has not made that form. */
static void multiply_integers(const float *x, Input *input, char *met, const Matrix *m, size_t out, size_t kind, float *work)
{
    const size_t rows = input->rows, in = input->in, bits = 8 / per_byte(m);
    int8_t *limbs = (int8_t *)(((uintptr_t)met + ALIGNED - 1) / ALIGNED * ALIGNED);
    Integral product = {.m = m, .limbs = limbs, .products = work, .rows = rows, .in = in, .out = out, .kind = kind};
    if (!has_integer_products() || in > MAX_LIMBS) {
        if (input->bits != bits) lay_out_rows(x, m, (float *)limbs, rows, in);
        product.laid = (float *)limbs;
    } else {
        if (input->bits != bits) split(x, limbs, rows, in, m->group > 0);
        if (rows > ROWS && !m->group && has_tiles()) {
            product.tiles = limbs + rows * limbs_bytes(in);
            if (input->bits != bits) pack_limbs(limbs, product.tiles, rows, in);
        }
    }
    input->bits = bits;
    share_out(integral, &product, out, WHOLE, out * m->stride);
    if (!product.laid) without_steps(x, &product, work + rows * out);
}

#define DEFINE_INTEGERS(NAME, TYPE, KIND)                                                                           \
    static void integers_##NAME(const float *x, Input *input, char *met, const Matrix *m, TYPE *y, size_t out,       \
                                float *work)                                                                        \
    {                                                                                                               \
        const float *products = work;                                                                               \
        const TYPE *bias = m->bias;                                                                                 \
        multiply_integers(x, input, met, m, out, KIND, work);                                                       \
        for (size_t r = 0; r < input->rows; r++, y += out, products += out)                                         \
            for (size_t o = 0; o < out; o++)                                                                        \
                y[o] = store_##NAME(products[o] + (bias ? load_##NAME(bias[o]) : 0.0f));                            \
    }

DEFINE_INTEGERS(f32, float, F32)
DEFINE_INTEGERS(bf16, uint16_t, BF16)

#endif
