/* Vectors of 16 fp32 numbers, for the vector instructions of any processor. */

#ifndef PARALLELFORMERS_NG_VECTORS_H
#define PARALLELFORMERS_NG_VECTORS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../collectives/_floats.h"

#define CLONES CLONES_FOR("avx512f", "avx2")

/* Since version 11, GCC has had the instructions for bf16 of AVX-512 and AMX. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && __GNUC__ >= 11
#define HAS_BF16_INTRINSICS 1
#include <immintrin.h>
#endif

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

/* Round numbers to bf16 like in `store_bf16`: the upper halves of the results are bf16, the lower halves any bits. */
INLINE void to_upper_bf16(const Floats *from, Words *to)
{
    Words bits;
    memcpy(&bits, from, sizeof bits);
    const Words none = (Words)((bits & 0x7fffffff) > 0x7f800000);
    *to = ((bits + 0x7fff + ((bits >> 16) & 1)) & ~none) | (none & 0x7fc00000);
}

/* Stores a vector as bf16. */
INLINE void store_vector_bf16(const Floats *from, uint16_t *to)
{
    Words upper;
    to_upper_bf16(from, &upper);
    const Halves halves = __builtin_convertvector(upper >> 16, Halves);
    memcpy(to, &halves, sizeof halves);
}

/* Round numbers to the precision of a kind. */
INLINE void round_f32(Floats *x) { (void)x; }
INLINE void round_bf16(Floats *x)
{
    Words upper;
    to_upper_bf16(x, &upper);
    *x = (Floats)(upper & 0xffff0000);
}

INLINE float sum_lanes(const Floats *sum)
{
    float part[LANES];
    memcpy(part, sum, sizeof part);
    for (size_t half = LANES / 2; half; half /= 2)
        for (size_t lane = 0; lane < half; lane++) part[lane] += part[lane + half];
    return part[0];
}

/* Adds the lanes of LANES vectors, in the order of `sum_lanes`: lane n of sums[0] becomes the sum of vector n. Each level adds
 * the halves of two vectors and joins the two results, so all vectors together need 15 additions instead of 64. */
INLINE void sum_lanes_of_all(Floats *sums)
{
#ifdef __clang__
#define HALVES(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define HALVES(A, B, ...) __builtin_shuffle(A, B, (Integers){__VA_ARGS__})
#endif
    for (size_t n = 0; n < 8; n++) {
        const Floats a = sums[2 * n], b = sums[2 * n + 1];
        sums[n] = HALVES(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                  HALVES(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    for (size_t n = 0; n < 4; n++) {
        const Floats a = sums[2 * n], b = sums[2 * n + 1];
        sums[n] = HALVES(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  HALVES(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    for (size_t n = 0; n < 2; n++) {
        const Floats a = sums[2 * n], b = sums[2 * n + 1];
        sums[n] = HALVES(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
                  HALVES(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    }
    sums[0] = HALVES(sums[0], sums[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
              HALVES(sums[0], sums[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#undef HALVES
}

#endif
