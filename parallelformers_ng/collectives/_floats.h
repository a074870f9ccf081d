/* Converts fp32 and bf16 to fp32 and back.
 *
 * The conversions are written without branches, so that the compiler vectorises them for any instruction set. */

#ifndef PARALLELFORMERS_NG_FLOATS_H
#define PARALLELFORMERS_NG_FLOATS_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Compiles a function once for each instruction set. At the start of a process, the loader picks the version for the
 * processor; this needs glibc's ifunc. `arch=` names are not used, because each would match one processor model only. */
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

/* Chooses without a branch. For a conditional expression, the compiler would branch and not vectorise. */
INLINE uint32_t choose(int condition, uint32_t yes, uint32_t no)
{
    uint32_t mask = -(uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

INLINE float load_f32(float value) { return value; }
INLINE float store_f32(float value) { return value; }

INLINE float load_bf16(uint16_t value) { return float_of((uint32_t)value << 16); }

/* Rounds to nearest, ties to even; every NaN becomes 0x7fc0. */
INLINE uint16_t store_bf16(float value)
{
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)choose((bits & 0x7fffffff) > 0x7f800000, 0x7fc0, rounded);
}

#endif
