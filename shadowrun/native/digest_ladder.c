/* The truncation-hash ladder: numerics/hash_ladder.py is its specification; and ladder, range and squares in one pass.
 *
 * Nearly all work is to turn 32 elements of w bits into w words of 32 bits, one for each bit plane; then each word costs
 * one multiplication by the key of the block. A word has 32 bits, so that the product is two of 32 by 32 bits: the sums of
 * both are kept apart, and one is shifted at the very end.
 */

#include "digest.h"

#include <math.h>
#include <string.h>

#define GAMMA 0x9E3779B97F4A7C15u
#define FACTOR_SEED 0x5DEECE66Du

uint64_t sr_mix(uint64_t value) {
    uint64_t z = value + GAMMA;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static uint64_t ladder_factors[SR_MOST_PLANES];
enum { LADDER_KEPT = 8192 }; /* keys: most tensors need no others */
static uint64_t ladder_first_keys[LADDER_KEPT + 1];

/* Where the bytes of 32 elements, or of two blocks of 8-bit elements, come from: 32 of one byte of each element, then 32 of
 * the next byte or block. GFNI takes the rows of a matrix from the last one to the first, hence 7 - i of each 8. Of 32 bits,
 * 16 of each byte of 16 elements: all four bytes, or the upper two first. */
static unsigned char ladder_bytes_8[64], ladder_bytes_16[64], ladder_bytes_32[2][64];

void sr_set_up_ladders(void) {
    for (int i = 0; i < 64; i++) {
        int element = (i % 32) ^ 7, byte = i / 32;
        ladder_bytes_8[i] = (unsigned char)(i ^ 7);
        ladder_bytes_16[i] = (unsigned char)(2 * element + byte);
        ladder_bytes_32[0][i] = (unsigned char)(4 * ((i % 16) ^ 7) + i / 16);
        ladder_bytes_32[1][i] = ladder_bytes_32[0][i] ^ 2;
    }
    for (uint64_t j = 0; j < SR_MOST_PLANES; j++) {
        ladder_factors[j] = sr_mix(j + FACTOR_SEED) | 1;
    }
    for (uint64_t i = 0; i <= LADDER_KEPT; i++) {
        ladder_first_keys[i] = sr_mix(i * GAMMA) | 1;
    }
}

const uint64_t *sr_keys(size_t first, size_t n, uint64_t *room) {
    if (first + n <= LADDER_KEPT) {
        return ladder_first_keys + first;
    }
    for (size_t i = 0; i <= n; i++) { /* one more: kernels of 8-bit elements take two blocks at once */
        room[i] = sr_mix((first + i) * GAMMA) | 1;
    }
    return room;
}

void sr_rungs(const uint64_t *planes, int width, uint64_t n_elements, int mantissa, uint64_t *rungs) {
    uint64_t above = n_elements;
    for (int j = width - 1; j > mantissa; j--) {
        above += ladder_factors[j] * planes[j];
    }
    for (int j = mantissa; j >= 0; j--) {
        above += ladder_factors[j] * planes[j];
        rungs[j] = above;
    }
    for (int j = 0; j <= mantissa; j++) {
        rungs[j] = sr_mix(rungs[j]);
    }
}

/* For all processors: transposition of a matrix of bits by halves (Warren, Hacker's Delight, 7-3). Row i has element i,
 * and, for elements of 8 or 16 bits, those 8 or 16 rows further in its upper bits. */

#define LADDER_SWAP(rows, n, j, mask)                                                                                  \
    for (int k = 0; k < (n); k += 2 * (j)) {                                                                           \
        for (int i = k; i < k + (j); i++) {                                                                            \
            uint32_t t = ((rows[i] >> (j)) ^ rows[i + (j)]) & (mask);                                                  \
            rows[i] ^= t << (j);                                                                                       \
            rows[i + (j)] ^= t;                                                                                        \
        }                                                                                                              \
    }

static inline void ladder_multiply(const uint32_t *rows, int n, uint64_t key, uint64_t *planes) {
    for (int j = 0; j < n; j++) {
        planes[j] += rows[j] * key;
    }
}

static void ladder_planes_8_plain(const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes) {
    for (size_t b = 0; b < n_blocks; b++, at += SR_LANES) {
        uint32_t rows[8];
        for (int i = 0; i < 8; i++) {
            rows[i] = (uint32_t)at[i] | (uint32_t)at[i + 8] << 8 | (uint32_t)at[i + 16] << 16 | (uint32_t)at[i + 24] << 24;
        }
        LADDER_SWAP(rows, 8, 4, 0x0F0F0F0Fu)
        LADDER_SWAP(rows, 8, 2, 0x33333333u)
        LADDER_SWAP(rows, 8, 1, 0x55555555u)
        ladder_multiply(rows, 8, keys[b], planes);
    }
}

static void ladder_planes_16_plain(const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes) {
    for (size_t b = 0; b < n_blocks; b++, at += 2 * SR_LANES) {
        uint16_t elements[SR_LANES];
        uint32_t rows[16];
        memcpy(elements, at, sizeof elements);
        for (int i = 0; i < 16; i++) {
            rows[i] = (uint32_t)elements[i] | (uint32_t)elements[i + 16] << 16;
        }
        LADDER_SWAP(rows, 16, 8, 0x00FF00FFu)
        LADDER_SWAP(rows, 16, 4, 0x0F0F0F0Fu)
        LADDER_SWAP(rows, 16, 2, 0x33333333u)
        LADDER_SWAP(rows, 16, 1, 0x55555555u)
        ladder_multiply(rows, 16, keys[b], planes);
    }
}

static inline void ladder_block_32_plain(uint32_t *rows, uint64_t key, uint64_t *planes) {
    LADDER_SWAP(rows, 32, 16, 0x0000FFFFu)
    LADDER_SWAP(rows, 32, 8, 0x00FF00FFu)
    LADDER_SWAP(rows, 32, 4, 0x0F0F0F0Fu)
    LADDER_SWAP(rows, 32, 2, 0x33333333u)
    LADDER_SWAP(rows, 32, 1, 0x55555555u)
    ladder_multiply(rows, 32, key, planes);
}

static void ladder_planes_32_plain(const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes) {
    for (size_t b = 0; b < n_blocks; b++, at += 4 * SR_LANES) {
        uint32_t rows[SR_LANES];
        memcpy(rows, at, sizeof rows);
        ladder_block_32_plain(rows, keys[b], planes);
    }
}

static void ladder_planes_64_plain(const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes) {
    for (size_t b = 0; b < n_blocks; b++, at += 8 * SR_LANES) {
        uint64_t elements[SR_LANES];
        uint32_t low[SR_LANES], high[SR_LANES];
        memcpy(elements, at, sizeof elements);
        for (int i = 0; i < SR_LANES; i++) {
            low[i] = (uint32_t)elements[i], high[i] = (uint32_t)(elements[i] >> 32);
        }
        ladder_block_32_plain(low, keys[b], planes);
        ladder_block_32_plain(high, keys[b], planes + 32);
    }
}

#ifdef SR_HAS_X86_SETS
#include <immintrin.h>

/* AVX2: 256 bytes at a time, which are some blocks. Register r gets the bytes of the elements r, r + 8, r + 16 and r + 24 of
 * each block; a transposition by halves across the 8 registers brings the bits of one plane together, and the four bytes of
 * a word already lie side by side. Words wait in memory for a few groups, so that sums stay in registers. */

#define AVX2 __attribute__((target("avx2")))
enum { LADDER_BATCH = 16, LADDER_GROUPS = 16, LADDER_GROUP_BYTES = 256 };

#define LADDER_SWAP_AVX2(a, b, j, mask)                                                                                \
    {                                                                                                                  \
        __m256i t = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(a, j), b), mask);                              \
        a = _mm256_xor_si256(a, _mm256_slli_epi16(t, j));                                                              \
        b = _mm256_xor_si256(b, t);                                                                                    \
    }

/* Bit j of a byte of register i, and bit i of that byte of register j, change places. */
AVX2 static inline void ladder_transpose_avx2(__m256i *x) {
    const __m256i fours = _mm256_set1_epi8(0x0F), twos = _mm256_set1_epi8(0x33), ones = _mm256_set1_epi8(0x55);
    for (int i = 0; i < 4; i++) {
        LADDER_SWAP_AVX2(x[i], x[i + 4], 4, fours)
    }
    for (int i = 0; i < 8; i += 4) {
        LADDER_SWAP_AVX2(x[i], x[i + 2], 2, twos)
        LADDER_SWAP_AVX2(x[i + 1], x[i + 3], 2, twos)
    }
    for (int i = 0; i < 8; i += 2) {
        LADDER_SWAP_AVX2(x[i], x[i + 1], 1, ones)
    }
}

AVX2 static inline __m256i ladder_halves_avx2(const unsigned char *at, int lower, int upper) {
    __m256i half = _mm256_castsi128_si256(_mm_loadu_si128((const void *)(at + lower)));
    return _mm256_inserti128_si256(half, _mm_loadu_si128((const void *)(at + upper)), 1);
}

/* Two blocks of 32 bits, one in each half. Bytes of a half: of the lowest byte of the 4 elements first. */
AVX2 static inline void ladder_load_32_avx2(const unsigned char *at, __m256i *x) {
    for (int i = 0; i < 2; i++, at += 16) {
        __m256i a = ladder_halves_avx2(at, 0, 128), b = ladder_halves_avx2(at, 32, 160);
        __m256i c = ladder_halves_avx2(at, 64, 192), d = ladder_halves_avx2(at, 96, 224);
        __m256i ab_low = _mm256_unpacklo_epi8(a, b), ab_high = _mm256_unpackhi_epi8(a, b);
        __m256i cd_low = _mm256_unpacklo_epi8(c, d), cd_high = _mm256_unpackhi_epi8(c, d);
        x[4 * i] = _mm256_unpacklo_epi16(ab_low, cd_low);
        x[4 * i + 1] = _mm256_unpackhi_epi16(ab_low, cd_low);
        x[4 * i + 2] = _mm256_unpacklo_epi16(ab_high, cd_high);
        x[4 * i + 3] = _mm256_unpackhi_epi16(ab_high, cd_high);
    }
}

/* Four blocks of 16 bits, two in each half: the word of the lower byte of the first, of its upper byte, then the second. */
AVX2 static inline void ladder_load_16_avx2(const unsigned char *at, __m256i *x) {
    __m256i quads[2][4]; /* elements 2 i and 2 i + 1, their bytes with those 8, 16 and 24 further on */
    for (int i = 0; i < 2; i++, at += 64) {
        __m256i a = ladder_halves_avx2(at, 0, 128), b = ladder_halves_avx2(at, 16, 144);
        __m256i c = ladder_halves_avx2(at, 32, 160), d = ladder_halves_avx2(at, 48, 176);
        __m256i ab_low = _mm256_unpacklo_epi8(a, b), ab_high = _mm256_unpackhi_epi8(a, b);
        __m256i cd_low = _mm256_unpacklo_epi8(c, d), cd_high = _mm256_unpackhi_epi8(c, d);
        quads[i][0] = _mm256_unpacklo_epi16(ab_low, cd_low);
        quads[i][1] = _mm256_unpackhi_epi16(ab_low, cd_low);
        quads[i][2] = _mm256_unpacklo_epi16(ab_high, cd_high);
        quads[i][3] = _mm256_unpackhi_epi16(ab_high, cd_high);
    }
    for (int i = 0; i < 4; i++) {
        x[2 * i] = _mm256_unpacklo_epi64(quads[0][i], quads[1][i]);
        x[2 * i + 1] = _mm256_unpackhi_epi64(quads[0][i], quads[1][i]);
    }
}

/* The planes of the groups of a batch: register p of each group has the words of planes p, p + 8, … of its blocks. */
AVX2 static inline void ladder_multiply_avx2(
    __m256i words[LADDER_GROUPS][8], const __m256i *low, const __m256i *high, size_t n_groups, int width, uint64_t *planes) {
    for (int p = 0; p < 8; p++) {
        __m256i even = _mm256_setzero_si256(), odd = even, upper = even;
        for (size_t i = 0; i < n_groups; i++) {
            __m256i word = words[i][p];
            even = _mm256_add_epi64(even, _mm256_mul_epu32(word, low[i]));
            odd = _mm256_add_epi64(odd, _mm256_mul_epu32(_mm256_srli_epi64(word, 32), low[i]));
            upper = _mm256_add_epi32(upper, _mm256_mullo_epi32(word, high[i]));
        }
        even = _mm256_add_epi64(even, _mm256_slli_epi64(upper, 32));
        odd = _mm256_add_epi64(odd, _mm256_slli_epi64(_mm256_srli_epi64(upper, 32), 32));
        __m128i two_even = _mm_add_epi64(_mm256_castsi256_si128(even), _mm256_extracti128_si256(even, 1));
        __m128i two_odd = _mm_add_epi64(_mm256_castsi256_si128(odd), _mm256_extracti128_si256(odd, 1));
        uint64_t first = (uint64_t)_mm_cvtsi128_si64(two_even), third = (uint64_t)_mm_extract_epi64(two_even, 1);
        uint64_t second = (uint64_t)_mm_cvtsi128_si64(two_odd), fourth = (uint64_t)_mm_extract_epi64(two_odd, 1);
        if (width == 16) {
            planes[p] += first + third;
            planes[p + 8] += second + fourth;
        } else {
            planes[p] += first, planes[p + 8] += second, planes[p + 16] += third, planes[p + 24] += fourth;
        }
    }
}

/* The keys of two blocks of 32 bits, each in both 64-bit parts of its half. */
AVX2 static inline __m256i ladder_load_keys_avx2(const uint64_t *keys) {
    return _mm256_permute4x64_epi64(_mm256_castsi128_si256(_mm_loadu_si128((const void *)keys)), 0x50);
}

#define LADDER_PLANES_AVX2(width)                                                                                      \
    AVX2 static void ladder_planes_##width##_avx2(                                                                     \
        const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes) {                            \
        enum { EACH = 64 / width };                                                                                    \
        __m256i words[LADDER_GROUPS][8], low[LADDER_GROUPS], high[LADDER_GROUPS];                                      \
        while (n_blocks) {                                                                                             \
            size_t n = 0;                                                                                              \
            for (; n < LADDER_GROUPS && n_blocks; n++, at += LADDER_GROUP_BYTES, keys += EACH) {                       \
                unsigned char last[LADDER_GROUP_BYTES] = {0};                                                          \
                uint64_t last_keys[EACH] = {0};                                                                        \
                const unsigned char *from = at;                                                                        \
                const uint64_t *by = keys;                                                                             \
                if (n_blocks < EACH) {                                                                                 \
                    from = memcpy(last, at, n_blocks * (LADDER_GROUP_BYTES / EACH));                                   \
                    by = memcpy(last_keys, keys, n_blocks * sizeof *keys);                                             \
                }                                                                                                      \
                n_blocks -= n_blocks < EACH ? n_blocks : EACH;                                                         \
                ladder_load_##width##_avx2(from, words[n]);                                                            \
                ladder_transpose_avx2(words[n]);                                                                       \
                low[n] = width == 32 ? ladder_load_keys_avx2(by)                                                       \
                                     : _mm256_loadu_si256((const void *)by);                                           \
                high[n] = _mm256_shuffle_epi32(low[n], 0xF5);                                                          \
            }                                                                                                          \
            ladder_multiply_avx2(words, low, high, n, width, planes);                                                  \
        }                                                                                                              \
    }

LADDER_PLANES_AVX2(16)
LADDER_PLANES_AVX2(32)

/* Range and squares of float32: the square of one is exact in float64, so that a fused multiply-add rounds as two operations. */
typedef struct {
    __m256 low, high;
    __m256d squares[4];
} LadderRange;

#define AVX2_FMA __attribute__((target("avx2,fma")))

AVX2_FMA static inline void ladder_add_range_avx2(LadderRange *range, const unsigned char *at, int n_bytes) {
    for (int i = 0; i < n_bytes; i += 64) {
        __m256 a = _mm256_loadu_ps((const void *)(at + i)), b = _mm256_loadu_ps((const void *)(at + i + 32));
        range->low = _mm256_min_ps(range->low, _mm256_min_ps(a, b));
        range->high = _mm256_max_ps(range->high, _mm256_max_ps(a, b));
        for (int k = 0; k < 4; k++) {
            __m256d x = _mm256_cvtps_pd(_mm_loadu_ps((const void *)(at + i + 16 * k)));
            range->squares[k] = _mm256_fmadd_pd(x, x, range->squares[k]);
        }
    }
}

typedef struct {
    uint64_t n_zero, n_neg_zero, n_subnormal;
} LadderSmall;

/* Zeros and subnormal numbers of a group, from its bit planes: a bit of a word is that plane of one element. */
AVX2 static inline void ladder_count_small_avx2(const __m256i *words, size_t n_blocks, LadderSmall *found) {
    __m256i lower = words[0];
    for (int p = 1; p < 7; p++) {
        lower = _mm256_or_si256(lower, words[p]);
    }
    /* The exponent is planes 23 to 30: the third word of the last register, and the fourth of the others. */
    __m256i exponents = _mm256_or_si256(lower, _mm256_shuffle_epi32(words[7], 0xA4));
    __m256i are_normal = _mm256_cmpeq_epi32(exponents, _mm256_set1_epi32(-1));
    if ((_mm256_movemask_ps(_mm256_castsi256_ps(are_normal)) & 0x88) == 0x88) {
        return;
    }
    uint32_t others[8], last[8];
    _mm256_storeu_si256((void *)others, lower);
    _mm256_storeu_si256((void *)last, words[7]);
    for (size_t i = 0; i < 4 * n_blocks; i += 4) {
        uint32_t small = ~(others[i + 3] | last[i + 2]), sign = last[i + 3];
        uint32_t mantissa = others[i] | others[i + 1] | others[i + 2] | last[i] | last[i + 1];
        found->n_zero += (uint64_t)__builtin_popcount(small & ~mantissa & ~sign);
        found->n_neg_zero += (uint64_t)__builtin_popcount(small & ~mantissa & sign);
        found->n_subnormal += (uint64_t)__builtin_popcount(small & mantissa);
    }
}

AVX2_FMA static sr_left ladder_both_32_avx2(
    const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes, SrValues *values) {
    enum { BLOCK = 4 * SR_LANES };
    __m256i words[LADDER_GROUPS][8], low[LADDER_GROUPS], high[LADDER_GROUPS];
    LadderRange range = {.low = _mm256_set1_ps(INFINITY), .high = _mm256_set1_ps(-INFINITY)};
    LadderSmall small = {0};
    size_t n_left = n_blocks;
    while (n_left) {
        size_t n = 0;
        for (; n < LADDER_GROUPS && n_left > 1; n++, n_left -= 2, at += 2 * BLOCK, keys += 2) {
            ladder_load_32_avx2(at, words[n]);
            ladder_add_range_avx2(&range, at, 2 * BLOCK);
            ladder_transpose_avx2(words[n]);
            ladder_count_small_avx2(words[n], 2, &small);
            low[n] = ladder_load_keys_avx2(keys);
            high[n] = _mm256_shuffle_epi32(low[n], 0xF5);
        }
        if (n < LADDER_GROUPS && n_left == 1) {
            unsigned char last[2 * BLOCK] = {0};
            uint64_t last_keys[2] = {*keys, 0};
            ladder_load_32_avx2(memcpy(last, at, BLOCK), words[n]);
            ladder_add_range_avx2(&range, at, BLOCK);
            ladder_transpose_avx2(words[n]);
            ladder_count_small_avx2(words[n], 1, &small);
            low[n] = ladder_load_keys_avx2(last_keys);
            high[n] = _mm256_shuffle_epi32(low[n], 0xF5);
            n++, n_left--;
        }
        ladder_multiply_avx2(words, low, high, n, 32, planes);
    }
    double lanes[16], sum = 0;
    float lowest[8], highest[8];
    _mm256_storeu_ps(lowest, range.low);
    _mm256_storeu_ps(highest, range.high);
    for (int k = 0; k < 4; k++) {
        _mm256_storeu_pd(lanes + 4 * k, range.squares[k]);
    }
    for (int i = 0; i < 16; i++) {
        sum += lanes[i];
    }
    if (!isfinite(sum)) { /* no sum of finite ones is so large */
        return SR_NOT_FINITE;
    }
    for (int i = 0; i < 8; i++) {
        values->min = (double)lowest[i] < values->min ? (double)lowest[i] : values->min;
        values->max = (double)highest[i] > values->max ? (double)highest[i] : values->max;
    }
    values->n_finite += n_blocks * SR_LANES;
    values->squares += sum;
    values->n_zero += small.n_zero, values->n_neg_zero += small.n_neg_zero, values->n_subnormal += small.n_subnormal;
    return SR_FINITE;
}

/* Of 8 bits a plane of a block is the sign bits of 32 bytes. */
AVX2 static void ladder_planes_8_avx2(const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes) {
    for (size_t b = 0; b < n_blocks; b++, at += SR_LANES) {
        __m256i bytes = _mm256_loadu_si256((const void *)at);
        for (int j = 7; j >= 0; j--) {
            planes[j] += (uint32_t)_mm256_movemask_epi8(bytes) * keys[b];
            bytes = _mm256_add_epi8(bytes, bytes);
        }
    }
}

/* Of 64 bits, both halves as of 32 bits. */
AVX2 static void ladder_planes_64_avx2(const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes) {
    for (size_t b = 0; b < n_blocks; b += LADDER_BATCH) {
        size_t n = n_blocks - b < LADDER_BATCH ? n_blocks - b : LADDER_BATCH;
        unsigned char lower[LADDER_BATCH * 4 * SR_LANES], upper[LADDER_BATCH * 4 * SR_LANES];
        for (size_t i = 0; i < 4 * n; i++, at += 64) {
            __m256 x = _mm256_loadu_ps((const void *)at), y = _mm256_loadu_ps((const void *)(at + 32));
            __m256i low = _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88));
            __m256i high = _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xDD));
            _mm256_storeu_si256((void *)(lower + 32 * i), _mm256_permute4x64_epi64(low, 0xD8));
            _mm256_storeu_si256((void *)(upper + 32 * i), _mm256_permute4x64_epi64(high, 0xD8));
        }
        ladder_planes_32_avx2(lower, n, keys + b, planes);
        ladder_planes_32_avx2(upper, n, keys + b, planes + 32);
    }
}

/* AVX-512 with GFNI and VBMI: bytes that hold the same 8 bit planes are brought together, 8 elements in 64 bits; an affine
 * transformation of the unit matrix transposes each 8 by 8 bits; and the bytes of each word are brought together. */

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512ifma,gfni")))

typedef struct {
    __m512i even_low, even_high, odd_low, odd_high; /* of 16 words */
} LadderSums;

AVX512 static inline __m512i ladder_words_avx512(__m512i bytes, __m512i by_word) {
    const __m512i unit = _mm512_set1_epi64((long long)0x8040201008040201u);
    return _mm512_permutexvar_epi8(by_word, _mm512_gf2p8affine_epi64_epi8(unit, bytes, 0));
}

/* Where the bytes of 16 words come from: bytes i of four of the 64-bit parts each. */
#define LADDER_WORD(a, b, c, d, i) (d) * 8 + (i), (c) * 8 + (i), (b) * 8 + (i), (a) * 8 + (i)
#define LADDER_8_WORDS(a, b, c, d)                                                                                     \
    LADDER_WORD(a, b, c, d, 7), LADDER_WORD(a, b, c, d, 6), LADDER_WORD(a, b, c, d, 5), LADDER_WORD(a, b, c, d, 4),    \
        LADDER_WORD(a, b, c, d, 3), LADDER_WORD(a, b, c, d, 2), LADDER_WORD(a, b, c, d, 1), LADDER_WORD(a, b, c, d, 0)
#define LADDER_BY_WORD _mm512_set_epi8(LADDER_8_WORDS(4, 5, 6, 7), LADDER_8_WORDS(0, 1, 2, 3))

/* Both halves of a key in all lanes. Of the upper one, the lower 32 bits count. */
AVX512 static inline void ladder_load_key_avx512(const uint64_t *key, __m512i *low, __m512i *high) {
    uint32_t upper;
    memcpy(&upper, (const char *)key + 4, sizeof upper);
    *low = _mm512_set1_epi64((long long)*key), *high = _mm512_set1_epi32((int)upper);
}

/* Of the upper half of the key only 32 bits of each product count, whatever comes above: one multiply-add has them. */
AVX512 static inline void ladder_add_avx512(LadderSums *sums, __m512i words, __m512i low, __m512i high) {
    __m512i odd = _mm512_srli_epi64(words, 32);
    sums->even_low = _mm512_add_epi64(sums->even_low, _mm512_mul_epu32(words, low));
    sums->even_high = _mm512_madd52lo_epu64(sums->even_high, words, high);
    sums->odd_low = _mm512_add_epi64(sums->odd_low, _mm512_mul_epu32(odd, low));
    sums->odd_high = _mm512_madd52lo_epu64(sums->odd_high, odd, high);
}

/* Add the sums of 16 words to n planes: word i to plane i % n. */
AVX512 static inline void ladder_store_avx512(const LadderSums *sums, int n, uint64_t *planes) {
    uint64_t even[8], odd[8];
    _mm512_storeu_si512(even, _mm512_add_epi64(sums->even_low, _mm512_slli_epi64(sums->even_high, 32)));
    _mm512_storeu_si512(odd, _mm512_add_epi64(sums->odd_low, _mm512_slli_epi64(sums->odd_high, 32)));
    for (int i = 0; i < 8; i++) {
        planes[2 * i % n] += even[i];
        planes[(2 * i + 1) % n] += odd[i];
    }
}

AVX512 static void ladder_planes_8_avx512(const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes) {
    const __m512i by_byte = _mm512_loadu_si512(ladder_bytes_8);
    LadderSums sums = {0};
    for (size_t b = 0; b < n_blocks; b += 2, at += 2 * SR_LANES) {
        __mmask64 there = n_blocks - b > 1 ? ~(__mmask64)0 : 0xFFFFFFFFu;
        __m512i words = ladder_words_avx512(_mm512_permutexvar_epi8(by_byte, _mm512_maskz_loadu_epi8(there, at)), LADDER_BY_WORD);
        __m512i low = _mm512_inserti64x4(
            _mm512_set1_epi64((long long)keys[b]), _mm256_set1_epi64x((long long)keys[b + 1]), 1);
        ladder_add_avx512(&sums, words, low, _mm512_srli_epi64(low, 32));
    }
    ladder_store_avx512(&sums, 8, planes);
}

AVX512 static void ladder_planes_16_avx512(const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes) {
    const __m512i by_byte = _mm512_loadu_si512(ladder_bytes_16);
    LadderSums sums = {0};
    for (size_t b = 0; b < n_blocks; b++, at += 2 * SR_LANES) {
        __m512i words = ladder_words_avx512(_mm512_permutexvar_epi8(by_byte, _mm512_loadu_si512(at)), LADDER_BY_WORD), low, high;
        ladder_load_key_avx512(keys + b, &low, &high);
        ladder_add_avx512(&sums, words, low, high);
    }
    ladder_store_avx512(&sums, 16, planes);
}

typedef struct {
    LadderSums lower, upper; /* of the lower and the upper 16 planes */
} LadderSums32;

/* x and y: 16 elements each. Their lower two bytes are brought together, x first, and their upper two, y first. */
AVX512 static inline void ladder_block_32_avx512(LadderSums32 *sums, __m512i x, __m512i y, const uint64_t *key) {
    const __m512i by_lower_word = _mm512_set_epi8(LADDER_8_WORDS(2, 3, 6, 7), LADDER_8_WORDS(0, 1, 4, 5));
    const __m512i by_upper_word = _mm512_set_epi8(LADDER_8_WORDS(6, 7, 2, 3), LADDER_8_WORDS(4, 5, 0, 1));
    __m512i low, high;
    ladder_load_key_avx512(key, &low, &high);
    x = _mm512_permutexvar_epi8(_mm512_loadu_si512(ladder_bytes_32[0]), x);
    y = _mm512_permutexvar_epi8(_mm512_loadu_si512(ladder_bytes_32[1]), y);
    ladder_add_avx512(&sums->lower, ladder_words_avx512(_mm512_mask_blend_epi64(0xF0, x, y), by_lower_word), low, high);
    ladder_add_avx512(&sums->upper, ladder_words_avx512(_mm512_mask_blend_epi64(0x0F, x, y), by_upper_word), low, high);
}

AVX512 static void ladder_planes_32_avx512(const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes) {
    LadderSums32 sums = {0};
    for (size_t b = 0; b < n_blocks; b++, at += 4 * SR_LANES) {
        ladder_block_32_avx512(&sums, _mm512_loadu_si512(at), _mm512_loadu_si512(at + 64), keys + b);
    }
    ladder_store_avx512(&sums.lower, 16, planes);
    ladder_store_avx512(&sums.upper, 16, planes + 16);
}

/* Of 16 float32: the square of one is exact in float64, so that a fused multiply-add rounds as two operations do. */
AVX512 static inline __m512d ladder_add_squares_avx512(__m512d sum, const unsigned char *at) {
    __m512d x = _mm512_cvtps_pd(_mm256_loadu_ps((const void *)at)), y = _mm512_cvtps_pd(_mm256_loadu_ps((const void *)(at + 32)));
    return _mm512_fmadd_pd(y, y, _mm512_fmadd_pd(x, x, sum));
}

AVX512 static sr_left ladder_both_32_avx512(
    const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes, SrValues *values) {
    enum { LEAST_SIZE = 0xA, AHEAD = 1024 };
    LadderSums32 sums = {0};
    __m512 low = _mm512_set1_ps(INFINITY), high = _mm512_set1_ps(-INFINITY), least = low;
    __m512d squares = _mm512_setzero_pd(), more_squares = squares;
    for (size_t b = 0; b < n_blocks; b++, at += 4 * SR_LANES) {
        __m512i x = _mm512_loadu_si512(at), y = _mm512_loadu_si512(at + 64);
        _mm_prefetch((const void *)(at + AHEAD), _MM_HINT_T0);
        _mm_prefetch((const void *)(at + AHEAD + 64), _MM_HINT_T0);
        ladder_block_32_avx512(&sums, x, y, keys + b);
        __m512 a = _mm512_castsi512_ps(x), c = _mm512_castsi512_ps(y);
        low = _mm512_min_ps(low, _mm512_min_ps(a, c));
        high = _mm512_max_ps(high, _mm512_max_ps(a, c));
        least = _mm512_range_ps(least, _mm512_range_ps(a, c, LEAST_SIZE), LEAST_SIZE);
        squares = ladder_add_squares_avx512(squares, at);
        more_squares = ladder_add_squares_avx512(more_squares, at + 64);
    }
    ladder_store_avx512(&sums.lower, 16, planes);
    ladder_store_avx512(&sums.upper, 16, planes + 16);
    double sum = _mm512_reduce_add_pd(_mm512_add_pd(squares, more_squares));
    if (!isfinite(sum)) { /* no sum of finite ones is so large */
        return SR_NOT_FINITE;
    }
    double lowest = (double)_mm512_reduce_min_ps(low), highest = (double)_mm512_reduce_max_ps(high);
    values->n_finite += n_blocks * SR_LANES;
    values->squares += sum;
    values->min = lowest < values->min ? lowest : values->min;
    values->max = highest > values->max ? highest : values->max;
    return _mm512_reduce_min_ps(least) < 0x1p-126f ? SR_SMALL : SR_FINITE;
}

/* By integers: a processor may be told to take subnormal numbers for zeros. */
AVX512 void sr_count_small(SrValues *v, const unsigned char *at, size_t n_blocks) {
    const __m512i size_bits = _mm512_set1_epi32(0x7fffffff), normal = _mm512_set1_epi32(0x00800000), one = _mm512_set1_epi32(1);
    __m512i zeros = _mm512_setzero_si512(), without_size = zeros, small = zeros;
    for (const unsigned char *end = at + n_blocks * 4 * SR_LANES; at < end; at += sizeof(__m512i)) {
        __m512i x = _mm512_loadu_si512(at), size = _mm512_and_si512(x, size_bits);
        zeros = _mm512_mask_add_epi32(zeros, _mm512_testn_epi32_mask(x, x), zeros, one);
        without_size = _mm512_mask_add_epi32(without_size, _mm512_testn_epi32_mask(size, size), without_size, one);
        small = _mm512_mask_add_epi32(small, _mm512_cmplt_epu32_mask(size, normal), small, one);
    }
    uint64_t n_zero = (uint64_t)_mm512_reduce_add_epi32(zeros), n_without = (uint64_t)_mm512_reduce_add_epi32(without_size);
    v->n_zero += n_zero, v->n_neg_zero += n_without - n_zero;
    v->n_subnormal += (uint64_t)_mm512_reduce_add_epi32(small) - n_without;
}

AVX512 static void ladder_planes_64_avx512(const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes) {
    const __m512i by_half = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    for (size_t b = 0; b < n_blocks; b += LADDER_BATCH) {
        size_t n = n_blocks - b < LADDER_BATCH ? n_blocks - b : LADDER_BATCH;
        unsigned char low[LADDER_BATCH * 4 * SR_LANES], high[LADDER_BATCH * 4 * SR_LANES];
        for (size_t i = 0; i < 2 * n; i++, at += 128) {
            __m512i x = _mm512_loadu_si512(at), y = _mm512_loadu_si512(at + 64);
            _mm512_storeu_si512(low + 64 * i, _mm512_permutex2var_epi32(x, by_half, y));
            __m512i upper = _mm512_permutex2var_epi32(_mm512_srli_epi64(x, 32), by_half, _mm512_srli_epi64(y, 32));
            _mm512_storeu_si512(high + 64 * i, upper);
        }
        ladder_planes_32_avx512(low, n, keys + b, planes);
        ladder_planes_32_avx512(high, n, keys + b, planes + 32);
    }
}

#define LADDER_SET(width) {ladder_planes_##width##_plain, ladder_planes_##width##_avx2, ladder_planes_##width##_avx512}
#else
#define LADDER_SET(width) {ladder_planes_##width##_plain, ladder_planes_##width##_plain, ladder_planes_##width##_plain}
#endif

sr_add_planes sr_planes_function(int width, sr_instructions instructions) {
    static const sr_add_planes functions[4][3] = {LADDER_SET(8), LADDER_SET(16), LADDER_SET(32), LADDER_SET(64)};
    return functions[width == 8 ? 0 : width == 16 ? 1 : width == 32 ? 2 : 3][instructions];
}

sr_add_both sr_both_function(sr_number number, int width, sr_instructions instructions) {
#ifdef SR_HAS_X86_SETS
    int is_float32 = number == SR_FLOAT && width == 32;
    return !is_float32 || instructions == SR_PLAIN ? NULL : instructions == SR_AVX512 ? ladder_both_32_avx512 : ladder_both_32_avx2;
#else
    (void)number, (void)width, (void)instructions;
    return NULL;
#endif
}

#ifndef SR_HAS_X86_SETS
void sr_count_small(SrValues *v, const unsigned char *at, size_t n_blocks) { (void)v, (void)at, (void)n_blocks; }
#endif
