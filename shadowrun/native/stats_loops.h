/* The loops over the elements of one block of floats: a part of stats_float.h, which sets the names.

   They have no branches, and hold maxima as integers (floats without a sign order as their bits do), so that compilers
   make vectors of them without being allowed to change what floats mean. */

static inline BITS FN(bits)(memory at, size_t i) {
    BITS bits;
    memcpy(&bits, at + i * sizeof bits, sizeof bits);
    return bits;
}

static inline VALUE FN(value)(memory at, size_t i) {
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
TARGET static void FN(widen)(memory from, size_t n, const float *wide, CODE *to) {
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
        BITS a = FN(bits)(v->bits_left, i), e = FN(bits)(v->bits_right, i);
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
        BITS a = FN(bits)(v->bits_left, i), e = FN(bits)(v->bits_right, i);
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
        VALUE a = FN(value)(v->left, i), e = FN(value)(v->right, i), difference = a - e;
        ORDER gap = FN(size)(difference), ratio = FN(size)(difference / e);
        ratio &= -(ORDER)(ratio <= INFINITE); /* 0 / 0 */
        gaps = gap > gaps ? gap : gaps;
        ratios = ratio > ratios ? ratio : ratios;
    }
    b->gap = gaps;
    b->ratio = ratios;
}

TARGET static double FN(sum_of_squares)(const struct FN(view) *v, size_t n) {
    double lanes[LANES] = {0};
    size_t whole = n - n % LANES;
    for (size_t i = 0; i < whole; i += LANES)
        for (size_t j = 0; j < LANES; j++) {
            double gap = (double)(FN(value)(v->left, i + j) - FN(value)(v->right, i + j));
            lanes[j] += gap * gap;
        }
    for (size_t j = 0; j < n - whole; j++) {
        double gap = (double)(FN(value)(v->left, whole + j) - FN(value)(v->right, whole + j));
        lanes[j] += gap * gap;
    }
    return sum_of_lanes(lanes);
}

/* Zeros against subnormal and other numbers. */
TARGET static void FN(count_zeros)(const struct FN(view) *v, size_t n, VALUE normal, struct totals *t) {
    CODE from_zero = 0, subnormal = 0;
    for (size_t i = 0; i < n; i++) {
        VALUE a = FN(value)(v->left, i), e = FN(value)(v->right, i);
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
        VALUE a = FN(value)(v->left, i), e = FN(value)(v->right, i);
        ORDER ratio = FN(size)((a - e) / e);
        ratio &= -(ORDER)(e != 0);
        ratios = ratio > ratios ? ratio : ratios;
    }
    return ratios;
}

TARGET static uint64_t FN(zero_signs)(const struct FN(view) *v, size_t n) {
    CODE count = 0;
    for (size_t i = 0; i < n; i++) {
        VALUE a = FN(value)(v->left, i), e = FN(value)(v->right, i);
        count += (CODE)(a == 0) & (CODE)((FN(code)(a) ^ FN(code)(e)) == CODE_SIGN);
    }
    return count;
}

TARGET static size_t FN(not_finite)(memory values, size_t n) {
    CODE count = 0;
    for (size_t i = 0; i < n; i++) count += FN(size)(FN(value)(values, i)) >= INFINITE;
    return (size_t)count;
}

TARGET static void FN(mask)(const CODE *keep, memory from, size_t n, CODE *to) {
    if (from != (memory)to) memcpy(to, from, n * sizeof *to);
    for (size_t i = 0; i < n; i++) to[i] &= keep[i];
}

/* Copies of both sides with +0 where one of them is NaN or infinite. Returns how many these are. */
TARGET static size_t FN(clean)(struct FN(view) *v, size_t n, struct FN(room) *room) {
    CODE keep[BLOCK], kept = 0;
    for (size_t i = 0; i < n; i++) {
        VALUE a = FN(value)(v->left, i), e = FN(value)(v->right, i);
        CODE finite = (CODE)(FN(size)(a) < INFINITE) & (CODE)(FN(size)(e) < INFINITE);
        keep[i] = 0 - finite;
        kept += finite;
    }
    FN(mask)(keep, v->left, n, room->left);
    FN(mask)(keep, v->right, n, room->right);
    v->left = (memory)room->left, v->right = (memory)room->right;
#ifdef WIDEN
    for (size_t i = 0; i < n; i++) {
        room->bits_left[i] = FN(bits)(v->bits_left, i) & (BITS)keep[i];
        room->bits_right[i] = FN(bits)(v->bits_right, i) & (BITS)keep[i];
    }
    v->bits_left = (memory)room->bits_left, v->bits_right = (memory)room->bits_right;
#else
    v->bits_left = v->left, v->bits_right = v->right;
#endif
    return n - (size_t)kept;
}

/* Elements that are NaN or infinite on a side. */
TARGET static void FN(look_at_classes)(const struct FN(view) *v, size_t n, size_t start, struct totals *t) {
    COUNT nan = 0, inf = 0;
    BITS any = 0;
    for (size_t i = 0; i < n; i++) {
        ORDER a = FN(size)(FN(value)(v->left, i)), e = FN(size)(FN(value)(v->right, i));
        BITS xor = FN(bits)(v->bits_left, i) ^ FN(bits)(v->bits_right, i);
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
        ORDER a = FN(size)(FN(value)(v->left, i)), e = FN(size)(FN(value)(v->right, i));
        int differ = FN(bits)(v->bits_left, i) != FN(bits)(v->bits_right, i);
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
        double a = (double)FN(value)(v->left, i), e = (double)FN(value)(v->right, i), ratio = (a - e) / e;
        int64_t size;
        memcpy(&size, &ratio, sizeof size);
        size &= INT64_MAX & -(int64_t)(e != 0);
        ratios = size > ratios ? size : ratios;
    }
    double greatest;
    memcpy(&greatest, &ratios, sizeof greatest);
    return greatest;
}
