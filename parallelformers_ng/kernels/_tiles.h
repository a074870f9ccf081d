/* Computes products of bf16 in the tile unit of x86 (AMX).
 *
 *     yᵀ = W xᵀ
 *
 * A tile of W has SIDE rows of DEEP numbers, in their order in memory. A tile of xᵀ has up to SIDE columns: DEEP numbers of
 * a row of x each, in pairs. x is first packed into such tiles. So W is read once for all rows of x. Reading memory takes
 * most of the time; with vectors, multiplying would. While a block of W is multiplied, the next block is prefetched, in the
 * order of memory. The sum of a column depends neither on other columns nor on their number. */

#ifndef PARALLELFORMERS_NG_TILES_H
#define PARALLELFORMERS_NG_TILES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../collectives/_floats.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && __GNUC__ >= 11
#define HAS_TILE_INTRINSICS 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SIDE = 16, DEEP = 32, TILE = SIDE * DEEP, ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

/* Returns whether the processor has the tile unit, and the operating system lets this process use it. */
static int has_tiles(void)
{
    static int known = -1;
    if (known < 0) {
        unsigned a, b, c, d;
        const unsigned needed = 1u << 22 | 1u << 24 | 1u << 25; /* bf16, the tiles themselves, int8 */
        known = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & needed) == needed &&
                !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
    }
    return known;
}

static size_t columns_of(size_t rows) { return rows < SIDE ? rows : SIDE; }

/* Returns the number of numbers of x in tiles. */
static size_t packed_numbers(size_t rows, size_t in)
{
    return (rows + SIDE - 1) / SIDE * columns_of(rows) * ((in + DEEP - 1) / DEEP) * DEEP;
}

/* Returns the bytes of working memory of `linear_tiles`: x in tiles, and SIDE rows of W for each thread. The rows of W are
 * used if the number of outputs is not a multiple of SIDE. */
static size_t tiles_work_bytes(size_t rows, size_t in, size_t threads)
{
    return (packed_numbers(rows, in) + threads * SIDE * ((in + DEEP - 1) / DEEP) * DEEP) * sizeof(uint16_t);
}

/* Copies x `[rows, in]` into tiles `[rows / columns, in / DEEP, DEEP / 2, columns, 2]`. */
static void pack_tiles(const uint16_t *x, uint16_t *packed, size_t rows, size_t in)
{
    const size_t depth = (in + DEEP - 1) / DEEP, columns = columns_of(rows), tiles = depth * DEEP * columns;
    memset(packed, 0, (rows + columns - 1) / columns * tiles * sizeof *packed);
    for (size_t r = 0; r < rows; r++, x += in) {
        uint32_t *to = (uint32_t *)packed + r / columns * tiles / 2 + r % columns;
        for (size_t i = 0; i + 1 < in; i += 2, to += columns) *to = x[i] | (uint32_t)x[i + 1] << 16;
        if (in % 2) *to = x[in - 1];
    }
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

#define TILED __attribute__((target("amx-tile,amx-bf16,avx512f")))

#define MULTIPLY_TILES(SUM, W, FROM, STRIDE)             \
    do {                                                  \
        _tile_loadd(W, FROM, (STRIDE) * sizeof(uint16_t)); \
        _tile_dpbf16ps(SUM, W, 4);                        \
    } while (0)

/* Adds the bias to `sums` `[outputs, columns]`; stores up to SIDE outputs of each row in y, whose rows are `out` apart. */
TILED static void store_sums(const float *sums, size_t columns, const uint16_t *bias, uint16_t *y, size_t rows, size_t out,
                             size_t outputs)
{
    const __m512i side = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i column = _mm512_mullo_epi32(side, _mm512_set1_epi32((int)columns));
    float biases[SIDE] = {0};
    for (size_t o = 0; bias && o < outputs; o++) biases[o] = load_bf16(bias[o]);
    for (size_t r = 0; r < rows; r++) {
        float of_row[SIDE];
        _mm512_storeu_ps(of_row, _mm512_add_ps(_mm512_i32gather_ps(column, sums + r, sizeof(float)), _mm512_loadu_ps(biases)));
        for (size_t o = 0; o < outputs; o++) y[r * out + o] = store_bf16(of_row[o]);
    }
}

/* Computes 2 SIDE outputs, or up to SIDE outputs. Prefetches rows of W from `next` on. */
TILED INLINE void block_of_tiles(const uint16_t *packed, const uint16_t *w, const uint16_t *bias, uint16_t *y, size_t rows,
                                 size_t in, size_t stride, size_t out, size_t outputs, const uint16_t *next)
{
    const size_t depth = (in + DEEP - 1) / DEEP, whole = in / DEEP, columns = columns_of(rows), tile = columns * DEEP;
    uint16_t ends[2][TILE] = {{0}};
    float sums[SIDE * SIDE];
    const size_t blocks = outputs > SIDE ? 2 : 1;
    size_t cursor = 0;
    for (size_t o = 0; whole < depth && o < blocks * SIDE; o++)
        memcpy(ends[o / SIDE] + o % SIDE * DEEP, w + o * stride + whole * DEEP, in % DEEP * sizeof *w);
    for (size_t r = 0; r < rows; r += columns, packed += depth * tile) {
        _tile_zero(0);
        _tile_zero(1);
        for (size_t k = 0; k < depth; k++) {
            for (size_t line = 0; !r && line < blocks * SIDE; line++) {
                __builtin_prefetch(next + cursor, 0, 2);
                cursor += DEEP;
                if (cursor >= in) next += stride, cursor = 0;
            }
            _tile_loadd(4, packed + k * tile, columns * 2 * sizeof *packed);
            if (k < whole) {
                MULTIPLY_TILES(0, 2, w + k * DEEP, stride);
                if (blocks > 1) MULTIPLY_TILES(1, 3, w + SIDE * stride + k * DEEP, stride);
            } else {
                MULTIPLY_TILES(0, 2, ends[0], DEEP);
                if (blocks > 1) MULTIPLY_TILES(1, 3, ends[1], DEEP);
            }
        }
        const size_t here = rows - r < columns ? rows - r : columns;
        _tile_stored(0, sums, columns * sizeof(float));
        store_sums(sums, columns, bias, y + r * out, here, out, outputs < SIDE ? outputs : SIDE);
        if (blocks > 1) {
            _tile_stored(1, sums, columns * sizeof(float));
            store_sums(sums, columns, bias ? bias + SIDE : bias, y + r * out + SIDE, here, out, SIDE);
        }
    }
}

/* Multiplies x by `outs` rows of W, and writes `outs` columns of y, whose rows are `out` apart. `work` has `tiles_work_bytes`
 * bytes, and x in tiles at its beginning. */
TILED static void linear_tiles(uint16_t *work, size_t thread, const uint16_t *w, const uint16_t *bias, uint16_t *y, size_t rows, size_t in,
                               size_t stride, size_t out, size_t outs)
{
    const size_t depth = (in + DEEP - 1) / DEEP, columns = columns_of(rows);
    const uint16_t column_bytes = (uint16_t)(columns * sizeof(float)), deep_bytes = DEEP * sizeof *w;
    const TileShapes shapes = {
        .palette = 1,
        .row_bytes = {column_bytes, column_bytes, deep_bytes, deep_bytes, column_bytes},
        .rows = {SIDE, SIDE, SIDE, SIDE, DEEP / 2},
    };
    _tile_loadconfig(&shapes);
    size_t o = 0;
    for (; o + 2 * SIDE <= outs; o += 2 * SIDE)
        block_of_tiles(work, w + o * stride, bias ? bias + o : bias, y + o, rows, in, stride, out, 2 * SIDE,
                       w + (o + 2 * SIDE) * stride);
    for (; o + SIDE <= outs; o += SIDE)
        block_of_tiles(work, w + o * stride, bias ? bias + o : bias, y + o, rows, in, stride, out, SIDE,
                       w + (o + SIDE) * stride);
    if (o < outs) {
        uint16_t *last = work + packed_numbers(rows, in) + thread * depth * TILE;
        memset(last, 0, depth * TILE * sizeof *last);
        for (size_t i = 0; i < outs - o; i++) memcpy(last + i * in, w + (o + i) * stride, in * sizeof *w);
        block_of_tiles(work, last, bias ? bias + o : bias, y + o, rows, in, in, out, outs - o, last);
    }
    _tile_release();
}

#else

static int has_tiles(void) { return 0; }
static size_t tiles_work_bytes(size_t rows, size_t in, size_t threads) { return (void)rows, (void)in, (void)threads, 0; }
static void pack_tiles(const uint16_t *x, uint16_t *packed, size_t rows, size_t in) { (void)x, (void)packed, (void)rows, (void)in; }
static void linear_tiles(uint16_t *work, size_t thread, const uint16_t *w, const uint16_t *bias, uint16_t *y, size_t rows,
                         size_t in, size_t stride, size_t out, size_t outs)
{
    (void)work, (void)thread, (void)w, (void)bias, (void)y, (void)rows, (void)in, (void)stride, (void)out, (void)outs;
}

#endif
#endif
