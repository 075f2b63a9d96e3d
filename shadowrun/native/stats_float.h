/* Statistics of one floating-point format: included for each format and each set of instructions.

   Set by who includes it: FORMAT (its name), WIDTH (of its bits: 8, 16, 32, 64), VALUE (float or double, in which the
   arithmetic is done), VALUE_WIDTH, BLOCK (elements), and if VALUE is another format WIDEN(bits, wide); WIDEN_MANY(from, to)
   may be set too, for 16 numbers at a time. The loops are in stats_loops.h; here is what becomes of what they find,
   block by block and chunk by chunk. */

#define FN(x) JOIN(x, FORMAT, INSTRUCTIONS)
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
#define CHUNK ((size_t)BLOCKS * BLOCK)
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
    CODE left[BLOCK], right[BLOCK];
#ifdef WIDEN
    BITS bits_left[BLOCK], bits_right[BLOCK];
#endif
};

struct FN(view) {
    memory left, right, bits_left, bits_right;
};

#include "stats_loops.h"

/* Where the values of a block are: in the tensors themselves, or widened in the room. */
TARGET static struct FN(view) FN(open)(const struct input *in, size_t start, size_t n, struct FN(room) *room) {
    struct FN(view) v;
    v.bits_left = in->left + start * sizeof(BITS), v.bits_right = in->right + start * sizeof(BITS);
#ifdef WIDEN
    FN(widen)(v.bits_left, n, in->wide, room->left);
    FN(widen)(v.bits_right, n, in->wide, room->right);
    v.left = (memory)room->left, v.right = (memory)room->right;
#else
    (void)n, (void)room;
    v.left = v.bits_left, v.right = v.bits_right;
#endif
    return v;
}

TARGET static struct FN(view) FN(again)(const struct input *in, const struct FN(block) *b, struct FN(room) *room) {
    struct FN(view) v = FN(open)(in, b->start, b->n, room);
    if (b->unclean) FN(clean)(&v, b->n, room);
    return v;
}

/* Returns how many elements are not finite. */
TARGET static size_t FN(add_block)(struct totals *t, const struct input *in, struct FN(block) *b, struct FN(room) *room) {
    memory left = in->left + b->start * sizeof(BITS), right = in->right + b->start * sizeof(BITS);
    struct FN(view) v = FN(open)(in, b->start, b->n, room);
    uint64_t different = 0, cleaned;
    size_t left_out = 0;
    b->differs = memcmp(left, right, b->n * sizeof(BITS)) != 0;
    if (!b->differs) return FN(not_finite)(v.left, b->n);
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
    struct totals *t, const struct input *in, const struct FN(block) *blocks, size_t n_blocks, ORDER gap, int exact,
    struct FN(room) *room) {
    double greatest = (double)FN(decoded)(gap), best = -1.0;
    size_t index = blocks[0].start;
    if (gap == 0) {
        offer(t, 0.0, index);
        return;
    }
    if (!wants(t, exact ? greatest * (1 + NEARLY) : greatest)) return;
    for (size_t k = 0; k < n_blocks; k++) {
        const struct FN(block) *b = blocks + k;
        if (!b->differs || b->gap != gap) continue;
        struct FN(view) v = FN(again)(in, b, room);
        for (size_t i = 0; i < b->n; i++) {
            VALUE a = FN(value)(v.left, i), e = FN(value)(v.right, i);
            if (FN(size)(a - e) != gap) continue;
            double size = exact ? fabs((double)a - (double)e) : greatest;
            if (size > best) best = size, index = b->start + i;
            if (!exact) break;
        }
        if (!exact) break;
    }
    offer(t, best, index);
}

TARGET static void FN(add_ratio)(
    struct totals *t, const struct input *in, struct FN(block) *blocks, size_t n_blocks, int exact,
    struct FN(room) *room) {
    ORDER ratio = 0;
    for (size_t k = 0; k < n_blocks; k++) {
        struct FN(block) *b = blocks + k;
        if (!b->differs) continue;
        if (b->ratio >= ONE) { /* a zero on the target gives 1, one on the reference an infinity */
            struct FN(view) v = FN(again)(in, b, room);
            FN(count_zeros)(&v, b->n, (VALUE)in->normal, t);
            if (b->ratio == INFINITE) exact = 1, b->ratio = FN(proper_ratio)(&v, b->n);
        }
        ratio = b->ratio > ratio ? b->ratio : ratio;
    }
    double greatest = (double)FN(decoded)(ratio);
    if (VALUE_WIDTH == 32 && exact && greatest * (1 + NEARLY) > t->max_rel) {
        double least = isinf(greatest) ? 0 : greatest * (1 - NEARLY); /* where one overflows, another may be greater */
        greatest = 0;
        for (size_t k = 0; k < n_blocks; k++) {
            struct FN(block) *b = blocks + k;
            if (!b->differs || (double)FN(decoded)(b->ratio) < least) continue;
            struct FN(view) v = FN(again)(in, b, room);
            double size = FN(exact_ratio)(&v, b->n);
            greatest = size > greatest ? size : greatest;
        }
    }
    if (greatest > t->max_rel) t->max_rel = greatest;
}

/* The sum of squares of a chunk in which they, or differences, may have overflowed or vanished. */
static double FN(scaled_squares)(
    const struct input *in, const struct FN(block) *blocks, size_t n_blocks, ORDER gap, struct FN(room) *room) {
    double sum = 0, scale = gap == 0 ? 1.0 : (double)FN(decoded)(gap);
    if (VALUE_WIDTH == 32 && gap >= INFINITE) scale = FLT_MAX; /* float64 holds every difference of two float32 */
    if (!isfinite(scale)) return INFINITY;
    for (size_t k = 0; k < n_blocks; k++) {
        if (!blocks[k].differs) continue;
        struct FN(view) v = FN(again)(in, blocks + k, room);
        for (size_t i = 0; i < blocks[k].n; i++) {
            double share = ((double)FN(value)(v.left, i) - (double)FN(value)(v.right, i)) / scale;
            sum += share * share;
        }
    }
    return sum * scale * scale;
}

TARGET static void FN(add_chunk)(struct totals *t, const struct input *in, size_t start, size_t n) {
    struct FN(block) blocks[BLOCKS];
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
    /* Python sums in VALUE, and gives float64's figures where that overflows or vanishes. */
    int proper = squares > (double)n * in->vanishing && squares <= (VALUE_WIDTH == 32 ? (double)FLT_MAX : DBL_MAX);
    int exact = left_out || mixed || !proper;
    FN(add_ratio)(t, in, blocks, n_blocks, exact, &room);
    FN(offer_gap)(t, in, blocks, n_blocks, gap, VALUE_WIDTH == 32 && exact, &room);
    if (!proper) squares = FN(scaled_squares)(in, blocks, n_blocks, gap, &room);
    t->squares += squares;
}

TARGET static void FN(add)(struct totals *t, const struct input *in) {
    struct FN(room) room;
    for (size_t at = 0; at < in->n; at += CHUNK) FN(add_chunk)(t, in, at, in->n - at < CHUNK ? in->n - at : CHUNK);
    struct FN(view) v = FN(open)(in, (size_t)(t->worst < 0 ? 0 : t->worst), 1, &room);
    t->worst_actual = (double)FN(value)(v.left, 0);
    t->worst_expected = (double)FN(value)(v.right, 0);
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
