/* Counts of classes, range and squares of the numbers of a tensor, added up over chunks: recording/digests/tensor_digest.py is the
 * specification. */

#include "digest.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

enum { VALUES_LANES = 16 };
enum { VALUES_FEW = 128 };    /* elements that are counted in a type as narrow as theirs */
enum { VALUES_PIECE = 1024 }; /* elements that stay in the L1 cache with their copy */

#define VALUES_JOIN_(a, b, c) values_##a##_##b##_##c
#define VALUES_JOIN(a, b, c) VALUES_JOIN_(a, b, c)
#define VALUES_TYPE_(sign, width) sign##width##_t
#define VALUES_TYPE(sign, width) VALUES_TYPE_(sign, width)

static inline float values_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline double values_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The bits of a float of the same value: a loop of it becomes vectors with any compiler. */
static inline uint32_t values_half(uint16_t half) {
    uint32_t size = half & 0x7fff, sign = (uint32_t)(half & 0x8000) << 16, small;
    float subnormal = (float)(int32_t)size * 0x1p-24f;
    memcpy(&small, &subnormal, sizeof small);
    uint32_t normal = (size << 13) + ((uint32_t)112 << 23);
    return sign | (size < 0x400 ? small : normal | (size >= 0x7c00 ? 0x7f800000 : 0));
}

static inline double values_sum(const double *lanes) {
    double sum = 0;
    for (int j = 0; j < VALUES_LANES; j++) {
        sum += lanes[j];
    }
    return sum;
}

static inline void values_range(SrValues *v, double low, double high) {
    v->min = low < v->min ? low : v->min;
    v->max = high > v->max ? high : v->max;
}

#define INSTRUCTIONS plain
#define TARGET
#include "digest_values_sets.h"

#ifdef SR_HAS_X86_SETS
#include <immintrin.h>

#define INSTRUCTIONS avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define HALVES(from, to)                                                                                               \
    (_mm256_storeu_ps((to), _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from)))),                                   \
     _mm256_storeu_ps((to) + 8, _mm256_cvtph_ps(_mm_loadu_si128((const void *)((from) + 8)))))
#include "digest_values_sets.h"

#define INSTRUCTIONS avx512
#if defined(__clang__)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#define HALVES(from, to) _mm512_storeu_ps((to), _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from))))
#include "digest_values_sets.h"
#endif

/* Of codes there are 256 only. Four tables: equal codes in a row would wait for each other. */
static void values_add_codes(SrValues *v, const unsigned char *at, size_t n) {
    uint32_t counts[4][256] = {0}; /* a chunk has few elements */
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        counts[0][at[i]]++, counts[1][at[i + 1]]++, counts[2][at[i + 2]]++, counts[3][at[i + 3]]++;
    }
    for (; i < n; i++) {
        counts[0][at[i]]++;
    }
    for (int code = 0; code < 256; code++) {
        v->counts[code] += (uint64_t)counts[0][code] + counts[1][code] + counts[2][code] + counts[3][code];
    }
}

sr_add_values sr_values_function(sr_number number, int width, sr_instructions instructions) {
    if (number == SR_CODES) {
        return values_add_codes;
    }
    int size = width == 8 ? 0 : width == 16 ? 1 : width == 32 ? 2 : 3;
#ifdef SR_HAS_X86_SETS
    if (instructions != SR_PLAIN) {
        return instructions == SR_AVX512 ? values_all_formats_avx512[number][size] : values_all_formats_avx2[number][size];
    }
#endif
    (void)instructions;
    return values_all_formats_plain[number][size];
}

void sr_clear_values(SrValues *v, sr_number number) {
    memset(v, 0, number == SR_CODES ? sizeof *v : offsetof(SrValues, counts));
    v->min = (double)INFINITY, v->max = -(double)INFINITY;
}

/* After the last chunk of codes, given their 256 numbers and the smallest normal one. */
void sr_sum_counts(SrValues *v, const double *numbers, double normal) {
    for (int code = 0; code < 256; code++) {
        uint64_t n = v->counts[code];
        double value = numbers[code];
        if (n == 0) {
            continue;
        }
        if (isnan(value)) {
            v->n_nan += n;
        } else if (isinf(value)) {
            *(value > 0 ? &v->n_pos_inf : &v->n_neg_inf) += n;
        } else {
            if (value == 0) {
                *(signbit(value) ? &v->n_neg_zero : &v->n_zero) += n;
            } else if (fabs(value) < normal) {
                v->n_subnormal += n;
            }
            v->n_finite += n;
            v->squares += (double)n * (value * value);
            values_range(v, value, value);
        }
    }
}

/* The sum of squares scaled by the greatest number: of float64, squares themselves may overflow or vanish. */
static double values_scaled_norm(const unsigned char *at, size_t n, double scale) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        double value;
        memcpy(&value, at + i * sizeof value, sizeof value);
        if (isfinite(value)) {
            sum += (value / scale) * (value / scale);
        }
    }
    return scale * sqrt(sum);
}

double sr_norm(const SrValues *v, const unsigned char *at, size_t n, sr_number number, int width) {
    double scale = fmax(fabs(v->min), fabs(v->max));
    if (number == SR_FLOAT && width == 64 && scale != 0 && (scale > 0x1p450 || scale < 0x1p-450)) {
        return fmin(values_scaled_norm(at, n, scale), DBL_MAX); /* whether it overflows depends on the order of the sum */
    }
    return sqrt(v->squares);
}
