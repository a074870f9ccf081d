/* Multiplies x by integer weights in integers, on processors that multiply bytes (AVX-512 VNNI).
 *
 *     x_i ≈ 2ᵉ X_i,   X = 2¹⁶ c + 2⁸ b + a,   Σ x_i q_i ≈ 2ᵉ (2¹⁶ Σ c_i q_i + 2⁸ Σ b_i q_i + Σ a_i q_i)
 *
 * Each row of x is rounded to whole numbers X of 23 bits, in steps of a power of two. Each X is split into three limbs of
 * one byte. This rounding is smaller than that of a sum in fp32, and the sums of limbs are exact. One instruction multiplies
 * 64 integers; widening them to fp32 takes twelve instructions. So reading memory takes most of the time.
 *
 * The instruction multiplies signed bytes of x by unsigned bytes of Q. So the kernel adds 128 (for 4 bits: 8) to each number
 * of Q, and subtracts the known excess from the sums. */

#ifndef PARALLELFORMERS_NG_LIMBS_H
#define PARALLELFORMERS_NG_LIMBS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../collectives/_floats.h"
#include "_matrix.h"
#include "_vectors.h"

enum { LIMBS = 3, LIMB_BITS = 22, MAX_LIMBS = 1 << 16, ALIGNED = 64, PAIRS = 2 * CHUNK };
/* Bytes of x that 64 bytes of Q are multiplied by: limbs, and for 4 bits also the starting values of sums. */
enum { BLOCK_8 = LIMBS * CHUNK, BLOCK_4 = LIMBS * PAIRS + CHUNK };

/* Returns the bytes of a row of x in limbs: blocks, starting values of the sums, and the step at the end. */
INLINE size_t limbs_bytes(size_t in)
{
    const size_t eight = rounded_up(in, CHUNK) / CHUNK * BLOCK_8, four = rounded_up(in, PAIRS) / PAIRS * BLOCK_4;
    return larger(eight, four) + (LIMBS + 1) * CHUNK;
}

INLINE float limb_step(const int8_t *limbs, size_t in)
{
    float step;
    memcpy(&step, limbs + limbs_bytes(in) - CHUNK, sizeof step);
    return step;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define MULTIPLIES_BYTES __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

static int has_integer_products(void)
{
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}

typedef struct {
    __m512i ready[LIMBS];
} LimbSums;

MULTIPLIES_BYTES INLINE __mmask64 first_bytes(size_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

/* Returns the step of a row: a power of two, so that X has LIMB_BITS bits. Returns NaN for a row with NaN or infinity. */
MULTIPLIES_BYTES static float step_of(const float *x, size_t in)
{
    __m512i largest = _mm512_setzero_si512();
    for (size_t i = 0; i < in; i += LANES) {
        const __m512i bits = _mm512_maskz_loadu_epi32((__mmask16)first_bytes(in - i), x + i);
        largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    const uint32_t bits = _mm512_reduce_max_epu32(largest), infinite = 0x7f800000;
    const int exponent = (int)(bits >> 23) - 126;
    return bits >= infinite ? NAN : ldexpf(1.0f, (exponent > -100 ? exponent : -100) - LIMB_BITS);
}

/* Returns X of LANES numbers of x from `at` on. `times` is 1 / step. */
MULTIPLIES_BYTES INLINE __m512i in_steps(const float *x, size_t at, size_t in, float times)
{
    const __mmask16 there = at < in ? (__mmask16)first_bytes(in - at) : 0;
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(there, x + at), _mm512_set1_ps(times)));
}

/* Splits LANES numbers into limbs and stores the limbs `apart` bytes from each other. */
MULTIPLIES_BYTES INLINE void store_limbs(__m512i numbers, int8_t *to, size_t apart)
{
    for (size_t limb = 0; limb < LIMBS; limb++, to += apart) {
        _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(numbers));
        numbers = _mm512_srai_epi32(_mm512_add_epi32(numbers, _mm512_set1_epi32(128)), 8);
    }
}

/* Splits x `[in]` for integers of 8 bits: blocks `[LIMBS, CHUNK]`, then the starting values of the sums of each limb. */
MULTIPLIES_BYTES static void split_for_8(const float *x, int8_t *limbs, size_t in, float times)
{
    __m512i added[LIMBS];
    for (size_t limb = 0; limb < LIMBS; limb++) added[limb] = _mm512_setzero_si512();
    for (size_t i = 0; i < in; i += CHUNK, limbs += BLOCK_8) {
        for (size_t j = 0; j < CHUNK; j += LANES) store_limbs(in_steps(x, i + j, in, times), limbs + j, CHUNK);
        for (size_t limb = 0; limb < LIMBS; limb++)
            added[limb] = _mm512_dpbusd_epi32(added[limb], _mm512_set1_epi8(-128), _mm512_loadu_si512(limbs + limb * CHUNK));
    }
    for (size_t limb = 0; limb < LIMBS; limb++)
        _mm512_storeu_si512(limbs + limb * CHUNK, _mm512_sub_epi32(_mm512_setzero_si512(), added[limb]));
}

/* Adds the products of a block to SUM, the three limbs in one number: a lane has few products, so 32 bits are enough. */
#define MEET_PAIRS(SUM, EVEN, ODD, BLOCK)                                                                               \
    for (size_t limb_ = LIMBS; limb_--;) {                                                                              \
        SUM = _mm512_dpbusd_epi32(_mm512_slli_epi32(SUM, 8), EVEN, _mm512_loadu_si512((BLOCK) + limb_ * PAIRS));        \
        SUM = _mm512_dpbusd_epi32(SUM, ODD, _mm512_loadu_si512((BLOCK) + limb_ * PAIRS + CHUNK));                       \
    }

/* Splits x `[in]` for integers of 4 bits: blocks `[LIMBS, (even, odd), CHUNK]`, each before the start of its sums. */
MULTIPLIES_BYTES static void split_for_4(const float *x, int8_t *limbs, size_t in, float times)
{
    const __m512i eights = _mm512_set1_epi8(8);
    for (size_t i = 0; i < in; i += PAIRS, limbs += BLOCK_4) {
        int8_t mixed[LIMBS * PAIRS];
        for (size_t j = 0; j < PAIRS; j += LANES) store_limbs(in_steps(x, i + j, in, times), mixed + j, PAIRS);
        for (size_t half = 0; half < LIMBS * PAIRS; half += CHUNK) {
            const __m512i pairs = _mm512_loadu_si512(mixed + half);
            int8_t *to = limbs + half / PAIRS * PAIRS + half % PAIRS / 2;
            _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi16_epi8(pairs));
            _mm256_storeu_si256((__m256i *)(to + CHUNK), _mm512_cvtepi16_epi8(_mm512_srli_epi16(pairs, 8)));
        }
        __m512i added = _mm512_setzero_si512();
        MEET_PAIRS(added, eights, eights, limbs);
        _mm512_storeu_si512(limbs + LIMBS * PAIRS, _mm512_sub_epi32(_mm512_setzero_si512(), added));
    }
}

/* Multiplies one row of Q, 8-bit integers, by `rows` rows of x. `rows` is a constant after inlining. */
MULTIPLIES_BYTES INLINE void products_of_8(const int8_t *const *limbs, const int8_t *q, int64_t *totals, size_t in, size_t rows)
{
    const size_t blocks = rounded_up(in, CHUNK) / CHUNK;
    LimbSums sums[ROWS];
    for (size_t r = 0; r < rows; r++)
        for (size_t limb = 0; limb < LIMBS; limb++)
            sums[r].ready[limb] = _mm512_loadu_si512(limbs[r] + blocks * BLOCK_8 + limb * CHUNK);
    for (size_t block = 0; block < blocks; block++, q += CHUNK) {
        const __m512i held = in - block * CHUNK >= CHUNK ? _mm512_loadu_si512(q)
                                                         : _mm512_maskz_loadu_epi8(first_bytes(in % CHUNK), q);
        const __m512i larger = _mm512_xor_si512(held, _mm512_set1_epi8(-128));
        __builtin_prefetch(q + BYTES_AHEAD, 0, 1);
#pragma GCC unroll 4
        for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 3
            for (size_t limb = 0; limb < LIMBS; limb++)
                sums[r].ready[limb] = _mm512_dpbusd_epi32(
                    sums[r].ready[limb], larger, _mm512_loadu_si512(limbs[r] + block * BLOCK_8 + limb * CHUNK));
    }
    for (size_t r = 0; r < rows; r++) {
        totals[r] = 0;
        for (size_t limb = LIMBS; limb--;) totals[r] = totals[r] * 256 + _mm512_reduce_add_epi32(sums[r].ready[limb]);
    }
}

/* Returns the scales of a block of PAIRS numbers, from scale `at` on. Each lane has the scale of its own numbers. */
MULTIPLIES_BYTES INLINE __m512 scales_of(const void *scales, size_t at, size_t groups, __m512i lanes, size_t kind)
{
    const __mmask8 there = (__mmask8)first_bytes(groups - at < 4 ? groups - at : 4);
    const __m128i few = kind == F32 ? _mm_maskz_loadu_epi32(there, (const float *)scales + at)
                                    : _mm_slli_epi32(_mm_cvtepu16_epi32(_mm_maskz_loadu_epi16(there, (const uint16_t *)scales + at)), 16);
    return _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(_mm_castsi128_ps(few)));
}

/* Multiplies one row of Q, 4-bit integers, by `rows` rows of x. All numbers of a lane have the same scale. */
MULTIPLIES_BYTES INLINE void products_of_4(const int8_t *const *limbs, const int8_t *q, const void *scales, float *products,
                                           size_t in, size_t group, size_t kind, size_t rows)
{
    const __m512i numbers = _mm512_setr_epi32(0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120);
    const unsigned shift = group >= PAIRS ? 31 : (unsigned)__builtin_ctzll(group);
    const __m512i lanes = _mm512_srl_epi32(numbers, _mm_cvtsi32_si128((int)shift));
    const size_t blocks = rounded_up(in, PAIRS) / PAIRS, groups = in / group;
    const __m512i low = _mm512_set1_epi8(15);
    __m512 sum[ROWS];
    for (size_t r = 0; r < rows; r++) sum[r] = _mm512_setzero_ps();
    for (size_t block = 0; block < blocks; block++, q += CHUNK) {
        const size_t left = in - block * PAIRS;
        const __m512i held = left >= PAIRS ? _mm512_loadu_si512(q) : _mm512_maskz_loadu_epi8(first_bytes(left / 2), q);
        const __m512i larger = _mm512_xor_si512(held, _mm512_set1_epi8((char)0x88));
        const __m512i even = _mm512_and_si512(larger, low), odd = _mm512_and_si512(_mm512_srli_epi16(larger, 4), low);
        const __m512 scale = scales_of(scales, block * PAIRS / group, groups, lanes, kind);
        __builtin_prefetch(q + BYTES_AHEAD, 0, 1);
#pragma GCC unroll 4
        for (size_t r = 0; r < rows; r++) {
            const int8_t *met = limbs[r] + block * BLOCK_4;
            __m512i total = _mm512_setzero_si512();
            MEET_PAIRS(total, even, odd, met);
            total = _mm512_add_epi32(total, _mm512_loadu_si512(met + LIMBS * PAIRS));
            sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), scale, sum[r]);
        }
    }
    for (size_t r = 0; r < rows; r++) products[r] = _mm512_reduce_add_ps(sum[r]);
}

MULTIPLIES_BYTES INLINE void rows_in_limbs(const int8_t *held, const Matrix *m, size_t first, size_t outs, float *y,
                                           size_t in, size_t out, size_t kind, size_t rows)
{
    const size_t apart = m->group ? in / m->group * (kind == F32 ? sizeof(float) : sizeof(uint16_t)) : 0;
    const int8_t *limbs[ROWS];
    float products[ROWS], steps[ROWS];
    int64_t totals[ROWS];
    for (size_t r = 0; r < rows; r++) limbs[r] = held + r * limbs_bytes(in), steps[r] = limb_step(limbs[r], in);
    for (size_t o = first; o < first + outs; o++) {
        const int8_t *q = (const int8_t *)m->w + o * m->stride;
        if (m->group) {
            products_of_4(limbs, q, (const char *)m->scale + o * apart, products, in, m->group, kind, rows);
            for (size_t r = 0; r < rows; r++) y[r * out + o] = products[r] * steps[r];
        } else {
            products_of_8(limbs, q, totals, in, rows);
            for (size_t r = 0; r < rows; r++) y[r * out + o] = (float)totals[r] * (steps[r] * ((const float *)m->scale)[o]);
        }
    }
}

/* Splits x `[rows, in]` into limbs, for integers of 8 bits, or of 4 bits if `pairs`. */
MULTIPLIES_BYTES static void split(const float *x, int8_t *limbs, size_t rows, size_t in, int pairs)
{
    for (size_t r = 0; r < rows; r++, x += in, limbs += limbs_bytes(in)) {
        const float step = step_of(x, in);
        memcpy(limbs + limbs_bytes(in) - CHUNK, &step, sizeof step);
        if (pairs) split_for_4(x, limbs, in, 1 / step);
        else split_for_8(x, limbs, in, 1 / step);
    }
}

/* Computes the columns from `first` to `end` of y `[rows, out]` = x Qᵀ, from x in limbs. TOGETHER rows of Q are multiplied
 * by the same rows of x one after another. */
MULTIPLIES_BYTES static void in_limbs(const int8_t *limbs, const Matrix *m, float *y, size_t rows, size_t in, size_t out,
                                      size_t kind, size_t first, size_t end)
{
    for (size_t o = first; o < end; o += TOGETHER) {
        const size_t outs = end - o < TOGETHER ? end - o : TOGETHER;
        for (size_t r = 0, count; r < rows; r += count) {
            const int8_t *held = limbs + r * limbs_bytes(in);
            count = rows_together(rows - r);
            WITH_CONSTANT(count, rows_in_limbs, held, m, o, outs, y + r * out, in, out, kind);
        }
    }
}

#else

static int has_integer_products(void) { return 0; }
#define split(...) ((void)0) /* never runs, because `has_integer_products` is 0, like `in_limbs` */
#define in_limbs(...) ((void)0)

#endif
#endif
