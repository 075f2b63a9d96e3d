/* Classes, range and squares of one format: included by digest_values_sets.h for each format and set of instructions.

   The includer defines FORMAT (a name), WIDTH, and for floats MANTISSA; WIDEN(bits), the bits of the float of a number of
   16 bits, and WIDEN_MANY(from, to), if it widens 16 at once; for integers NUMBER, the type, and SQUARE, one that holds the
   squares of 64 elements. */

#define FN(x) VALUES_JOIN(x, FORMAT, INSTRUCTIONS)
#define UINT VALUES_TYPE(uint, WIDTH)
#define INT VALUES_TYPE(int, WIDTH)

#ifdef MANTISSA
#define SIGN ((UINT)((UINT)1 << (WIDTH - 1)))
#define NORMAL ((UINT)((UINT)1 << MANTISSA))
#define INFINITE ((UINT)(SIGN - NORMAL))

static inline double FN(value)(UINT bits) {
#ifdef WIDEN
    return (double)values_float(WIDEN(bits));
#elif WIDTH == 32
    return (double)values_float(bits);
#else
    return values_double(bits);
#endif
}

/* Integers that order as the numbers do, and back: an order is its own inverse. */
static inline INT FN(order)(UINT bits) { return (INT)(bits ^ ((UINT)((INT)bits >> (WIDTH - 1)) & (UINT)(SIGN - 1))); }

TARGET static void FN(count)(SrValues *v, const UINT *bits, size_t n) {
    UINT n_nan = 0, n_pos = 0, n_neg = 0, n_zero = 0, n_neg_zero = 0, n_subnormal = 0; /* a chunk has few elements */
    for (size_t i = 0; i < n; i++) {
        UINT size = (UINT)(bits[i] & (SIGN - 1));
        n_nan += size > INFINITE;
        n_pos += bits[i] == INFINITE;
        n_neg += bits[i] == (UINT)(INFINITE | SIGN);
        n_zero += bits[i] == 0;
        n_neg_zero += bits[i] == SIGN;
        n_subnormal += (UINT)(size - 1) < (UINT)(NORMAL - 1);
    }
    v->n_nan += n_nan, v->n_pos_inf += n_pos, v->n_neg_inf += n_neg;
    v->n_zero += n_zero, v->n_neg_zero += n_neg_zero, v->n_subnormal += n_subnormal;
    v->n_finite -= (size_t)n_nan + n_pos + n_neg;
}

/* In the order of the numbers, infinities and NaNs are at both ends. They count as zero, and change neither end. */
TARGET static void FN(add_piece)(SrValues *v, const UINT *bits, size_t n) {
    const INT infinite = FN(order)(INFINITE), negative_infinite = FN(order)((UINT)(INFINITE | SIGN));
    UINT least = INFINITE;
    INT low = infinite, high = negative_infinite;
    double lanes[VALUES_LANES] = {0};
    for (size_t i = 0; i < n; i++) {
        UINT size = (UINT)(bits[i] & (SIGN - 1));
        INT order = FN(order)(bits[i]);
        least = size < least ? size : least;
        low = order < low ? order : low;
        high = order > high ? order : high;
    }
    int all_finite = high < infinite && low > negative_infinite;
    v->n_finite += n;
    if (!all_finite || least < NORMAL) {
        FN(count)(v, bits, n);
    }
    UINT finite[VALUES_PIECE];
    if (!all_finite) {
        low = infinite, high = negative_infinite;
        for (size_t i = 0; i < n; i++) {
            UINT is_finite = (UINT)(0 - (UINT)((UINT)(bits[i] & (SIGN - 1)) < INFINITE));
            INT order = FN(order)(bits[i]);
            INT lower = is_finite ? order : low, upper = is_finite ? order : high;
            finite[i] = bits[i] & is_finite;
            low = lower < low ? lower : low;
            high = upper > high ? upper : high;
        }
        bits = finite;
    }
    size_t whole = n - n % VALUES_LANES;
    for (size_t i = 0; i < whole; i += VALUES_LANES) {
#ifdef WIDEN_MANY
        float wide[VALUES_LANES];
        WIDEN_MANY(bits + i, wide);
#endif
        for (size_t j = 0; j < VALUES_LANES; j++) {
#ifdef WIDEN_MANY
            double value = (double)wide[j];
#else
            double value = FN(value)(bits[i + j]);
#endif
            lanes[j] += value * value;
        }
    }
    for (size_t i = whole; i < n; i++) {
        double value = FN(value)(bits[i]);
        lanes[i - whole] += value * value;
    }
    values_range(v, FN(value)((UINT)FN(order)((UINT)low)), FN(value)((UINT)FN(order)((UINT)high)));
    v->squares += values_sum(lanes);
}

#undef SIGN
#undef NORMAL
#undef INFINITE
#else
TARGET static void FN(add_piece)(SrValues *v, const UINT *bits, size_t n) {
    uint32_t n_zero = 0;
    NUMBER low = (NUMBER)bits[0], high = low;
    SQUARE lanes[VALUES_LANES] = {0};
    for (size_t i = 0; i < n; i++) {
        NUMBER number = (NUMBER)bits[i];
        low = number < low ? number : low;
        high = number > high ? number : high;
    }
    for (size_t first = 0; first < n; first += VALUES_FEW) {
        size_t stop = n - first < VALUES_FEW ? n : first + VALUES_FEW;
        UINT zeros = 0;
        for (size_t i = first; i < stop; i++) {
            zeros = (UINT)(zeros + (bits[i] == 0));
        }
        n_zero += zeros;
    }
    size_t whole = n - n % VALUES_LANES;
    for (size_t i = 0; i < whole; i += VALUES_LANES) {
        for (size_t j = 0; j < VALUES_LANES; j++) {
            SQUARE number = (SQUARE)(NUMBER)bits[i + j];
            lanes[j] += number * number;
        }
    }
    for (size_t i = whole; i < n; i++) {
        SQUARE number = (SQUARE)(NUMBER)bits[i];
        lanes[i - whole] += number * number;
    }
    v->n_finite += n, v->n_zero += n_zero;
    values_range(v, (double)low, (double)high);
    for (size_t j = 0; j < VALUES_LANES; j++) {
        v->squares += (double)lanes[j];
    }
}
#endif

TARGET static void FN(add)(SrValues *v, const unsigned char *at, size_t n) {
    UINT piece[VALUES_PIECE];
    int is_aligned = (uintptr_t)at % sizeof *piece == 0; /* tensors may lie at any address */
    for (size_t first = 0; first < n; first += VALUES_PIECE) {
        size_t m = n - first < VALUES_PIECE ? n - first : VALUES_PIECE;
        const unsigned char *from = at + first * sizeof *piece;
        FN(add_piece)(v, is_aligned ? (const UINT *)(const void *)from : memcpy(piece, from, m * sizeof *piece), m);
    }
}

#undef FN
#undef UINT
#undef INT
#undef FORMAT
#undef WIDTH
#undef MANTISSA
#undef WIDEN
#undef WIDEN_MANY
#undef NUMBER
#undef SQUARE
