/* Statistics of two tensors that differ, in one pass over memory.
 *
 * numerics/diff.py is their specification, and numerics/elements.py that of `differing`. Chunks have the same length there
 * and here, since a few figures are rounded as suits the chunk; here, a chunk is taken in blocks that stay in the L1 cache.
 */

#include "core.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>

#define STATS_BLOCKS 16   /* of a chunk */
#define STATS_LANES 16    /* partial sums: the order of a sum is the same with all instructions */
#define STATS_NEARLY 0x1p-20 /* more than rounding to float32 takes from a difference and a quotient */

typedef const unsigned char *stats_memory; /* tensors may lie at any address: memcpy reads them */

struct stats_input {
    stats_memory actual, expected;
    size_t n;         /* elements */
    double normal;    /* smallest normal number of the dtype */
    double vanishing; /* mean square below which float32 squares may have underflowed */
    const float *wide; /* of the 256 numbers of an 8-bit format */
    int is_signed;    /* the format has a sign */
    int is_bool;
};

/* The fields of Totals in numerics/diff.py; any_xor is as long in bits as greatest_xor. */
struct stats_totals {
    uint64_t n_different, n_finite, max_ulp, any_xor;
    SR_COUNTS(SR_COUNT_MEMBER)
    double max_abs, max_rel, squares;
    int64_t worst;
    int worst_is_class;
    double worst_actual, worst_expected;
};

static inline int stats_wants(const struct stats_totals *t, double gap) { return gap > t->max_abs || t->worst < 0; }

static inline void stats_offer(struct stats_totals *t, double gap, size_t index) {
    if (!stats_wants(t, gap)) return;
    if (!t->worst_is_class) t->worst = (int64_t)index;
    if (gap > t->max_abs) t->max_abs = gap;
}

static inline double stats_sum_of_lanes(const double *lanes) {
    double sum = 0;
    for (int j = 0; j < STATS_LANES; j++) sum += lanes[j];
    return sum;
}

typedef void (*stats_function_t)(struct stats_totals *, const struct stats_input *);

#define STATS_JOIN_(a, b, c) stats_##a##_##b##_##c
#define STATS_JOIN(a, b, c) STATS_JOIN_(a, b, c)

static inline uint32_t stats_float_bits(float value) {
    uint32_t code;
    memcpy(&code, &value, sizeof code);
    return code;
}

/* For processors without a conversion, and compilers that make no vectors of it. */
static inline uint32_t stats_half_bits(uint16_t half) {
    uint32_t size = half & 0x7fff, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t normal = (size << 13) + ((uint32_t)112 << 23);
    uint32_t subnormal = stats_float_bits((float)(int32_t)size * 0x1p-24f);
    uint32_t is_subnormal = 0 - (uint32_t)(size < 0x400), is_special = 0 - (uint32_t)(size >= 0x7c00);
    return sign | (is_subnormal & subnormal) | (~is_subnormal & (normal | (is_special & 0x7f800000)));
}

/* What stats_near.h compares, a whole number of lanes at a time. */
#define NEAR_LANES 64
#define NEAR_BLOCK 2048
struct near_pass {
    float relative, absolute, level;
    double gap, size, weighted_gap, weighted_size; /* sums */
};
typedef int (*near_block)(const float *, const float *, size_t, struct near_pass *);
typedef void (*near_weights)(const float *, const float *, size_t, struct near_pass *);

/* What stats_sketch.h multiplies: elements of float32, strides in elements. */
#define SKETCH_LANES 64
#define SKETCH_ROWS 512
struct sketch_rounding {
    uint32_t half, dropped, to_even, kept; /* (bits + half + (bits >> dropped & to_even)) & kept */
};
struct sketch_product {
    const float *matrix, *vector;
    float *out;
    int64_t n_rows, n_columns, row_stride, column_stride;
    struct sketch_rounding to;
};
typedef void (*sketch_function)(const struct sketch_product *);

static const char *const stats_formats[] = {
    "float32", "float64", "bfloat16", "float16", "float8", "int8", "uint8",
    "int16",   "uint16",  "int32",    "uint32",  "int64",  "uint64", "bool",
};
#define STATS_N_FORMATS (sizeof stats_formats / sizeof *stats_formats)

#define INSTRUCTIONS plain
#define TARGET
#include "stats_formats.h"

#ifdef SR_HAS_X86_SETS
#include <immintrin.h>

#define INSTRUCTIONS avx2
#define TARGET __attribute__((target("avx2")))
#include "stats_formats.h"

#define INSTRUCTIONS avx512
#define TARGET SR_TARGET_AVX512
#define HALVES(from, to) _mm512_storeu_ps((to), _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from))))
#include "stats_formats.h"
#endif

/* By the name of the instructions, or with None the best that the processor has. NULL with an exception. */
static const stats_function_t *stats_table(PyObject *name) {
    sr_instructions found;
    if (sr_read_instructions(name, sr_best_instructions(0), &found)) return NULL;
#ifdef SR_HAS_X86_SETS
    if (found != SR_PLAIN) return found == SR_AVX512 ? stats_all_formats_avx512 : stats_all_formats_avx2;
#endif
    return stats_all_formats_plain;
}

static stats_function_t stats_function(PyObject *format, PyObject *instructions) {
    const stats_function_t *table = stats_table(instructions);
    const char *name = table == NULL ? NULL : PyUnicode_AsUTF8(format);
    if (name == NULL) return NULL;
    for (size_t i = 0; i < STATS_N_FORMATS; i++)
        if (!strcmp(name, stats_formats[i])) return table[i];
    PyErr_Format(PyExc_ValueError, "no statistics of the format \"%s\"", name);
    return NULL;
}

/* What follows from the dtype: (name, smallest normal number, mean square that vanishes, signed, numbers). The last are
   the 256 numbers of an 8-bit format as float32, else None. */
int stats_read_format(PyObject *tuple, PyObject *instructions, struct stats_input *in, stats_function_t *add) {
    PyObject *name, *wide;
    if (!PyArg_ParseTuple(tuple, "UddpO", &name, &in->normal, &in->vanishing, &in->is_signed, &wide)) return -1;
    *add = stats_function(name, instructions);
    if (*add == NULL) return -1;
    in->is_bool = PyUnicode_CompareWithASCIIString(name, "bool") == 0;
    in->wide = NULL;
    if (PyBytes_Check(wide) && PyBytes_GET_SIZE(wide) == 256 * (Py_ssize_t)sizeof(float))
        in->wide = (const float *)(const void *)PyBytes_AS_STRING(wide);
    if (in->wide == NULL && PyUnicode_CompareWithASCIIString(name, "float8") == 0) {
        PyErr_SetString(PyExc_ValueError, "an 8-bit format needs its 256 numbers as float32");
        return -1;
    }
    return 0;
}

void stats_add_up(struct stats_totals *t, const struct stats_input *in, stats_function_t add, size_t n_bytes) {
    if (n_bytes <= SR_FEW_BYTES) {
        add(t, in);
    } else {
        Py_BEGIN_ALLOW_THREADS
        add(t, in);
        Py_END_ALLOW_THREADS
    }
}

/* statistics(actual, expected, n, n_bytes, format, instructions=None): addresses of two dense tensors, their elements and the
   bytes of one of them. Returns the fields of Totals in their order. */
PyObject *sr_statistics(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    (void)module;
    if (n_args < 5 || n_args > 6 || !PyTuple_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "statistics(actual, expected, n, n_bytes, format, instructions=None)");
        return NULL;
    }
    struct stats_input in = {.actual = PyLong_AsVoidPtr(args[0]), .expected = PyLong_AsVoidPtr(args[1]), .n = PyLong_AsSize_t(args[2])};
    size_t n_bytes = PyLong_AsSize_t(args[3]);
    struct stats_totals t = {.worst = -1};
    stats_function_t add;
    if (PyErr_Occurred() || stats_read_format(args[4], n_args == 6 ? args[5] : Py_None, &in, &add) < 0) return NULL;
    if (in.n && in.actual && in.expected) stats_add_up(&t, &in, add, n_bytes);
    typedef unsigned long long count;
#define STATS_COUNT_CODE(name) "K"
#define STATS_COUNT_VALUE(name) (count)t.name,
    return Py_BuildValue(
        "KdddKKK" SR_COUNTS(STATS_COUNT_CODE) "LOdd", (count)t.n_different, t.max_abs, t.max_rel, t.squares,
        (count)t.n_finite, (count)t.max_ulp, (count)t.any_xor, SR_COUNTS(STATS_COUNT_VALUE)(long long)t.worst,
        t.worst_is_class ? Py_True : Py_False, t.worst_actual, t.worst_expected);
}

/* From two plain tensors of one form, as nearly all are, to a finished TensorDiff. */

enum { DIFF_N_META = 5, DIFF_N_OF_TENSOR = 4, DIFF_MAX_FORMATS = 32 };

/* In the order in which they are filled in below. */
static const char *const diff_meta_fields[DIFF_N_META] = {"dtype", "shape", "stride", "device", "layout"};

typedef enum { DIFF_NAME, DIFF_FORM, DIFF_COUNT, DIFF_REAL, DIFF_BITS, DIFF_INDEX, DIFF_NO_COUNT, DIFF_NO_REAL, DIFF_NO_TEXT } DiffKind;

/* By name: TensorDiff has them in an order of its own, which is also that of the columns in a data file. */
typedef struct {
    const char *name;
    DiffKind kind;
    size_t at; /* in SrFigures, of a count or a real number */
} DiffField;
#define DIFF_COUNT_FIELD(name) {#name, DIFF_COUNT, offsetof(SrFigures, name)},
#define DIFF_REAL_FIELD(name) {#name, DIFF_REAL, offsetof(SrFigures, name)},
static const DiffField diff_fields[] = {
    {"name", DIFF_NAME, 0}, {"actual", DIFF_FORM, 0}, {"expected", DIFF_FORM, 0},
    DIFF_COUNT_FIELD(n_elements) DIFF_COUNT_FIELD(n_different) DIFF_COUNT_FIELD(max_ulp) SR_COUNTS(DIFF_COUNT_FIELD)
    DIFF_REAL_FIELD(max_abs) DIFF_REAL_FIELD(max_rel) DIFF_REAL_FIELD(rmse)
    DIFF_REAL_FIELD(worst_actual) DIFF_REAL_FIELD(worst_expected)
    {"remaining_bits", DIFF_BITS, 0}, {"worst_index", DIFF_INDEX, 0},
    /* What a verdict adds, in Python. */
    {"n_mismatched", DIFF_NO_COUNT, 0}, {"excess_actual", DIFF_NO_REAL, 0}, {"excess_expected", DIFF_NO_REAL, 0},
    {"detail", DIFF_NO_TEXT, 0},
};
/* A class with another number of slots is not filled here: `diff` is then computed in Python, and says nothing
 * wrong. */
enum { DIFF_N_FIELDS = sizeof diff_fields / sizeof *diff_fields };
/* Found once, from the class: a field that is added to TensorDiff needs no place of its own in C. */
static const DiffField *diff_order[DIFF_N_FIELDS]; /* that of the class */

typedef struct {
    PyTypeObject *type;
    Py_ssize_t places[DIFF_N_FIELDS]; /* of the slots in an object */
} DiffClass;

typedef struct {
    int code, bits, mantissa; /* code and bits: as in DLPack; mantissa: -1 for integers */
    PyObject *name, *format;  /* name: as in TensorMeta; format: keeps alive what `input` points to */
    struct stats_input input;
    stats_function_t add;
} DiffFormat;

static DiffClass diff_meta_class, diff_diff_class;
static DiffFormat diff_formats[DIFF_MAX_FORMATS];
static Py_ssize_t diff_n_formats;
static PyObject *diff_cpu, *diff_strided, *diff_empty; /* strings */

/* Put `diff_order` in the order of a class's slots; whether each field is known, once, and no other. */
static int diff_learn_order(PyObject *type, const char **names) {
    PyObject *slots = PyObject_GetAttrString(type, "__slots__");
    int known = slots != NULL && PyTuple_Check(slots) && PyTuple_GET_SIZE(slots) == DIFF_N_FIELDS;
    for (Py_ssize_t i = 0; known && i < DIFF_N_FIELDS; i++) {
        PyObject *slot = PyTuple_GET_ITEM(slots, i);
        Py_ssize_t k = 0;
        while (k < DIFF_N_FIELDS && (!PyUnicode_Check(slot) || PyUnicode_CompareWithASCIIString(slot, diff_fields[k].name))) {
            k++;
        }
        known = k < DIFF_N_FIELDS;
        if (known) {
            diff_order[i] = diff_fields + k, names[i] = diff_fields[k].name;
        }
    }
    Py_XDECREF(slots);
    PyErr_Clear();
    return known;
}

/* Whether a class has these slots and no others: filling them here is faster than the __init__ of a frozen class. */
static int diff_learn_class(DiffClass *class, PyObject *type, const char *const *names, Py_ssize_t n) {
    PyObject *slots = PyObject_GetAttrString(type, "__slots__");
    int known = slots != NULL && PyType_Check(type) && PyTuple_Check(slots) && PyTuple_GET_SIZE(slots) == n;
    for (Py_ssize_t i = 0; known && i < n; i++) {
        class->places[i] = sr_slot_offset((PyTypeObject *)type, names[i]);
        known = class->places[i] >= 0;
    }
    Py_XDECREF(slots);
    PyErr_Clear();
    if (known) {
        Py_XSETREF(class->type, (PyTypeObject *)Py_NewRef(type));
    }
    return known;
}

/* An object with these values. The references are taken in any case; a NULL among them is a failure. */
static PyObject *diff_make(const DiffClass *class, PyObject **values, Py_ssize_t n) {
    PyObject *made = class->type->tp_alloc(class->type, 0);
    int failed = made == NULL;
    for (Py_ssize_t i = 0; i < n; i++) {
        failed |= values[i] == NULL;
        if (made == NULL) {
            Py_XDECREF(values[i]);
        } else {
            *(PyObject **)((char *)made + class->places[i]) = values[i];
        }
    }
    if (failed) {
        Py_CLEAR(made);
    }
    return made;
}

/* setup_diff(TensorDiff, TensorMeta, formats): whether `diff` can make these classes. Each format is a tuple: DLPack's
 * code and bits, name, mantissa, and what `statistics` takes. */
PyObject *sr_setup_diff(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 3 || !PyTuple_Check(args[2]) || PyTuple_GET_SIZE(args[2]) > DIFF_MAX_FORMATS) {
        return sr_wrong_count("setup_diff");
    }
    const char *names[DIFF_N_FIELDS];
    if (!diff_learn_order(args[0], names) || !diff_learn_class(&diff_diff_class, args[0], names, DIFF_N_FIELDS) || !diff_learn_class(&diff_meta_class, args[1], diff_meta_fields, DIFF_N_META)) {
        Py_RETURN_FALSE;
    }
    diff_n_formats = 0; /* of an earlier setup, whose objects stay: it happens once in a process */
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[2]); i++) {
        DiffFormat *f = diff_formats + i;
        if (!PyArg_ParseTuple(
                PyTuple_GET_ITEM(args[2], i), "iiUiO!", &f->code, &f->bits, &f->name, &f->mantissa, &PyTuple_Type,
                &f->format) ||
            stats_read_format(f->format, Py_None, &f->input, &f->add) < 0) {
            return NULL;
        }
        Py_INCREF(f->name), Py_INCREF(f->format);
        diff_n_formats++;
    }
    diff_cpu = PyUnicode_InternFromString("cpu"), diff_strided = PyUnicode_InternFromString("strided");
    diff_empty = PyUnicode_InternFromString("");
    return diff_cpu == NULL || diff_strided == NULL || diff_empty == NULL ? NULL : Py_NewRef(Py_True);
}

static const DiffFormat *diff_format(const SrTensor *t) {
    for (Py_ssize_t i = 0; i < diff_n_formats; i++) {
        if (diff_formats[i].code == t->dtype.code && diff_formats[i].bits == t->dtype.bits && t->dtype.lanes == 1) {
            return diff_formats + i;
        }
    }
    return NULL;
}

/* Where a dimension has one element any stride is right, and DLPack may give another than torch. */
PyObject *sr_common_strides(PyObject *actual, PyObject *expected, const SrTensor *t) {
    SR_NAME(stride, "stride") { return NULL; }
    int one = t->strides == NULL;
    for (int32_t d = 0; d < t->ndim; d++) {
        one |= t->shape[d] == 1;
    }
    if (!one) {
        return sr_tuple_of_numbers(t->strides, t->ndim);
    }
    PyObject *a = PyObject_CallMethodNoArgs(actual, stride), *e = PyObject_CallMethodNoArgs(expected, stride);
    int same = a == NULL || e == NULL ? -1 : PyObject_RichCompareBool(a, e, Py_EQ);
    Py_XDECREF(e);
    if (same != 1) {
        Py_XDECREF(a);
        return same < 0 ? NULL : Py_NewRef(Py_None);
    }
    return a;
}

static PyObject *diff_index(int64_t flat, const SrTensor *t) {
    PyObject *index = PyTuple_New(t->ndim);
    for (int32_t d = t->ndim - 1; index != NULL && d >= 0; d--) {
        PyObject *number = PyLong_FromLongLong(flat % t->shape[d]);
        flat /= t->shape[d];
        if (number == NULL) {
            Py_CLEAR(index);
        } else {
            PyTuple_SET_ITEM(index, d, number);
        }
    }
    return index;
}

static long diff_remaining_bits(uint64_t xor, int mantissa) {
    int length = 0;
    for (; xor != 0 && length < mantissa; xor >>= 1) {
        length++;
    }
    return mantissa < 0 ? -1 : mantissa - length;
}

/* The value of a field; NULL with an exception. In a row of the data file, an index is its place in row-major order. */
static PyObject *diff_value(const DiffField *field, PyObject *name, PyObject *form, const SrFigures *f) {
    const void *at = (const char *)f + field->at;
    switch (field->kind) {
    case DIFF_NAME: return Py_NewRef(name);
    case DIFF_FORM: return Py_NewRef(form); /* a frozen value: one for both */
    case DIFF_COUNT: return PyLong_FromUnsignedLongLong(*(const uint64_t *)at);
    case DIFF_REAL: return PyFloat_FromDouble(*(const double *)at);
    case DIFF_BITS: return PyLong_FromLong(f->remaining_bits);
    case DIFF_INDEX: return form != NULL ? diff_index(f->worst, &f->form) : f->form.ndim ? PyLong_FromLongLong(f->worst) : Py_NewRef(Py_None);
    case DIFF_NO_COUNT: return PyLong_FromLong(0);
    case DIFF_NO_REAL: return PyFloat_FromDouble(-1.0);
    case DIFF_NO_TEXT: break;
    }
    return Py_NewRef(diff_empty);
}

static PyObject *diff_fill(PyObject *name, PyObject *form, const SrFigures *f) {
    PyObject *values[DIFF_N_FIELDS];
    for (Py_ssize_t i = 0; i < DIFF_N_FIELDS; i++) {
        values[i] = diff_value(diff_order[i], name, form, f);
    }
    Py_DECREF(form);
    return diff_make(&diff_diff_class, values, DIFF_N_FIELDS);
}

int sr_read_forms(PyObject *actual, PyObject *expected, SrFigures *found) {
    SrTensor *a = &found->form, e;
    if (!sr_is_tensor(actual) || !sr_is_tensor(expected) || !sr_read_tensor(actual, a) || !sr_read_tensor(expected, &e)) {
        return 0;
    }
    const DiffFormat *f = diff_format(a);
    /* No address: an empty tensor, or a ZeroTensor, which has no memory. */
    if (f == NULL || f != diff_format(&e) || a->ndim != e.ndim || !sr_is_on_cpu(a) || !sr_is_on_cpu(&e) || a->data == NULL ||
        e.data == NULL || !sr_is_contiguous(a) || !sr_is_contiguous(&e)) {
        return 0;
    }
    found->n_elements = 1;
    for (int32_t d = 0; d < a->ndim; d++) {
        if (a->shape[d] != e.shape[d]) {
            return 0;
        }
        found->n_elements *= (uint64_t)a->shape[d];
    }
    found->actual = (char *)a->data + a->byte_offset, found->expected = (char *)e.data + e.byte_offset;
    int negated_a = sr_is_negated(actual), negated_e = negated_a < 0 ? -1 : sr_is_negated(expected);
    if (negated_e < 0) {
        return -1;
    }
    return !negated_a && !negated_e && found->n_elements != 0;
}

void sr_measure(SrFigures *found) {
    const DiffFormat *f = diff_format(&found->form);
    struct stats_totals t = {.worst = -1};
    struct stats_input in = f->input;
    in.actual = found->actual, in.expected = found->expected, in.n = (size_t)found->n_elements;
    stats_add_up(&t, &in, f->add, in.n * (size_t)f->bits / 8);
#define DIFF_COPY_COUNT(name) found->name = t.name;
    SR_COUNTS(DIFF_COPY_COUNT)
    found->n_different = t.n_different, found->max_ulp = t.max_ulp;
    found->max_abs = t.max_abs, found->max_rel = t.max_rel;
    found->rmse = pow(t.n_finite ? t.squares / (double)t.n_finite : 0.0, 0.5); /* not sqrt, which rounds differently from Python's ** */
    found->worst_actual = t.worst_actual, found->worst_expected = t.worst_expected;
    found->remaining_bits = diff_remaining_bits(t.any_xor, f->mantissa);
    found->worst = t.worst < 0 ? 0 : t.worst;
}

PyObject *sr_diff_row(long long seq, Py_ssize_t position, PyObject *tensor, const SrFigures *d) {
    /* Not Py_BuildValue: its format would name each figure once more, in an order of its own that nothing holds to
     * the class. */
    enum { BEFORE = 3 }; /* the name, both forms and the number of elements are in the table of tensors */
    PyObject *row = PyTuple_New(BEFORE + DIFF_N_FIELDS - DIFF_N_OF_TENSOR);
    int failed = row == NULL;
    for (Py_ssize_t i = 0; row != NULL && i < PyTuple_GET_SIZE(row); i++) {
        PyObject *value = i == 0   ? PyLong_FromLongLong(seq)
                          : i == 1 ? PyLong_FromSsize_t(position)
                          : i == 2 ? Py_NewRef(tensor)
                                   : diff_value(diff_order[i - BEFORE + DIFF_N_OF_TENSOR], NULL, NULL, d);
        failed |= value == NULL;
        PyTuple_SET_ITEM(row, i, value);
    }
    if (failed) {
        Py_CLEAR(row);
    }
    return row;
}

/* diff(name, actual, expected): see numerics/diff.py. None for what is not plain, or differs in form. */
PyObject *sr_diff(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 3) {
        return sr_wrong_count("diff");
    }
    SrFigures found;
    int plain = PyUnicode_Check(args[0]) ? sr_read_forms(args[1], args[2], &found) : 0;
    if (plain != 1) {
        return plain < 0 ? NULL : Py_NewRef(Py_None);
    }
    PyObject *strides = sr_common_strides(args[1], args[2], &found.form);
    if (strides == NULL || strides == Py_None) { /* Python describes the difference */
        return strides;
    }
    PyObject *values[DIFF_N_META] = {
        Py_NewRef(diff_format(&found.form)->name), sr_tuple_of_numbers(found.form.shape, found.form.ndim), strides, Py_NewRef(diff_cpu),
        Py_NewRef(diff_strided),
    };
    PyObject *form = diff_make(&diff_meta_class, values, DIFF_N_META);
    if (form == NULL) {
        return NULL;
    }
    sr_measure(&found);
    return diff_fill(args[0], form, &found);
}

/* The elements that differ, and how. */

enum { DIFFERING_ZEROS = 1, DIFFERING_CLASSES = 2, DIFFERING_NANS = 4, DIFFERING_PART = 2048 };

typedef size_t (*differing_finder)(stats_memory, stats_memory, size_t, int, int64_t *, unsigned char *, size_t, unsigned *);

/* Indices and kinds of the elements that differ; room for `most` of them. Returns how many there are, and all kinds. */
#define DIFFERING_FIND(width)                                                                                                    \
    static size_t find_##width(                                                                                        \
        stats_memory actual, stats_memory expected, size_t n, int mantissa, int64_t *where, unsigned char *kinds, size_t most,          \
        unsigned *all) {                                                                                               \
        const uint##width##_t sign = (uint##width##_t)((uint##width##_t)1 << (width - 1));                             \
        const uint##width##_t infinite = (uint##width##_t)(sign - ((uint##width##_t)1 << mantissa));                   \
        size_t found = 0;                                                                                              \
        for (size_t start = 0; start < n; start += DIFFERING_PART) {                                                             \
            size_t stop = n - start < DIFFERING_PART ? n : start + DIFFERING_PART, bytes = width / 8;                                      \
            if (!memcmp(actual + start * bytes, expected + start * bytes, (stop - start) * bytes)) continue;                \
            for (size_t i = start; i < stop; i++) {                                                                    \
                uint##width##_t a, e;                                                                                  \
                memcpy(&a, actual + i * bytes, bytes);                                                                   \
                memcpy(&e, expected + i * bytes, bytes);                                                                  \
                if (a == e) continue;                                                                                  \
                if (found == most) return found + 1;                                                                   \
                a = (uint##width##_t)(a & ~sign), e = (uint##width##_t)(e & ~sign);                                    \
                unsigned nan_a = a > infinite, nan_e = e > infinite, special = (a == infinite) | (e == infinite);      \
                unsigned kind = ((a | e) == 0 ? DIFFERING_ZEROS : 0u) | (nan_a & nan_e ? DIFFERING_NANS : 0u) |                            \
                                ((nan_a ^ nan_e) | (special & !nan_a & !nan_e) ? DIFFERING_CLASSES : 0u);                        \
                where[found] = (int64_t)i;                                                                             \
                kinds[found++] = (unsigned char)kind;                                                                  \
                *all |= kind;                                                                                          \
            }                                                                                                          \
        }                                                                                                              \
        return found;                                                                                                  \
    }

DIFFERING_FIND(16)
DIFFERING_FIND(32)
DIFFERING_FIND(64)

/* differing(actual, expected, n, width, mantissa, where, kinds, most): addresses of two dense tensors of IEEE floats, their
 * elements, their format, and room for what differs. Returns how many do (more than `most`: too many), and all kinds. */
PyObject *sr_differing(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    (void)module;
    if (n_args != 8) {
        return sr_wrong_count("differing");
    }
    stats_memory actual = PyLong_AsVoidPtr(args[0]), expected = PyLong_AsVoidPtr(args[1]);
    size_t n = PyLong_AsSize_t(args[2]), most = PyLong_AsSize_t(args[7]), found = 0;
    long width = PyLong_AsLong(args[3]), mantissa = PyLong_AsLong(args[4]);
    int64_t *where = PyLong_AsVoidPtr(args[5]);
    unsigned char *kinds = PyLong_AsVoidPtr(args[6]);
    unsigned all = 0;
    if (PyErr_Occurred()) {
        return NULL;
    }
    if ((width != 16 && width != 32 && width != 64) || mantissa < 1 || mantissa > width - 2) {
        return PyErr_Format(PyExc_ValueError, "no floats of %ld bits with %ld of mantissa", width, mantissa);
    }
    differing_finder find = width == 16 ? find_16 : width == 32 ? find_32 : find_64;
    if (n <= SR_FEW_BYTES * 8 / (size_t)width) {
        found = find(actual, expected, n, (int)mantissa, where, kinds, most, &all);
    } else {
        Py_BEGIN_ALLOW_THREADS
        found = find(actual, expected, n, (int)mantissa, where, kinds, most, &all);
        Py_END_ALLOW_THREADS
    }
    return Py_BuildValue("nI", (Py_ssize_t)found, all);
}

/* The sketch of a matrix product. */

/* Dense numbers of float32 in C order if `contiguous`; 0 for others, and where strides are not given; -1 with an exception. */
static int sketch_read(PyObject *tensor, int contiguous, SrTensor *found) {
    if (!sr_is_tensor(tensor) || !sr_read_tensor(tensor, found) || found->device.type != SR_DLPACK_CPU || found->data == NULL ||
        found->dtype.code != SR_DLPACK_FLOAT || found->dtype.bits != 32 || found->dtype.lanes != 1 || found->strides == NULL ||
        (contiguous && !sr_is_contiguous(found))) {
        return 0;
    }
    int negated = sr_is_negated(tensor);
    return negated < 0 ? -1 : !negated;
}

static float *sketch_data(const SrTensor *t) { return (float *)(void *)((char *)t->data + t->byte_offset); }

/* By rows, by columns, or NULL where neither is contiguous. */
static sketch_function sketch_loop(sr_instructions set, int64_t row_stride, int64_t column_stride) {
#ifdef SR_HAS_X86_SETS
    if (column_stride == 1 && set != SR_PLAIN) return set == SR_AVX512 ? stats_add_rows_avx512 : stats_add_rows_avx2;
    if (row_stride == 1 && set != SR_PLAIN) return set == SR_AVX512 ? stats_add_columns_avx512 : stats_add_columns_avx2;
#endif
    (void)set;
    return column_stride == 1 ? stats_add_rows_plain : row_stride == 1 ? stats_add_columns_plain : NULL;
}

/* add_rounded_product(out, matrix, vector, rounding, instructions=None): adds rounded(matrix) @ vector to `out`, all of
 * float32: (m,), (m, k) and (k,), or (b, m), (b, m, k) and (k,) or (b, k). False, and nothing done, for tensors that are not
 * plain, and where neither rows nor columns are contiguous. */
PyObject *sr_add_rounded_product(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n < 4 || n > 5) return sr_wrong_count("add_rounded_product");
    struct sketch_product p;
    sr_instructions set;
    if (!PyArg_ParseTuple(args[3], "IIII", &p.to.half, &p.to.dropped, &p.to.to_even, &p.to.kept) ||
        sr_read_instructions(n == 5 ? args[4] : Py_None, sr_best_instructions(0), &set)) {
        return NULL;
    }
    SrTensor out, matrix, vector;
    int plain = sketch_read(args[0], 1, &out);
    if (plain == 1) plain = sketch_read(args[1], 0, &matrix);
    if (plain == 1) plain = sketch_read(args[2], 1, &vector);
    if (plain != 1) return plain < 0 ? NULL : Py_NewRef(Py_False);
    int rows = matrix.ndim - 2, last = vector.ndim - 1; /* dimensions */
    if (rows < 0 || rows > 1 || out.ndim != rows + 1 || last < 0 || last > rows || out.shape[rows] != matrix.shape[rows] ||
        vector.shape[last] != matrix.shape[rows + 1] || (rows && out.shape[0] != matrix.shape[0]) ||
        (last && vector.shape[0] != matrix.shape[0]) || p.to.dropped > 31) {
        Py_RETURN_FALSE;
    }
    p.n_rows = matrix.shape[rows], p.n_columns = matrix.shape[rows + 1];
    p.row_stride = matrix.strides[rows], p.column_stride = matrix.strides[rows + 1];
    sketch_function add = sketch_loop(set, p.row_stride, p.column_stride);
    if (add == NULL) Py_RETURN_FALSE;
    int64_t n_matrices = rows ? matrix.shape[0] : 1;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t k = 0; k < n_matrices; k++) {
        p.matrix = sketch_data(&matrix) + (rows ? k * matrix.strides[0] : 0);
        p.vector = sketch_data(&vector) + (last ? k * p.n_columns : 0);
        p.out = sketch_data(&out) + k * p.n_rows;
        add(&p);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_TRUE;
}

/* Add one matrix of a batch, times a vector, to `out`. */
static void sketch_add(sketch_function add, const SrTensor *t, int64_t k, const float *vector, float *out, struct sketch_rounding to) {
    int rows = t->ndim - 2;
    struct sketch_product p = {
        sketch_data(t) + (rows ? k * t->strides[0] : 0), vector, out, t->shape[rows], t->shape[rows + 1], t->strides[rows],
        t->strides[rows + 1], to};
    add(&p);
}

/* Whether (…, rows, columns) with as many matrices; the loop for it in `add`. */
static int sketch_fits(const SrTensor *t, int ndim, int64_t n, int64_t rows, int64_t columns, sr_instructions set, sketch_function *add) {
    if (t->ndim != ndim || t->shape[ndim - 2] != rows || t->shape[ndim - 1] != columns || (ndim == 3 && t->shape[0] != n)) return 0;
    *add = sketch_loop(set, t->strides[ndim - 2], t->strides[ndim - 1]);
    return *add != NULL;
}

/* product_sketch(left, right, actual, vector, start, factor, rounding, instructions=None): of
 * ``actual @ vector + factor * rounded(left) @ (rounded(right) @ vector) + start``, the sum of squares and the greatest size;
 * NaN where one is. All of float32: (m, k), (k, n), (m, n) and (n,), or batches of matrices; `start` is (m,), (b, m) or None.
 * None, where a tensor is not plain, or neither its rows nor its columns are contiguous. */
PyObject *sr_product_sketch(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    (void)module;
    if (n_args < 7 || n_args > 8) return sr_wrong_count("product_sketch");
    struct sketch_rounding to;
    const struct sketch_rounding as_it_is = {0, 0, 0, 0xffffffff};
    sr_instructions set;
    float factor = (float)PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred() || !PyArg_ParseTuple(args[6], "IIII", &to.half, &to.dropped, &to.to_even, &to.kept) ||
        sr_read_instructions(n_args == 8 ? args[7] : Py_None, sr_best_instructions(0), &set)) {
        return NULL;
    }
    SrTensor left, right, actual, vector, start;
    int plain = sketch_read(args[0], 0, &left), starts = args[4] != Py_None;
    if (plain == 1) plain = sketch_read(args[1], 0, &right);
    if (plain == 1) plain = sketch_read(args[2], 0, &actual);
    if (plain == 1) plain = sketch_read(args[3], 1, &vector);
    if (plain == 1 && starts) plain = sketch_read(args[4], 1, &start);
    if (plain != 1) return plain < 0 ? NULL : Py_NewRef(Py_None);
    int ndim = left.ndim;
    if (ndim < 2 || ndim > 3 || vector.ndim != 1 || to.dropped > 31) Py_RETURN_NONE;
    int64_t m = left.shape[ndim - 2], inner = left.shape[ndim - 1], n = vector.shape[0], batch = ndim == 3 ? left.shape[0] : 1;
    sketch_function add_left, add_right, add_actual;
    if (!sketch_fits(&left, ndim, batch, m, inner, set, &add_left) || !sketch_fits(&right, ndim, batch, inner, n, set, &add_right) ||
        !sketch_fits(&actual, ndim, batch, m, n, set, &add_actual) ||
        (starts && (start.ndim != ndim - 1 || start.shape[ndim - 2] != m || (ndim == 3 && start.shape[0] != batch)))) {
        Py_RETURN_NONE;
    }
    float *room = malloc(((size_t)m + (size_t)inner) * sizeof *room + 1);
    if (room == NULL) return PyErr_NoMemory();
    float *rest = room, *product = room + m;
    double squares = 0, greatest = 0;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t k = 0; k < batch; k++) {
        memset(product, 0, (size_t)inner * sizeof *product);
        sketch_add(add_right, &right, k, sketch_data(&vector), product, to);
        for (int64_t i = 0; i < inner; i++) product[i] *= factor;
        if (starts) {
            memcpy(rest, sketch_data(&start) + k * m, (size_t)m * sizeof *rest);
        } else {
            memset(rest, 0, (size_t)m * sizeof *rest);
        }
        sketch_add(add_actual, &actual, k, sketch_data(&vector), rest, as_it_is);
        sketch_add(add_left, &left, k, product, rest, to);
        for (int64_t i = 0; i < m; i++) {
            double size = fabs((double)rest[i]);
            squares += size * size;
            greatest = size > greatest || size != size ? size : greatest;
        }
    }
    Py_END_ALLOW_THREADS
    free(room);
    return Py_BuildValue("dd", squares, squares != squares ? squares : greatest);
}

/* How near two results are. */

/* Places that are farther apart than the bound. */
struct near_places {
    int64_t *at;
    size_t n, room;
};

/* Those of one block; -1 where there is no memory for them. Plain C: few blocks have any. */
static int near_add(struct near_places *found, const float *actual, const float *expected, size_t n, size_t start, const struct near_pass *p) {
    for (size_t i = 0; i < n; i++) {
        if (fabsf(actual[i] - expected[i]) - (fabsf(expected[i]) * p->relative + p->absolute) <= 0.0f) continue;
        if (found->n == found->room) {
            size_t room = found->room ? 2 * found->room : 256;
            int64_t *more = realloc(found->at, room * sizeof *more);
            if (more == NULL) return -1;
            found->at = more, found->room = room;
        }
        found->at[found->n++] = (int64_t)(start + i);
    }
    return 0;
}

/* A block in whole lanes: what is missing at the end is zero on both sides, which is near and adds nothing. */
static size_t near_lanes(const float **actual, const float **expected, size_t n, float *room) {
    size_t whole = (n + NEAR_LANES - 1) / NEAR_LANES * NEAR_LANES;
    if (whole == n) return n;
    memset(room, 0, 2 * NEAR_BLOCK * sizeof *room);
    memcpy(room, *actual, n * sizeof *room), memcpy(room + NEAR_BLOCK, *expected, n * sizeof *room);
    *actual = room, *expected = room + NEAR_BLOCK;
    return whole;
}

/* nearness(actual, expected, relative, absolute, weighted, instructions=None): of float32 in C order, as many elements each;
 * see numerics/nearness.py. (places as 8-byte integers, sum of gap times expected, of squares, weighted factor or 0); None
 * for tensors that are not plain. */
PyObject *sr_nearness(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    (void)module;
    if (n_args < 5 || n_args > 6) return sr_wrong_count("nearness");
    struct near_pass p = {.relative = (float)PyFloat_AsDouble(args[2]), .absolute = (float)PyFloat_AsDouble(args[3])};
    int weighted = PyObject_IsTrue(args[4]);
    sr_instructions set;
    if (PyErr_Occurred() || sr_read_instructions(n_args == 6 ? args[5] : Py_None, sr_best_instructions(0), &set)) return NULL;
    SrTensor actual, expected;
    int plain = sketch_read(args[0], 1, &actual);
    if (plain == 1) plain = sketch_read(args[1], 1, &expected);
    if (plain != 1) return plain < 0 ? NULL : Py_NewRef(Py_None);
    size_t n = 1, n_expected = 1;
    for (int32_t d = 0; d < actual.ndim; d++) n *= (size_t)actual.shape[d];
    for (int32_t d = 0; d < expected.ndim; d++) n_expected *= (size_t)expected.shape[d];
    if (n != n_expected) Py_RETURN_NONE;
    near_block block = stats_near_block_plain;
    near_weights weights = stats_near_weights_plain;
#ifdef SR_HAS_X86_SETS
    if (set != SR_PLAIN) {
        block = set == SR_AVX512 ? stats_near_block_avx512 : stats_near_block_avx2;
        weights = set == SR_AVX512 ? stats_near_weights_avx512 : stats_near_weights_avx2;
    }
#endif
    const float *a = sketch_data(&actual), *e = sketch_data(&expected);
    struct near_places found = {0};
    int failed = 0;
    float room[2 * NEAR_BLOCK];
    Py_BEGIN_ALLOW_THREADS
    for (size_t start = 0; start < n && !failed; start += NEAR_BLOCK) {
        size_t length = n - start < NEAR_BLOCK ? n - start : NEAR_BLOCK;
        const float *some_a = a + start, *some_e = e + start;
        size_t whole = near_lanes(&some_a, &some_e, length, room);
        if (block(some_a, some_e, whole, &p)) failed = near_add(&found, some_a, some_e, length, start, &p);
    }
    p.level = n ? (float)(sqrt(p.size) / sqrt((double)n)) : 0;
    for (size_t start = 0; start < n && weighted && p.level > 0 && p.level <= FLT_MAX && !failed; start += NEAR_BLOCK) {
        const float *some_a = a + start, *some_e = e + start;
        size_t whole = near_lanes(&some_a, &some_e, n - start < NEAR_BLOCK ? n - start : NEAR_BLOCK, room);
        weights(some_a, some_e, whole, &p);
    }
    Py_END_ALLOW_THREADS
    PyObject *result = failed ? PyErr_NoMemory() : Py_BuildValue(
        "Nddd", PyByteArray_FromStringAndSize((const char *)found.at, (Py_ssize_t)(found.n * sizeof *found.at)), p.gap, p.size,
        p.weighted_size > 0 ? p.weighted_gap / p.weighted_size : 0.0);
    free(found.at);
    return result;
}
