/* fp32 and bf16, to fp32 and back.
 *
 * The conversions are written without branches, so that the compiler vectorises them for any instruction set. */

#ifndef PARALLELFORMERS_NG_FLOATS_H
#define PARALLELFORMERS_NG_FLOATS_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Copies of a function for processors that can do more, of which the loader picks one; it needs glibc's ifunc. They are
 * named by what a processor can do: `arch=` names would ask for that very model. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES_FOR(...) __attribute__((target_clones(__VA_ARGS__, "default")))
#else
#define CLONES_FOR(...)
#endif

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A choice without a branch: a conditional expression would have the compiler skip arithmetic, and not vectorise. */
INLINE uint32_t choose(int condition, uint32_t yes, uint32_t no)
{
    uint32_t mask = -(uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

INLINE float load_f32(float value) { return value; }
INLINE float store_f32(float value) { return value; }

INLINE float load_bf16(uint16_t value) { return float_of((uint32_t)value << 16); }

/* Round to nearest, ties to even; every NaN becomes 0x7fc0. */
INLINE uint16_t store_bf16(float value)
{
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)choose((bits & 0x7fffffff) > 0x7f800000, 0x7fc0, rounded);
}

#endif
