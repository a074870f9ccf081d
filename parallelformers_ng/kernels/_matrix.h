/* A weight `[out, in]`, quantized or not, and the inputs that it multiplies. */

#ifndef PARALLELFORMERS_NG_MATRIX_H
#define PARALLELFORMERS_NG_MATRIX_H

#include <stddef.h>
#include <stdint.h>

#include "../collectives/_floats.h"
#include "_vectors.h"

/* A weight `[out, in]`. Missing scales or biases have address 0. Without scales, W has the kind of the computation. */
typedef struct {
    const void *w, *scale, *bias;
    size_t stride; /* elements from one row to the next; an element has two integers of 4 bits */
    size_t group;  /* inputs per scale of 4-bit integers; 0 for 8-bit integers, whose scales are fp32 */
} Matrix;

/* Rows of x that several matrices multiply. Each form of x is made once, by the first product that needs it: x in fp32, x in
 * tiles of bf16, or x split for integers of 8 or 4 bits. `work` has `input_work_bytes`. */
typedef struct {
    const void *x;
    size_t rows, in;
    char *work;
    size_t is_wide, is_tiled, bits; /* `bits` of the integers that x is split for; 0 if x is not split */
} Input;

/* Weights BYTES_AHEAD are prefetched into the second-level cache: the first level can fetch fewer lines at a time. */
enum { ROWS = 4, STEP = LANES, CHUNK = 64, TOGETHER = 8, BYTES_AHEAD = 8192 };

typedef int8_t Bytes __attribute__((vector_size(STEP)));

/* Calls an inlined function with 4, 2 or 1 as its last argument. The argument is a constant, so that the compiler keeps the
 * function's sums in registers. For 3, the function computes a fourth result. */
#define WITH_CONSTANT(COUNT, FUNCTION, ...) \
    ((COUNT) > 2 ? FUNCTION(__VA_ARGS__, 4) : (COUNT) == 2 ? FUNCTION(__VA_ARGS__, 2) : FUNCTION(__VA_ARGS__, 1))

INLINE size_t rows_together(size_t left) { return left >= ROWS ? ROWS : left >= 2 ? 2 : 1; }
INLINE size_t larger(size_t a, size_t b) { return a > b ? a : b; }
INLINE size_t rounded_up(size_t count, size_t to) { return (count + to - 1) / to * to; }
INLINE size_t per_byte(const Matrix *m) { return m->group ? 2 : 1; }

/* Returns the scale of a group. Such scales have the kind of the computation. */
INLINE float group_scale(const void *scales, size_t at, size_t kind)
{
    return kind == F32 ? ((const float *)scales)[at] : load_bf16(((const uint16_t *)scales)[at]);
}

#endif
