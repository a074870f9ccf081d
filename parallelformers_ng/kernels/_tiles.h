/* Computes products of bf16 in the tile unit of x86 (AMX).
 *
 *     yᵀ = W xᵀ
 *
 * A tile of W has SIDE rows of DEEP numbers, in their order in memory. A tile of xᵀ has up to SIDE columns: DEEP numbers of
 * a row of x each, in pairs. x is first packed into such tiles. Two tiles of W times two of xᵀ make four tiles of sums, one
 * product for each tile that is loaded. So many rows of x that their tiles stay in the second-level cache are multiplied by
 * all of W; W is read once for them. The processor's own prefetcher is fastest alone. The sum of a column depends neither on
 * other columns nor on their number. */

#ifndef PARALLELFORMERS_NG_TILES_H
#define PARALLELFORMERS_NG_TILES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../collectives/_floats.h"
#include "_vectors.h"

#if HAS_BF16_INTRINSICS
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    SIDE = 16, DEEP = 32, TILE = SIDE * DEEP, ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18,
    AT_A_TIME = 16,        /* tiles of each row of W that are multiplied before the sums are stored */
    INPUT_BYTES = 1 << 20, /* bytes of x that are multiplied by all of W before the next rows of x */
};

/* Returns whether the processor has the tile unit, and the operating system lets this process use it. */
static int has_tiles(void)
{
    static int known = -1;
    if (known < 0) {
        unsigned a, b, c, d;
        const unsigned needed = 1u << 22 | 1u << 24 | 1u << 25; /* bf16, the tiles themselves, int8 */
        known = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & needed) == needed &&
                __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
    }
    return known;
}

static size_t columns_of(size_t rows) { return rows < SIDE ? rows : SIDE; }

/* Returns how many numbers x has in tiles, padding included. */
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

#define TILED __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512bf16")))

/* GCC does not know that `_tile_loadd` reads memory: writes to memory must be complete before tiles are loaded from there. */
#define SETTLE_MEMORY() __asm__ volatile("" ::: "memory")

INLINE uint32_t first_bits(size_t count) { return (uint32_t)((1ull << count) - 1); }

/* Transposes SIDE × SIDE numbers of 32 bits. */
TILED INLINE void transpose(__m512i x[SIDE])
{
    __m512i y[SIDE];
#pragma GCC unroll 8
    for (size_t i = 0; i < SIDE; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (size_t i = 0; i < SIDE; i += 4)
#pragma GCC unroll 2
        for (size_t j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

/* Copies x `[rows, in]` into tiles `[rows / columns, in / DEEP, DEEP / 2, columns, 2]`. */
TILED static void pack_tiles(const uint16_t *x, uint16_t *packed, size_t rows, size_t in)
{
    const size_t columns = columns_of(rows);
    for (size_t r = 0; r < rows; r += columns, x += columns * in)
        for (size_t k = 0; k < in; k += DEEP) {
            const __mmask32 deep = first_bits(in - k < DEEP ? in - k : DEEP);
            __m512i pairs[SIDE];
#pragma GCC unroll 16
            for (size_t c = 0; c < SIDE; c++)
                pairs[c] = _mm512_maskz_loadu_epi16(c < columns && r + c < rows ? deep : 0, x + c * in + k);
            if (columns > 1) transpose(pairs);
            else _mm512_storeu_si512(packed, pairs[0]);
            for (size_t pair = 0; columns > 1 && pair < SIDE; pair++)
                _mm512_mask_storeu_epi32(packed + pair * columns * 2, (__mmask16)first_bits(columns), pairs[pair]);
            packed += columns * DEEP;
        }
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

/* Sets the shapes. For GCC 12, `_tile_loadconfig` reads the first 8 bytes only. */
INLINE void load_shapes(const TileShapes *shapes) { __asm__ volatile("ldtilecfg\t%0" ::"m"(*shapes)); }

/* Adds the bias to sums `[outputs, columns]`, both SIDE, and returns them as a vector of outputs for each column. */
TILED INLINE void finish_sums(const float *sums, const uint16_t *bias, size_t outputs, __m512 of_rows[SIDE])
{
    const __m512i of_outputs = bias ? _mm512_maskz_loadu_epi16(first_bits(outputs), bias) : _mm512_setzero_si512();
    const __m512 biases = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(of_outputs)), 16));
    __m512i x[SIDE];
#pragma GCC unroll 16
    for (size_t o = 0; o < SIDE; o++) x[o] = _mm512_loadu_si512(sums + o * SIDE);
    transpose(x);
#pragma GCC unroll 16
    for (size_t r = 0; r < SIDE; r++) of_rows[r] = _mm512_add_ps(_mm512_castsi512_ps(x[r]), biases);
}

/* Stores `outputs` outputs of up to SIDE rows in y, whose rows are `out` apart. The sums of the outputs from SIDE on are in
 * `upper`. Two halves of a cache line are stored at once. */
TILED INLINE void store_sums(const float *low, const float *upper, const uint16_t *bias, uint16_t *y, size_t rows, size_t out,
                             size_t outputs)
{
    const __mmask32 present = first_bits(outputs);
    __m512 first[SIDE], second[SIDE];
    finish_sums(low, bias, outputs < SIDE ? outputs : SIDE, first);
    if (outputs > SIDE) finish_sums(upper, bias ? bias + SIDE : NULL, SIDE, second);
    for (size_t r = 0; r < rows; r++) {
        const __m512 none = _mm512_setzero_ps();
        const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(outputs > SIDE ? second[r] : none, first[r]);
        if (outputs > SIDE) _mm512_storeu_si512(y + r * out, rounded);
        else _mm512_mask_storeu_epi16(y + r * out, present, rounded);
    }
}

typedef struct {
    const uint16_t *w, *bias;    /* first row of the block, and its bias or NULL */
    size_t in, stride, outputs;  /* inputs; distance of rows; rows of the block: up to 2 SIDE */
} BlockOfTiles;

#define LOAD_SUMS(T)                                              \
    do {                                                          \
        if (first) _tile_loadd(T, sums[T], SIDE * sizeof(float)); \
        else _tile_zero(T);                                       \
    } while (0)
#define STORE_SUMS(T) _tile_stored(T, sums[T], SIDE * sizeof(float))

/* Multiplies `high` tiles of W by `wide` tiles of columns, both 1 or 2 and constant after inlining, over all inputs. The sums
 * leave the tiles every AT_A_TIME products: storing a tile takes a thousand cycles after many more (measured on Sapphire
 * Rapids). */
TILED INLINE void sums_of_tiles(const BlockOfTiles *is, const uint16_t *packed, const uint16_t ends[2][TILE], size_t columns, size_t high,
                                size_t wide, float sums[4][SIDE * SIDE])
{
    const size_t depth = (is->in + DEEP - 1) / DEEP, whole = is->in / DEEP, row = columns * 2 * sizeof *packed;
    for (size_t first = 0; first < depth; first += AT_A_TIME) {
        const size_t end = depth - first < AT_A_TIME ? depth : first + AT_A_TIME;
        LOAD_SUMS(0);
        if (wide > 1) LOAD_SUMS(1);
        if (high > 1) LOAD_SUMS(2);
        if (high > 1 && wide > 1) LOAD_SUMS(3);
        for (size_t k = first; k < end; k++) {
            const uint16_t *low = k < whole ? is->w + k * DEEP : ends[0];
            const uint16_t *upper = k < whole ? low + SIDE * is->stride : ends[1];
            const size_t apart = (k < whole ? is->stride : DEEP) * sizeof *low;
            _tile_loadd(4, low, apart);
            if (high > 1) _tile_loadd(5, upper, apart);
            _tile_loadd(6, packed + k * columns * DEEP, row);
            if (wide > 1) _tile_loadd(7, packed + (depth + k) * columns * DEEP, row);
            _tile_dpbf16ps(0, 4, 6);
            if (wide > 1) _tile_dpbf16ps(1, 4, 7);
            if (high > 1) _tile_dpbf16ps(2, 5, 6);
            if (high > 1 && wide > 1) _tile_dpbf16ps(3, 5, 7);
        }
        STORE_SUMS(0);
        if (wide > 1) STORE_SUMS(1);
        if (high > 1) STORE_SUMS(2);
        if (high > 1 && wide > 1) STORE_SUMS(3);
    }
}

/* Computes the outputs of a block for all rows. */
TILED INLINE void block_of_tiles(const BlockOfTiles *is, const uint16_t *packed, uint16_t *y, size_t rows, size_t columns, size_t out)
{
    const size_t depth = (is->in + DEEP - 1) / DEEP, whole = is->in / DEEP;
    const size_t high = is->outputs > SIDE ? 2 : 1;
    _Alignas(64) uint16_t ends[2][TILE] = {{0}};
    _Alignas(64) float sums[4][SIDE * SIDE];
    for (size_t o = 0; whole < depth && o < high * SIDE; o++)
        memcpy(ends[o / SIDE] + o % SIDE * DEEP, is->w + o * is->stride + whole * DEEP, is->in % DEEP * sizeof *is->w);
    SETTLE_MEMORY();
    for (size_t r = 0, wide; r < rows; r += wide * columns, packed += wide * depth * columns * DEEP) {
        wide = rows - r > columns ? 2 : 1;
        if (high > 1 && wide > 1) sums_of_tiles(is, packed, ends, columns, 2, 2, sums);
        else if (high > 1) sums_of_tiles(is, packed, ends, columns, 2, 1, sums);
        else if (wide > 1) sums_of_tiles(is, packed, ends, columns, 1, 2, sums);
        else sums_of_tiles(is, packed, ends, columns, 1, 1, sums);
        for (size_t c = 0; c < wide; c++) {
            const size_t row = r + c * columns, here = rows - row < columns ? rows - row : columns;
            store_sums(sums[c], sums[2 + c], is->bias, y + row * out, here, out, is->outputs);
        }
    }
}

/* Multiplies x by `outs` rows of W, and writes `outs` columns of y, whose rows are `out` apart. `work` has `tiles_work_bytes`
 * bytes, and x in tiles at its beginning. */
TILED static void linear_tiles(uint16_t *work, size_t thread, const uint16_t *w, const uint16_t *bias, uint16_t *y, size_t rows,
                               size_t in, size_t stride, size_t out, size_t outs)
{
    const size_t depth = (in + DEEP - 1) / DEEP, columns = columns_of(rows), side = 2 * SIDE;
    const size_t fitting = INPUT_BYTES / (depth * DEEP * sizeof *w) / side * side, most = fitting ? fitting : side;
    const uint16_t column_bytes = (uint16_t)(columns * sizeof(float)), deep_bytes = DEEP * sizeof *w;
    const TileShapes shapes = {
        .palette = 1,
        .row_bytes = {column_bytes, column_bytes, column_bytes, column_bytes, deep_bytes, deep_bytes, column_bytes, column_bytes},
        .rows = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, DEEP / 2, DEEP / 2},
    };
    uint16_t *last = work + packed_numbers(rows, in) + thread * depth * TILE;
    const size_t rest = outs % SIDE;
    memset(last, 0, rest ? depth * TILE * sizeof *last : 0);
    for (size_t i = 0; i < rest; i++) memcpy(last + i * in, w + (outs - rest + i) * stride, in * sizeof *w);
    load_shapes(&shapes);
    for (size_t r = 0; r < rows; r += most, work += most * depth * DEEP, y += most * out) {
        const size_t here = rows - r < most ? rows - r : most;
        for (size_t o = 0, outputs; o < outs; o += outputs) {
            outputs = outs - o >= side ? side : outs - o >= SIDE ? SIDE : outs - o;
            const BlockOfTiles block = {
                .w = outputs < SIDE ? last : w + o * stride, .bias = bias ? bias + o : NULL, .in = in,
                .stride = outputs < SIDE ? in : stride, .outputs = outputs,
            };
            block_of_tiles(&block, work, y + o, here, columns, out);
        }
    }
    _tile_release();
}

#else

static int has_tiles(void) { return 0; }
static size_t tiles_work_bytes(size_t rows, size_t in, size_t threads) { return (void)rows, (void)in, (void)threads, 0; }
#define pack_tiles(...) ((void)0) /* never runs, because `has_tiles` is 0, like `linear_tiles` */
#define linear_tiles(WORK, THREAD, ...) ((void)(THREAD))

#endif
#endif
