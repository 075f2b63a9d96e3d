/* Statistics of one integer type, bool among them: included for each type and each set of instructions.

   Set by who includes it: FORMAT (its name), NUMBER (the type), SIZE (the unsigned type of its width), TWICE (the
   unsigned type of twice its width, if there is one), and SQUARES (a type that holds the sum of squares of a block). */

#define FN(x) JOIN(x, FORMAT, INSTRUCTIONS)
#define BLOCK 2048
#define CHUNK ((size_t)BLOCKS * BLOCK)
#define FEW 128 /* elements counted in a type as narrow as theirs */

static inline NUMBER FN(number)(memory at, size_t i) {
    NUMBER number;
    memcpy(&number, at + i * sizeof number, sizeof number);
    return number;
}

static inline SIZE FN(distance)(NUMBER a, NUMBER e) { return (SIZE)(a > e ? (SIZE)a - (SIZE)e : (SIZE)e - (SIZE)a); }

static inline SIZE FN(size)(NUMBER e) { return FN(distance)(e, 0); }

TARGET static SIZE FN(greatest_gap)(memory left, memory right, size_t n) {
    SIZE greatest = 0;
    for (size_t i = 0; i < n; i++) {
        SIZE gap = FN(distance)(FN(number)(left, i), FN(number)(right, i));
        greatest = gap > greatest ? gap : greatest;
    }
    return greatest;
}

TARGET static void FN(count)(struct totals *t, memory left, memory right, size_t n) {
    for (size_t at = 0; at < n; at += FEW) {
        size_t stop = n - at < FEW ? n : at + FEW;
        SIZE different = 0, from_zero = 0;
        for (size_t i = at; i < stop; i++) {
            NUMBER a = FN(number)(left, i), e = FN(number)(right, i);
            different += a != e;
            from_zero += (a != e) & (e == 0);
        }
        t->n_different += different;
        t->n_from_zero += from_zero;
    }
}

TARGET static double FN(sum_of_squares)(memory left, memory right, size_t n) {
    SQUARES lanes[LANES] = {0};
    double sum = 0;
    size_t whole = n - n % LANES;
    for (size_t i = 0; i < whole; i += LANES)
        for (size_t j = 0; j < LANES; j++) {
            SQUARES gap = (SQUARES)FN(distance)(FN(number)(left, i + j), FN(number)(right, i + j));
            lanes[j] += gap * gap;
        }
    for (size_t j = 0; j < n - whole; j++) {
        SQUARES gap = (SQUARES)FN(distance)(FN(number)(left, whole + j), FN(number)(right, whole + j));
        lanes[j] += gap * gap;
    }
    for (size_t j = 0; j < LANES; j++) sum += (double)lanes[j];
    return sum;
}

TARGET static double FN(greatest_ratio)(memory left, memory right, size_t n) {
    int64_t ratios = 0;
    double greatest;
    for (size_t i = 0; i < n; i++) {
        NUMBER e = FN(number)(right, i);
        double ratio = (double)FN(distance)(FN(number)(left, i), e) / fabs((double)e);
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
TARGET static int FN(has_greater)(memory left, memory right, size_t n, TWICE gap, TWICE size) {
    TWICE any = 0;
    for (size_t i = 0; i < n; i++) {
        NUMBER e = FN(number)(right, i);
        TWICE p = FN(distance)(FN(number)(left, i), e), q = FN(size)(e);
        any |= (TWICE)((TWICE)(p * size) > (TWICE)(gap * q)) & (TWICE)(q != 0);
    }
    return any != 0;
}
#endif

TARGET static void FN(add_ratio)(struct totals *t, memory left, memory right, size_t n, SIZE *gap, SIZE *size) {
#ifdef TWICE
    if (!FN(has_greater)(left, right, n, *gap, *size)) return;
#endif
    double greatest = FN(greatest_ratio)(left, right, n);
    if (greatest <= t->max_rel) return;
    t->max_rel = greatest;
    for (size_t i = 0; i < n; i++) {
        NUMBER e = FN(number)(right, i);
        *gap = FN(distance)(FN(number)(left, i), e), *size = FN(size)(e);
        if (e != 0 && (double)*gap / fabs((double)e) == greatest) return;
    }
}

TARGET static void FN(add_chunk)(struct totals *t, const struct input *in, size_t start, size_t n, SIZE *gap, SIZE *size) {
    SIZE greatest = 0;
    size_t first = 0;
    for (size_t at = start; at < start + n; at += BLOCK) {
        size_t m = start + n - at < BLOCK ? start + n - at : BLOCK;
        memory left = in->left + at * sizeof(NUMBER), right = in->right + at * sizeof(NUMBER);
        if (memcmp(left, right, m * sizeof(NUMBER)) == 0) continue;
        SIZE most = FN(greatest_gap)(left, right, m);
        if (most > greatest) greatest = most, first = at;
        FN(count)(t, left, right, m);
        FN(add_ratio)(t, left, right, m, gap, size);
        t->squares += FN(sum_of_squares)(left, right, m);
    }
    if (greatest == 0) return;
    if (!in->is_bool && greatest > t->max_ulp) t->max_ulp = greatest;
    if (!wants(t, (double)greatest)) return;
    while (FN(distance)(FN(number)(in->left, first), FN(number)(in->right, first)) != greatest) first++;
    offer(t, (double)greatest, first);
}

TARGET static void FN(add)(struct totals *t, const struct input *in) {
    SIZE gap = 0, size = 1; /* of the greatest ratio */
    for (size_t at = 0; at < in->n; at += CHUNK)
        FN(add_chunk)(t, in, at, in->n - at < CHUNK ? in->n - at : CHUNK, &gap, &size);
    size_t worst = t->worst < 0 ? 0 : (size_t)t->worst;
    NUMBER a = FN(number)(in->left, worst), e = FN(number)(in->right, worst);
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
