/* A weight `[out, in]`, quantized or not, and the inputs that it multiplies. */

#ifndef PARALLELFORMERS_NG_MATRIX_H
#define PARALLELFORMERS_NG_MATRIX_H

#include <stddef.h>
#include <stdint.h>

#include "../collectives/_floats.h"
#include "_vectors.h"

/* A weight `[out, in]`. Scales and a bias at 0 are none; one without scales has numbers of the kind that is computed in. */
typedef struct {
    const void *w, *scale, *bias;
    size_t stride; /* elements from one row to the next; one of integers of 4 bits has two */
    size_t group;  /* inputs that share a scale, of integers of 4 bits; 0 for 8 bits, whose scales are fp32 */
} Matrix;

/* Rows of x that several matrices multiply. Each form of x is made once, by the first product that needs it: x in fp32, x in
 * tiles of bf16, or x split for integers of 8 or 4 bits. `work` has `input_work_bytes`. */
typedef struct {
    const void *x;
    size_t rows, in;
    char *work;
    size_t is_wide, is_tiled, bits; /* `bits` of the integers, 0 for none */
} Input;

/* What comes BYTES_AHEAD is asked for into the second-level cache: fewer lines can be on their way to the first. */
enum { ROWS = 4, STEP = LANES, CHUNK = 64, TOGETHER = 8, BYTES_AHEAD = 8192 };

typedef int8_t Bytes __attribute__((vector_size(STEP)));

INLINE size_t rows_together(size_t left) { return left >= ROWS ? ROWS : left >= 2 ? 2 : 1; }
INLINE size_t rounded_up(size_t count, size_t to) { return (count + to - 1) / to * to; }
INLINE size_t per_byte(const Matrix *m) { return m->group ? 2 : 1; }

/* The scale of a group, which has the kind that is computed in. */
INLINE float group_scale(const void *scales, size_t at, size_t kind)
{
    return kind == F32 ? ((const float *)scales)[at] : load_bf16(((const uint16_t *)scales)[at]);
}

#endif
