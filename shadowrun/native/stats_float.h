/* Statistics of one floating-point format: included for each format and each set of instructions.

   The includer defines FORMAT (a name), WIDTH (bits: 8, 16, 32, 64), VALUE (float or double, for the arithmetic),
   VALUE_WIDTH, BLOCK (elements), and WIDEN(bits, wide) if VALUE is another format; WIDEN_MANY(from, to) may widen 16
   numbers at a time. A chunk has STATS_BLOCKS blocks: CHUNK of numerics/diff.py. */

#define FN(x) STATS_JOIN(x, FORMAT, INSTRUCTIONS)
#define UINT_(w) uint##w##_t
#define UINT(w) UINT_(w)
#define INT_(w) int##w##_t
#define INT(w) INT_(w)
#define BITS UINT(WIDTH)
#define CODE UINT(VALUE_WIDTH)
#define ORDER INT(VALUE_WIDTH)
#if WIDTH == 8 /* one format has no sign; and 256 does not fit into 8 bits */
#define STEP uint8_t
#define COUNT uint32_t
#else
#define STEP INT(WIDTH)
#define COUNT BITS
#endif
#define CHUNK ((size_t)STATS_BLOCKS * BLOCK)
#define SIGN ((BITS)1 << (WIDTH - 1))
#define CODE_SIGN ((CODE)1 << (VALUE_WIDTH - 1))
#define MANTISSA (VALUE_WIDTH == 64 ? 52 : 23)
#define INFINITE ((ORDER)(CODE_SIGN - ((CODE)1 << MANTISSA)))
#define ONE ((ORDER)(((CODE)1 << (VALUE_WIDTH - 2)) - ((CODE)1 << MANTISSA)))

struct FN(block) {
    size_t start, n;
    int differs, unclean; /* unclean: it has NaN or infinities, which are taken for 0 */
    BITS any_xor, steps;
    ORDER gap, ratio; /* greatest sizes, as bits */
    double squares;
};

struct FN(room) {
    CODE actual[BLOCK], expected[BLOCK];
#ifdef WIDEN
    BITS bits_actual[BLOCK], bits_expected[BLOCK];
#endif
};

struct FN(view) {
    stats_memory actual, expected, bits_actual, bits_expected;
};

/* Loops over the elements of one block. They have no branches, and hold maxima as integers (floats without a sign order
   as their bits do), so that compilers make vectors of them without being allowed to change what floats mean. */

static inline BITS FN(bits)(stats_memory at, size_t i) {
    BITS bits;
    memcpy(&bits, at + i * sizeof bits, sizeof bits);
    return bits;
}

static inline VALUE FN(value)(stats_memory at, size_t i) {
    VALUE value;
    memcpy(&value, at + i * sizeof value, sizeof value);
    return value;
}

static inline CODE FN(code)(VALUE value) {
    CODE code;
    memcpy(&code, &value, sizeof code);
    return code;
}

static inline VALUE FN(decoded)(ORDER code) {
    VALUE value;
    memcpy(&value, &code, sizeof value);
    return value;
}

static inline ORDER FN(size)(VALUE value) { return (ORDER)(FN(code)(value) & ~CODE_SIGN); }

#ifdef WIDEN
TARGET static void FN(widen)(stats_memory from, size_t n, const float *wide, CODE *to) {
    size_t i = 0;
    (void)wide;
#ifdef WIDEN_MANY
    for (; i + 16 <= n; i += 16) WIDEN_MANY(from + i * sizeof(BITS), to + i);
#endif
    for (; i < n; i++) to[i] = WIDEN(FN(bits)(from, i), wide);
}
#endif

TARGET static void FN(look_at_bits)(const struct FN(view) *v, size_t n, struct FN(block) *b, uint64_t *different) {
    BITS any = 0;
    STEP steps = 0;
    COUNT count = 0;
    for (size_t i = 0; i < n; i++) {
        BITS a = FN(bits)(v->bits_actual, i), e = FN(bits)(v->bits_expected, i);
        any |= a ^ e;
        count += a != e;
        STEP step = (STEP)((STEP)a > (STEP)e ? a - e : e - a); /* of no meaning where signs differ */
        steps = step > steps ? step : steps;
    }
    b->any_xor = any;
    b->steps = (BITS)steps;
    *different = count;
}

/* The same where signs may differ: bits are mapped to integers that order as the numbers do. */
TARGET static BITS FN(steps_across_zero)(const struct FN(view) *v, size_t n) {
    typedef INT(WIDTH) line;
    BITS steps = 0;
    for (size_t i = 0; i < n; i++) {
        BITS a = FN(bits)(v->bits_actual, i), e = FN(bits)(v->bits_expected, i);
        BITS minus_a = (BITS)(0 - (BITS)(a >> (WIDTH - 1))), minus_e = (BITS)(0 - (BITS)(e >> (WIDTH - 1)));
        line x = (line)(BITS)((a ^ (minus_a & (BITS)~SIGN)) - minus_a), y = (line)(BITS)((e ^ (minus_e & (BITS)~SIGN)) - minus_e);
        BITS step = (BITS)(x > y ? (BITS)x - (BITS)y : (BITS)y - (BITS)x);
        steps = step > steps ? step : steps;
    }
    return steps;
}

TARGET static void FN(look_at_values)(const struct FN(view) *v, size_t n, struct FN(block) *b) {
    ORDER gaps = 0, ratios = 0;
    for (size_t i = 0; i < n; i++) {
        VALUE a = FN(value)(v->actual, i), e = FN(value)(v->expected, i), difference = a - e;
        ORDER gap = FN(size)(difference), ratio = FN(size)(difference / e);
        ratio &= -(ORDER)(ratio <= INFINITE); /* 0 / 0 */
        gaps = gap > gaps ? gap : gaps;
        ratios = ratio > ratios ? ratio : ratios;
    }
    b->gap = gaps;
    b->ratio = ratios;
}

TARGET static double FN(sum_of_squares)(const struct FN(view) *v, size_t n) {
    double lanes[STATS_LANES] = {0};
    size_t whole = n - n % STATS_LANES;
    for (size_t i = 0; i < whole; i += STATS_LANES)
        for (size_t j = 0; j < STATS_LANES; j++) {
            double gap = (double)(FN(value)(v->actual, i + j) - FN(value)(v->expected, i + j));
            lanes[j] += gap * gap;
        }
    for (size_t j = 0; j < n - whole; j++) {
        double gap = (double)(FN(value)(v->actual, whole + j) - FN(value)(v->expected, whole + j));
        lanes[j] += gap * gap;
    }
    return stats_sum_of_lanes(lanes);
}

/* Zeros against subnormal and other numbers. */
TARGET static void FN(count_zeros)(const struct FN(view) *v, size_t n, VALUE normal, struct stats_totals *t) {
    CODE from_zero = 0, subnormal = 0;
    for (size_t i = 0; i < n; i++) {
        VALUE a = FN(value)(v->actual, i), e = FN(value)(v->expected, i);
        CODE no_a = a == 0, no_e = e == 0;
        from_zero += no_e & (no_a ^ 1);
        subnormal += (no_a ^ no_e) & (CODE)(FN(size)(a) < FN(size)(normal)) & (CODE)(FN(size)(e) < FN(size)(normal));
    }
    t->n_from_zero += from_zero;
    t->n_subnormal += subnormal;
}

/* The greatest ratio without those to zeros. */
TARGET static ORDER FN(proper_ratio)(const struct FN(view) *v, size_t n) {
    ORDER ratios = 0;
    for (size_t i = 0; i < n; i++) {
        VALUE a = FN(value)(v->actual, i), e = FN(value)(v->expected, i);
        ORDER ratio = FN(size)((a - e) / e);
        ratio &= -(ORDER)(e != 0);
        ratios = ratio > ratios ? ratio : ratios;
    }
    return ratios;
}

TARGET static uint64_t FN(zero_signs)(const struct FN(view) *v, size_t n) {
    CODE count = 0;
    for (size_t i = 0; i < n; i++) {
        VALUE a = FN(value)(v->actual, i), e = FN(value)(v->expected, i);
        count += (CODE)(a == 0) & (CODE)((FN(code)(a) ^ FN(code)(e)) == CODE_SIGN);
    }
    return count;
}

TARGET static size_t FN(not_finite)(stats_memory values, size_t n) {
    CODE count = 0;
    for (size_t i = 0; i < n; i++) count += FN(size)(FN(value)(values, i)) >= INFINITE;
    return (size_t)count;
}

TARGET static void FN(mask)(const CODE *keep, stats_memory from, size_t n, CODE *to) {
    if (from != (stats_memory)to) memcpy(to, from, n * sizeof *to);
    for (size_t i = 0; i < n; i++) to[i] &= keep[i];
}

/* Copies of both sides with +0 where one of them is NaN or infinite. Returns how many these are. */
TARGET static size_t FN(clean)(struct FN(view) *v, size_t n, struct FN(room) *room) {
    CODE keep[BLOCK], kept = 0;
    for (size_t i = 0; i < n; i++) {
        VALUE a = FN(value)(v->actual, i), e = FN(value)(v->expected, i);
        CODE finite = (CODE)(FN(size)(a) < INFINITE) & (CODE)(FN(size)(e) < INFINITE);
        keep[i] = 0 - finite;
        kept += finite;
    }
    FN(mask)(keep, v->actual, n, room->actual);
    FN(mask)(keep, v->expected, n, room->expected);
    v->actual = (stats_memory)room->actual, v->expected = (stats_memory)room->expected;
#ifdef WIDEN
    for (size_t i = 0; i < n; i++) {
        room->bits_actual[i] = FN(bits)(v->bits_actual, i) & (BITS)keep[i];
        room->bits_expected[i] = FN(bits)(v->bits_expected, i) & (BITS)keep[i];
    }
    v->bits_actual = (stats_memory)room->bits_actual, v->bits_expected = (stats_memory)room->bits_expected;
#else
    v->bits_actual = v->actual, v->bits_expected = v->expected;
#endif
    return n - (size_t)kept;
}

/* Elements that are NaN or infinite on a side. */
TARGET static void FN(look_at_classes)(const struct FN(view) *v, size_t n, size_t start, struct stats_totals *t) {
    COUNT nan = 0, inf = 0;
    BITS any = 0;
    for (size_t i = 0; i < n; i++) {
        ORDER a = FN(size)(FN(value)(v->actual, i)), e = FN(size)(FN(value)(v->expected, i));
        BITS xor = FN(bits)(v->bits_actual, i) ^ FN(bits)(v->bits_expected, i);
        COUNT nan_a = a > INFINITE, nan_e = e > INFINITE;
        nan += nan_a ^ nan_e;
        inf += ((nan_a | nan_e) ^ 1) & (COUNT)((a == INFINITE) | (e == INFINITE)) & (COUNT)(xor != 0);
        any |= (BITS)(xor & (BITS)((BITS)(nan_a & nan_e) - 1));
    }
    t->n_nan += nan;
    t->n_inf += inf;
    t->any_xor |= any;
    if (nan + inf == 0 || t->worst_is_class) return;
    for (size_t i = 0; i < n; i++) {
        ORDER a = FN(size)(FN(value)(v->actual, i)), e = FN(size)(FN(value)(v->expected, i));
        int differ = FN(bits)(v->bits_actual, i) != FN(bits)(v->bits_expected, i);
        if (differ && (a >= INFINITE || e >= INFINITE) && !(a > INFINITE && e > INFINITE)) {
            t->worst = (int64_t)(start + i);
            t->worst_is_class = 1;
            return;
        }
    }
}

/* The greatest ratio as float64 gives it. */
TARGET static double FN(exact_ratio)(const struct FN(view) *v, size_t n) {
    int64_t ratios = 0;
    for (size_t i = 0; i < n; i++) {
        double a = (double)FN(value)(v->actual, i), e = (double)FN(value)(v->expected, i), ratio = (a - e) / e;
        int64_t size;
        memcpy(&size, &ratio, sizeof size);
        size &= INT64_MAX & -(int64_t)(e != 0);
        ratios = size > ratios ? size : ratios;
    }
    double greatest;
    memcpy(&greatest, &ratios, sizeof greatest);
    return greatest;
}

/* Blocks and chunks. */

/* Where the values of a block are: in the tensors themselves, or widened in the room. */
TARGET static struct FN(view) FN(open)(const struct stats_input *in, size_t start, size_t n, struct FN(room) *room) {
    struct FN(view) v;
    v.bits_actual = in->actual + start * sizeof(BITS), v.bits_expected = in->expected + start * sizeof(BITS);
#ifdef WIDEN
    FN(widen)(v.bits_actual, n, in->wide, room->actual);
    FN(widen)(v.bits_expected, n, in->wide, room->expected);
    v.actual = (stats_memory)room->actual, v.expected = (stats_memory)room->expected;
#else
    (void)n, (void)room;
    v.actual = v.bits_actual, v.expected = v.bits_expected;
#endif
    return v;
}

TARGET static struct FN(view) FN(reopen)(const struct stats_input *in, const struct FN(block) *b, struct FN(room) *room) {
    struct FN(view) v = FN(open)(in, b->start, b->n, room);
    if (b->unclean) FN(clean)(&v, b->n, room);
    return v;
}

/* Returns how many elements are not finite. */
TARGET static size_t FN(add_block)(struct stats_totals *t, const struct stats_input *in, struct FN(block) *b, struct FN(room) *room) {
    stats_memory actual = in->actual + b->start * sizeof(BITS), expected = in->expected + b->start * sizeof(BITS);
    struct FN(view) v = FN(open)(in, b->start, b->n, room);
    uint64_t different = 0, cleaned;
    size_t left_out = 0;
    b->differs = memcmp(actual, expected, b->n * sizeof(BITS)) != 0;
    if (!b->differs) return FN(not_finite)(v.actual, b->n);
    FN(look_at_bits)(&v, b->n, b, &different);
    FN(look_at_values)(&v, b->n, b);
    t->n_different += different;
    if (b->gap >= INFINITE) {
        FN(look_at_classes)(&v, b->n, b->start, t);
        left_out = FN(clean)(&v, b->n, room);
        b->unclean = left_out > 0;
        if (b->unclean) {
            FN(look_at_bits)(&v, b->n, b, &cleaned);
            FN(look_at_values)(&v, b->n, b);
        }
    }
    b->squares = FN(sum_of_squares)(&v, b->n);
    t->any_xor |= b->any_xor;
    if (in->is_signed && b->any_xor & SIGN) {
        b->steps = FN(steps_across_zero)(&v, b->n);
        t->n_zero_sign += FN(zero_signs)(&v, b->n);
    }
    if (b->steps > t->max_ulp) t->max_ulp = b->steps;
    return left_out;
}

/* Offer the first of the elements with the greatest gap; if exact, the one that float64 finds the greatest of them. */
TARGET static void FN(offer_gap)(
    struct stats_totals *t, const struct stats_input *in, const struct FN(block) *blocks, size_t n_blocks, ORDER gap, int exact,
    struct FN(room) *room) {
    double greatest = (double)FN(decoded)(gap), best = -1.0;
    size_t index = blocks[0].start;
    if (gap == 0) {
        stats_offer(t, 0.0, index);
        return;
    }
    if (!stats_wants(t, exact ? greatest * (1 + STATS_NEARLY) : greatest)) return;
    for (size_t k = 0; k < n_blocks; k++) {
        const struct FN(block) *b = blocks + k;
        if (!b->differs || b->gap != gap) continue;
        struct FN(view) v = FN(reopen)(in, b, room);
        for (size_t i = 0; i < b->n; i++) {
            VALUE a = FN(value)(v.actual, i), e = FN(value)(v.expected, i);
            if (FN(size)(a - e) != gap) continue;
            double size = exact ? fabs((double)a - (double)e) : greatest;
            if (size > best) best = size, index = b->start + i;
            if (!exact) break;
        }
        if (!exact) break;
    }
    stats_offer(t, best, index);
}

TARGET static void FN(add_ratio)(
    struct stats_totals *t, const struct stats_input *in, struct FN(block) *blocks, size_t n_blocks, int exact,
    struct FN(room) *room) {
    ORDER ratio = 0;
    for (size_t k = 0; k < n_blocks; k++) {
        struct FN(block) *b = blocks + k;
        if (!b->differs) continue;
        if (b->ratio >= ONE) { /* a zero on the target gives 1, one on the reference an infinity */
            struct FN(view) v = FN(reopen)(in, b, room);
            FN(count_zeros)(&v, b->n, (VALUE)in->normal, t);
            if (b->ratio == INFINITE) exact = 1, b->ratio = FN(proper_ratio)(&v, b->n);
        }
        ratio = b->ratio > ratio ? b->ratio : ratio;
    }
    double greatest = (double)FN(decoded)(ratio);
    if (VALUE_WIDTH == 32 && exact && greatest * (1 + STATS_NEARLY) > t->max_rel) {
        double least = isinf(greatest) ? 0 : greatest * (1 - STATS_NEARLY); /* where one overflows, another may be greater */
        greatest = 0;
        for (size_t k = 0; k < n_blocks; k++) {
            struct FN(block) *b = blocks + k;
            if (!b->differs || (double)FN(decoded)(b->ratio) < least) continue;
            struct FN(view) v = FN(reopen)(in, b, room);
            double size = FN(exact_ratio)(&v, b->n);
            greatest = size > greatest ? size : greatest;
        }
    }
    if (greatest > t->max_rel) t->max_rel = greatest;
}

/* The sum of squares of a chunk in which they, or differences, may have overflowed or vanished. */
static double FN(scaled_squares)(
    const struct stats_input *in, const struct FN(block) *blocks, size_t n_blocks, ORDER gap, struct FN(room) *room) {
    double sum = 0, scale = gap == 0 ? 1.0 : (double)FN(decoded)(gap);
    if (VALUE_WIDTH == 32 && gap >= INFINITE) scale = FLT_MAX; /* float64 holds every difference of two float32 */
    if (!isfinite(scale)) return INFINITY;
    for (size_t k = 0; k < n_blocks; k++) {
        if (!blocks[k].differs) continue;
        struct FN(view) v = FN(reopen)(in, blocks + k, room);
        for (size_t i = 0; i < blocks[k].n; i++) {
            double share = ((double)FN(value)(v.actual, i) - (double)FN(value)(v.expected, i)) / scale;
            sum += share * share;
        }
    }
    return sum * scale * scale;
}

TARGET static void FN(add_chunk)(struct stats_totals *t, const struct stats_input *in, size_t start, size_t n) {
    struct FN(block) blocks[STATS_BLOCKS];
    struct FN(room) room;
    size_t n_blocks = 0, left_out = 0;
    int differs = 0, mixed = 0;
    ORDER gap = 0;
    double squares = 0;
    for (size_t at = 0; at < n; at += BLOCK) {
        struct FN(block) *b = blocks + n_blocks++;
        *b = (struct FN(block)){.start = start + at, .n = n - at < BLOCK ? n - at : BLOCK};
        left_out += FN(add_block)(t, in, b, &room);
        differs |= b->differs;
        mixed |= in->is_signed && b->any_xor & SIGN;
        gap = b->gap > gap ? b->gap : gap;
        squares += b->squares;
    }
    if (left_out == n) return;
    t->n_finite += n - left_out;
    if (!differs) return;
    /* As in the specification: float64 where the squares overflow or vanish, for one. */
    int proper = squares > (double)n * in->vanishing && squares <= (VALUE_WIDTH == 32 ? (double)FLT_MAX : DBL_MAX);
    int exact = left_out || mixed || !proper;
    FN(add_ratio)(t, in, blocks, n_blocks, exact, &room);
    FN(offer_gap)(t, in, blocks, n_blocks, gap, VALUE_WIDTH == 32 && exact, &room);
    if (!proper) squares = FN(scaled_squares)(in, blocks, n_blocks, gap, &room);
    t->squares += squares;
}

TARGET static void FN(add)(struct stats_totals *t, const struct stats_input *in) {
    struct FN(room) room;
    for (size_t at = 0; at < in->n; at += CHUNK) FN(add_chunk)(t, in, at, in->n - at < CHUNK ? in->n - at : CHUNK);
    struct FN(view) v = FN(open)(in, (size_t)(t->worst < 0 ? 0 : t->worst), 1, &room);
    t->worst_actual = (double)FN(value)(v.actual, 0);
    t->worst_expected = (double)FN(value)(v.expected, 0);
}

#undef FN
#undef BITS
#undef CODE
#undef ORDER
#undef STEP
#undef COUNT
#undef SIGN
#undef CHUNK
#undef CODE_SIGN
#undef MANTISSA
#undef INFINITE
#undef ONE
#undef FORMAT
#undef WIDTH
#undef VALUE
#undef VALUE_WIDTH
#undef BLOCK
#undef WIDEN
#undef WIDEN_MANY
