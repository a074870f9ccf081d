/* Vectors of 16 fp32 numbers, for the vector instructions of any processor. */

#ifndef PARALLELFORMERS_NG_VECTORS_H
#define PARALLELFORMERS_NG_VECTORS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../collectives/_floats.h"

#define CLONES CLONES_FOR("avx512f", "avx2")

enum { LANES = 16 };
enum { F32 = 0, BF16 = 1 }; /* kinds of numbers */

/* Defines a function for both kinds; the field KIND of its struct says which kind it computes. */
#define DEFINE_FOR_BOTH(NAME, STRUCT, KIND)                                                                    \
    static void NAME(const STRUCT *is, const float *floats, float *work)                                       \
    {                                                                                                          \
        (is->KIND == F32 ? NAME##_f32 : NAME##_bf16)(is, floats, work);                                        \
    }

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t))));

/* `where` is any address: the compiler turns the copy into an unaligned load. */
#define LOAD_F32(target, where) memcpy(&(target), (where), sizeof(Floats))
#define LOAD_BF16(target, where)                                       \
    do {                                                               \
        Halves halves_;                                                \
        memcpy(&halves_, (where), sizeof halves_);                     \
        Words words_ = __builtin_convertvector(halves_, Words) << 16;  \
        memcpy(&(target), &words_, sizeof words_);                     \
    } while (0)

/* The first `count` numbers of a vector of TYPE, at most LANES; the others become 0. */
#define LOAD_FIRST(TYPE, LOAD, target, where, count)                   \
    do {                                                               \
        TYPE first_[LANES] = {0};                                      \
        memcpy(first_, (where), (count) * sizeof(TYPE));               \
        LOAD(target, first_);                                          \
    } while (0)

INLINE void store_vector_f32(const Floats *from, float *to) { memcpy(to, from, sizeof *from); }

/* Stores a vector as bf16, rounded like in `store_bf16`. */
INLINE void store_vector_bf16(const Floats *from, uint16_t *to)
{
    Words bits, rounded;
    memcpy(&bits, from, sizeof bits);
    rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words none = (Words)((bits & 0x7fffffff) > 0x7f800000);
    const Halves halves = __builtin_convertvector((rounded & ~none) | (none & 0x7fc0), Halves);
    memcpy(to, &halves, sizeof halves);
}

INLINE float sum_lanes(const Floats *sum)
{
    float part[LANES];
    memcpy(part, sum, sizeof part);
    for (size_t half = LANES / 2; half; half /= 2)
        for (size_t lane = 0; lane < half; lane++) part[lane] += part[lane + half];
    return part[0];
}

#endif
