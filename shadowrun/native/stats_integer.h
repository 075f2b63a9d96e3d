/* Statistics of one integer type, bool among them: included for each type and each set of instructions.

   The includer defines FORMAT (its name), NUMBER (the type), SIZE (the unsigned type of its width), TWICE (the
   unsigned type of twice its width, if there is one), and SQUARES (a type that holds the sum of squares of a block). */

#define FN(x) STATS_JOIN(x, FORMAT, INSTRUCTIONS)
#define BLOCK 2048
#define CHUNK ((size_t)STATS_BLOCKS * BLOCK)
#define FEW 128 /* elements counted in a type as narrow as theirs */

static inline NUMBER FN(number)(stats_memory at, size_t i) {
    NUMBER number;
    memcpy(&number, at + i * sizeof number, sizeof number);
    return number;
}

static inline SIZE FN(distance)(NUMBER a, NUMBER e) { return (SIZE)(a > e ? (SIZE)a - (SIZE)e : (SIZE)e - (SIZE)a); }

static inline SIZE FN(size)(NUMBER e) { return FN(distance)(e, 0); }

TARGET static SIZE FN(greatest_gap)(stats_memory actual, stats_memory expected, size_t n) {
    SIZE greatest = 0;
    for (size_t i = 0; i < n; i++) {
        SIZE gap = FN(distance)(FN(number)(actual, i), FN(number)(expected, i));
        greatest = gap > greatest ? gap : greatest;
    }
    return greatest;
}

TARGET static void FN(count)(struct stats_totals *t, stats_memory actual, stats_memory expected, size_t n) {
    for (size_t at = 0; at < n; at += FEW) {
        size_t stop = n - at < FEW ? n : at + FEW;
        SIZE different = 0, from_zero = 0;
        for (size_t i = at; i < stop; i++) {
            NUMBER a = FN(number)(actual, i), e = FN(number)(expected, i);
            different += a != e;
            from_zero += (a != e) & (e == 0);
        }
        t->n_different += different;
        t->n_from_zero += from_zero;
    }
}

TARGET static double FN(sum_of_squares)(stats_memory actual, stats_memory expected, size_t n) {
    SQUARES lanes[STATS_LANES] = {0};
    double sum = 0;
    size_t whole = n - n % STATS_LANES;
    for (size_t i = 0; i < whole; i += STATS_LANES)
        for (size_t j = 0; j < STATS_LANES; j++) {
            SQUARES gap = (SQUARES)FN(distance)(FN(number)(actual, i + j), FN(number)(expected, i + j));
            lanes[j] += gap * gap;
        }
    for (size_t j = 0; j < n - whole; j++) {
        SQUARES gap = (SQUARES)FN(distance)(FN(number)(actual, whole + j), FN(number)(expected, whole + j));
        lanes[j] += gap * gap;
    }
    for (size_t j = 0; j < STATS_LANES; j++) sum += (double)lanes[j];
    return sum;
}

TARGET static double FN(greatest_ratio)(stats_memory actual, stats_memory expected, size_t n) {
    int64_t ratios = 0;
    double greatest;
    for (size_t i = 0; i < n; i++) {
        NUMBER e = FN(number)(expected, i);
        double ratio = (double)FN(distance)(FN(number)(actual, i), e) / fabs((double)e);
        int64_t order;
        memcpy(&order, &ratio, sizeof order);
        order &= -(int64_t)(e != 0);
        ratios = order > ratios ? order : ratios;
    }
    memcpy(&greatest, &ratios, sizeof greatest);
    return greatest;
}

#ifdef TWICE
/* Whether a ratio is greater than a known one: p / q > P / Q where p Q > P q, without a division. */
TARGET static int FN(has_greater)(stats_memory actual, stats_memory expected, size_t n, TWICE gap, TWICE size) {
    TWICE any = 0;
    for (size_t i = 0; i < n; i++) {
        NUMBER e = FN(number)(expected, i);
        TWICE p = FN(distance)(FN(number)(actual, i), e), q = FN(size)(e);
        any |= (TWICE)((TWICE)(p * size) > (TWICE)(gap * q)) & (TWICE)(q != 0);
    }
    return any != 0;
}
#endif

TARGET static void FN(add_ratio)(struct stats_totals *t, stats_memory actual, stats_memory expected, size_t n, SIZE *gap, SIZE *size) {
#ifdef TWICE
    if (!FN(has_greater)(actual, expected, n, *gap, *size)) return;
#endif
    double greatest = FN(greatest_ratio)(actual, expected, n);
    if (greatest <= t->max_rel) return;
    t->max_rel = greatest;
    for (size_t i = 0; i < n; i++) {
        NUMBER e = FN(number)(expected, i);
        *gap = FN(distance)(FN(number)(actual, i), e), *size = FN(size)(e);
        if (e != 0 && (double)*gap / fabs((double)e) == greatest) return;
    }
}

TARGET static void FN(add_chunk)(struct stats_totals *t, const struct stats_input *in, size_t start, size_t n, SIZE *gap, SIZE *size) {
    SIZE greatest = 0;
    size_t first = 0;
    for (size_t at = start; at < start + n; at += BLOCK) {
        size_t m = start + n - at < BLOCK ? start + n - at : BLOCK;
        stats_memory actual = in->actual + at * sizeof(NUMBER), expected = in->expected + at * sizeof(NUMBER);
        if (memcmp(actual, expected, m * sizeof(NUMBER)) == 0) continue;
        SIZE most = FN(greatest_gap)(actual, expected, m);
        if (most > greatest) greatest = most, first = at;
        FN(count)(t, actual, expected, m);
        FN(add_ratio)(t, actual, expected, m, gap, size);
        t->squares += FN(sum_of_squares)(actual, expected, m);
    }
    if (greatest == 0) return;
    if (!in->is_bool && greatest > t->max_ulp) t->max_ulp = greatest;
    if (!stats_wants(t, (double)greatest)) return;
    while (FN(distance)(FN(number)(in->actual, first), FN(number)(in->expected, first)) != greatest) first++;
    stats_offer(t, (double)greatest, first);
}

TARGET static void FN(add)(struct stats_totals *t, const struct stats_input *in) {
    SIZE gap = 0, size = 1; /* of the greatest ratio */
    for (size_t at = 0; at < in->n; at += CHUNK)
        FN(add_chunk)(t, in, at, in->n - at < CHUNK ? in->n - at : CHUNK, &gap, &size);
    size_t worst = t->worst < 0 ? 0 : (size_t)t->worst;
    NUMBER a = FN(number)(in->actual, worst), e = FN(number)(in->expected, worst);
    t->n_finite = in->n;
    t->worst_actual = in->is_bool ? a != 0 : (double)a;
    t->worst_expected = in->is_bool ? e != 0 : (double)e;
}

#undef FN
#undef BLOCK
#undef CHUNK
#undef FEW
#undef FORMAT
#undef NUMBER
#undef SIZE
#undef TWICE
#undef SQUARES
