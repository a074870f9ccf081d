/* Adds the data of the ranks, in rank order: fp32, fp64, and bf16/fp16 with fp32 accumulation.
 *
 * The fp16 conversions have no branches, like those of `_floats.h`. They follow F. Giesen's `half_to_float_fast5` and
 * `float_to_half_fast3_rtne` (public domain). */

#ifndef PARALLELFORMERS_NG_KERNEL_SUMS_H
#define PARALLELFORMERS_NG_KERNEL_SUMS_H

#include <stddef.h>
#include <stdint.h>

#include "_floats.h"

INLINE double load_f64(double value) { return value; }
INLINE double store_f64(double value) { return value; }

INLINE float load_f16(uint16_t value)
{
    uint32_t magnitude = ((uint32_t)value & 0x7fff) << 13, exponent = magnitude & 0x0f800000;
    uint32_t normal = magnitude + (112u << 23);
    uint32_t special = normal + (112u << 23); /* infinity, NaN */
    uint32_t subnormal = bits_of(float_of(normal + (1u << 23)) - float_of(113u << 23)); /* the difference is normal */
    uint32_t bits = choose(exponent == 0x0f800000, special, choose(exponent == 0, subnormal, normal));
    return float_of(bits | ((uint32_t)value & 0x8000) << 16);
}

/* Rounds to nearest, ties to even; every NaN becomes 0x7e00. */
INLINE uint16_t store_f16(float value)
{
    uint32_t bits = bits_of(value) & 0x7fffffff, sign = bits_of(value) >> 16 & 0x8000;
    uint32_t special = choose(bits > 0x7f800000, 0x7e00, 0x7c00);                       /* NaN, or infinity */
    uint32_t subnormal = bits_of(float_of(bits) + float_of(126u << 23)) - (126u << 23); /* the sum rounds */
    uint32_t normal = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
    uint32_t half = choose(bits >= (143u << 23), special, choose(bits < (113u << 23), subnormal, normal));
    return (uint16_t)(half | sign);
}

/* `out` may be one of the sources, because a block is read from all sources before the block is written. */
#define SUM_BLOCK 512
#define DEFINE_SUM(NAME, TYPE, ACCUMULATOR)                                                                     \
    CLONES_FOR("avx2")                                                                                          \
    static void sum_##NAME(char *out, const char *const *sources, int world_size, size_t count)                 \
    {                                                                                                           \
        ACCUMULATOR sum[SUM_BLOCK];                                                                             \
        for (size_t begin = 0; begin < count; begin += SUM_BLOCK) {                                             \
            size_t length = count - begin < SUM_BLOCK ? count - begin : SUM_BLOCK;                              \
            const TYPE *first = (const TYPE *)sources[0] + begin;                                               \
            for (size_t i = 0; i < length; i++) sum[i] = load_##NAME(first[i]);                                 \
            for (int r = 1; r < world_size; r++) {                                                              \
                const TYPE *next = (const TYPE *)sources[r] + begin;                                            \
                for (size_t i = 0; i < length; i++) sum[i] += load_##NAME(next[i]);                             \
            }                                                                                                   \
            TYPE *target = (TYPE *)out + begin;                                                                 \
            for (size_t i = 0; i < length; i++) target[i] = store_##NAME(sum[i]);                               \
        }                                                                                                       \
    }

DEFINE_SUM(f32, float, float)
DEFINE_SUM(f64, double, double)
DEFINE_SUM(bf16, uint16_t, float)
DEFINE_SUM(f16, uint16_t, float)

typedef struct {
    size_t bytes;
    void (*sum)(char *out, const char *const *sources, int world_size, size_t count);
} SumKind;

enum { SUM_KIND_COUNT = 4 };
static const SumKind SUM_KINDS[SUM_KIND_COUNT] = {{4, sum_f32}, {8, sum_f64}, {2, sum_bf16}, {2, sum_f16}};

#endif
