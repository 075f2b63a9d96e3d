/* Statistics of two tensors: what the files stats*, diff.c and differing.c share.

   shadowrun/numerics/floats.py, unusual.py and integers.py do the same in Python, and say what each figure means. Both
   look at chunks of the same length, since a few figures are rounded as suits the chunk; here, a chunk is looked at by
   blocks that stay in the L1 cache. */

#ifndef SHADOWRUN_STATS_H
#define SHADOWRUN_STATS_H

#include "core.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#define BLOCKS 16   /* of a chunk */
#define LANES 16    /* partial sums: the order of a sum is the same with all instructions */
#define NEARLY 0x1p-20 /* more than rounding to float32 takes from a difference and a quotient */

typedef const unsigned char *memory; /* tensors may lie at any address: memcpy reads them */

struct input {
    memory left, right;
    size_t n;         /* elements */
    double normal;    /* smallest normal number of the dtype */
    double vanishing; /* mean square below which float32 squares may have underflowed */
    const float *wide; /* of the 256 numbers of an 8-bit format */
    int is_signed;    /* the format has a sign */
    int is_bool;
};

/* The fields of numerics.totals.Totals; any_xor is as long in bits as greatest_xor. */
struct totals {
    uint64_t n_different, n_finite, max_ulp, any_xor, n_nan, n_inf, n_zero_sign, n_subnormal, n_from_zero;
    double max_abs, max_rel, squares;
    int64_t worst;
    int worst_is_class;
    double worst_actual, worst_expected;
};

static inline int wants(const struct totals *t, double gap) { return gap > t->max_abs || t->worst < 0; }

static inline void offer(struct totals *t, double gap, size_t index) {
    if (!wants(t, gap)) return;
    if (!t->worst_is_class) t->worst = (int64_t)index;
    if (gap > t->max_abs) t->max_abs = gap;
}

static inline double sum_of_lanes(const double *lanes) {
    double sum = 0;
    for (int j = 0; j < LANES; j++) sum += lanes[j];
    return sum;
}

typedef void (*add_function)(struct totals *, const struct input *);

/* stats.c */
int read_format(PyObject *tuple, PyObject *instructions, struct input *in, add_function *add);
void add_up(struct totals *t, const struct input *in, add_function add, size_t n_bytes);

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)

#endif
