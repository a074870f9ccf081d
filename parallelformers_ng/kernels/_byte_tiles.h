/* Multiplies 8-bit integers in the tile unit of x86 (AMX), for several rows of x in limbs (`_limbs.h`).
 *
 * A tile of Q has SIDE rows of DEEP_BYTES integers, in their order in memory. A tile of xᵀ has a column for each limb of
 * AT_ONCE rows of x. So Q is read from memory once for any number of rows. The sums equal those of `_limbs.h` bit for bit. */

#ifndef PARALLELFORMERS_NG_BYTE_TILES_H
#define PARALLELFORMERS_NG_BYTE_TILES_H

#include "_limbs.h"
#include "_matrix.h"
#include "_tiles.h"
#include "_vectors.h"

#if HAS_BF16_INTRINSICS

enum { DEEP_BYTES = CHUNK, AT_ONCE = SIDE / LIMBS, BYTE_TILE = SIDE * DEEP_BYTES };

#define TILED_BYTES __attribute__((target("amx-tile,amx-int8")))

/* Returns the bytes of x in tiles, and of SIDE rows of Q, used if the number of outputs is not a multiple of SIDE. */
static size_t byte_tiles_work_bytes(size_t rows, size_t in)
{
    return (rounded_up(rows, AT_ONCE) / AT_ONCE + 1) * rounded_up(in, DEEP_BYTES) * SIDE;
}

/* Copies rows in limbs into tiles `[rows / AT_ONCE, in / DEEP_BYTES, DEEP_BYTES / 4, SIDE, 4]`. */
static void pack_limbs(const int8_t *limbs, int8_t *packed, size_t rows, size_t in)
{
    const size_t depth = rounded_up(in, DEEP_BYTES) / DEEP_BYTES;
    memset(packed, 0, rounded_up(rows, AT_ONCE) / AT_ONCE * depth * BYTE_TILE);
    for (size_t r = 0; r < rows; r++)
        for (size_t k = 0; k < depth; k++)
            for (size_t limb = 0; limb < LIMBS; limb++) {
                const int8_t *from = limbs + r * limbs_bytes(in) + k * BLOCK_8 + limb * CHUNK;
                int8_t *to = packed + (r / AT_ONCE * depth + k) * BYTE_TILE + (r % AT_ONCE * LIMBS + limb) * 4;
                for (size_t quad = 0; quad < DEEP_BYTES / 4; quad++) memcpy(to + quad * SIDE * 4, from + quad * 4, 4);
            }
}

/* Multiplies x by SIDE rows of Q, and writes the first `outputs` products of each row of x to y (distance `out`). Prefetches
 * rows of Q from `next` on, in the order of memory, a part for each AT_ONCE rows of x. If `in` is not a multiple of
 * DEEP_BYTES, `ends` has the last numbers of each row of Q. */
TILED_BYTES static void side_of_byte_tiles(const int8_t *limbs, const int8_t *packed, const int8_t *q, const int8_t *ends,
                                           const float *scales, float *y, size_t rows, size_t in, size_t stride, size_t out,
                                           size_t outputs, const int8_t *next)
{
    const size_t depth = rounded_up(in, DEEP_BYTES) / DEEP_BYTES, whole = in / DEEP_BYTES;
    const size_t passes = rounded_up(rows, AT_ONCE) / AT_ONCE, lines = rounded_up(SIDE, passes) / passes;
    int32_t sums[SIDE][SIDE];
    size_t cursor = 0;
    SETTLE_MEMORY();
    for (size_t r = 0; r < rows; r += AT_ONCE, packed += depth * BYTE_TILE) {
        _tile_zero(0);
        for (size_t k = 0; k < depth; k++) {
            for (size_t line = 0; line < lines; line++) {
                __builtin_prefetch(next + cursor, 0, 2);
                cursor += CHUNK;
                if (cursor >= in) next += stride, cursor = 0;
            }
            _tile_loadd(2, packed + k * BYTE_TILE, SIDE * 4);
            if (k < whole) _tile_loadd(1, q + k * DEEP_BYTES, stride);
            else _tile_loadd(1, ends, DEEP_BYTES);
            _tile_dpbssd(0, 1, 2);
        }
        _tile_stored(0, sums, sizeof sums[0]);
        for (size_t i = 0; i < AT_ONCE && r + i < rows; i++) {
            const float step = limb_step(limbs + (r + i) * limbs_bytes(in), in);
            for (size_t o = 0; o < outputs; o++) {
                const int32_t *of = sums[o] + i * LIMBS;
                const int64_t total = ((int64_t)of[2] * 256 + of[1]) * 256 + of[0];
                y[(r + i) * out + o] = (float)total * (step * scales[o]);
            }
        }
    }
}

/* Computes the columns from `first` to `end` of y `[rows, out]` = x Qᵀ. `work` has `byte_tiles_work_bytes` bytes, and x in
 * tiles at its beginning. Only the thread with the last columns writes to `work`. */
TILED_BYTES static void in_byte_tiles(const int8_t *limbs, const Matrix *m, float *y, size_t rows, size_t in, size_t out,
                                      int8_t *work, size_t first, size_t end)
{
    const size_t whole = in / DEEP_BYTES * DEEP_BYTES;
    int8_t ends[BYTE_TILE] = {0}, *last = work + byte_tiles_work_bytes(rows, in) - SIDE * rounded_up(in, DEEP_BYTES);
    TileShapes shapes = {.palette = 1};
    for (size_t tile = 0; tile < 3; tile++) shapes.rows[tile] = SIDE, shapes.row_bytes[tile] = DEEP_BYTES;
    load_shapes(&shapes);
    for (size_t o = first; o < end; o += SIDE) {
        const size_t outputs = end - o < SIDE ? end - o : SIDE;
        const int8_t *q = (const int8_t *)m->w + o * m->stride, *next = q + outputs * m->stride;
        size_t stride = m->stride;
        if (outputs < SIDE) {
            for (size_t i = 0; i < outputs; i++) memcpy(last + i * in, q + i * stride, in);
            q = next = last, stride = in;
        }
        for (size_t i = 0; i < outputs; i++) memcpy(ends + i * DEEP_BYTES, q + i * stride + whole, in - whole);
        side_of_byte_tiles(limbs, work, q, ends, (const float *)m->scale + o, y + o, rows, in, stride, out, outputs, next);
    }
    _tile_release();
}

#else

static size_t byte_tiles_work_bytes(size_t rows, size_t in) { return (void)rows, (void)in, 0; }
#define pack_limbs(...) ((void)0) /* never runs, because `has_tiles` is 0, like `in_byte_tiles` */
#define in_byte_tiles(...) ((void)0)

#endif
#endif
