/* numerics.diff for two plain tensors of one form, which nearly all are: from the tensors to a finished TensorDiff. */

#include "core.h"
#include "stats.h"

#include <structmember.h>

enum { N_META = 5, N_DIFF = 22, MOST_FORMATS = 32, FLOATING = 2, BRAIN_FLOATING = 4 };

/* In the order in which they are filled in below. */
static const char *const meta_names[N_META] = {"dtype", "shape", "stride", "device", "layout"};
static const char *const diff_names[N_DIFF] = {
    "name",          "actual",       "expected",       "n_elements",     "n_different",     "n_mismatched",
    "max_abs",       "max_rel",      "rmse",           "max_ulp",        "remaining_bits",  "n_nan",
    "n_inf",         "n_zero_sign",  "n_subnormal",    "worst_index",    "worst_actual",    "worst_expected",
    "excess_actual", "excess_expected", "detail",      "n_from_zero",
};

typedef struct {
    PyTypeObject *type;
    Py_ssize_t places[N_DIFF]; /* of the slots in an object */
} Class;

typedef struct {
    int code, bits, mantissa; /* code and bits: as in DLPack; mantissa: -1 for integers */
    PyObject *name, *format;  /* name: as in TensorMeta; format: keeps alive what `input` points to */
    struct input input;
    add_function add;
} Format;

static Class meta_class, diff_class;
static Format formats[MOST_FORMATS];
static Py_ssize_t n_formats;
static PyObject *cpu, *strided, *nothing; /* strings */

/* Whether a class has these slots and no others. A frozen class sets its own at the pace of setattr. */
static int learn(Class *class, PyObject *type, const char *const *names, Py_ssize_t n) {
    PyObject *slots = PyObject_GetAttrString(type, "__slots__");
    int known = slots != NULL && PyType_Check(type) && PyTuple_Check(slots) && PyTuple_GET_SIZE(slots) == n;
    for (Py_ssize_t i = 0; known && i < n; i++) {
        PyObject *descriptor = PyObject_GetAttrString(type, names[i]);
        known = descriptor != NULL && Py_IS_TYPE(descriptor, &PyMemberDescr_Type) &&
                ((PyMemberDescrObject *)descriptor)->d_member->type == T_OBJECT_EX;
        if (known) {
            class->places[i] = ((PyMemberDescrObject *)descriptor)->d_member->offset;
        }
        Py_XDECREF(descriptor);
    }
    Py_XDECREF(slots);
    PyErr_Clear();
    if (known) {
        Py_XSETREF(class->type, (PyTypeObject *)Py_NewRef(type));
    }
    return known;
}

/* An object with these values, whose references it takes, also where it fails; NULL among them is a failure. */
static PyObject *make(const Class *class, PyObject **values, Py_ssize_t n) {
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
PyObject *setup_diff(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 3 || !PyTuple_Check(args[2]) || PyTuple_GET_SIZE(args[2]) > MOST_FORMATS) {
        return wrong_count("setup_diff");
    }
    if (!learn(&diff_class, args[0], diff_names, N_DIFF) || !learn(&meta_class, args[1], meta_names, N_META)) {
        Py_RETURN_FALSE;
    }
    n_formats = 0; /* of an earlier setup, whose objects stay: it happens once in a process */
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[2]); i++) {
        Format *f = formats + i;
        if (!PyArg_ParseTuple(
                PyTuple_GET_ITEM(args[2], i), "iiUiO!", &f->code, &f->bits, &f->name, &f->mantissa, &PyTuple_Type,
                &f->format) ||
            read_format(f->format, Py_None, &f->input, &f->add) < 0) {
            return NULL;
        }
        Py_INCREF(f->name), Py_INCREF(f->format);
        n_formats++;
    }
    cpu = PyUnicode_InternFromString("cpu"), strided = PyUnicode_InternFromString("strided");
    nothing = PyUnicode_InternFromString("");
    return cpu == NULL || strided == NULL || nothing == NULL ? NULL : Py_NewRef(Py_True);
}

static const Format *format_of(const Tensor *t) {
    for (Py_ssize_t i = 0; i < n_formats; i++) {
        if (formats[i].code == t->dtype.code && formats[i].bits == t->dtype.bits && t->dtype.lanes == 1) {
            return formats + i;
        }
    }
    return NULL;
}

static PyObject *tuple_of(const int64_t *numbers, Py_ssize_t n) {
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t d = 0; tuple != NULL && d < n; d++) {
        PyObject *number = PyLong_FromLongLong(numbers[d]);
        if (number == NULL) {
            Py_CLEAR(tuple);
        } else {
            PyTuple_SET_ITEM(tuple, d, number);
        }
    }
    return tuple;
}

/* Strides of two contiguous tensors of one shape: a tuple, None if they differ, NULL with an exception. Where a
 * dimension has one element, any stride does, and DLPack may tell another than torch. */
static PyObject *strides_of(PyObject *left, PyObject *right, const Tensor *t) {
    NAME(stride, "stride") { return NULL; }
    int one = t->strides == NULL;
    for (int32_t d = 0; d < t->ndim; d++) {
        one |= t->shape[d] == 1;
    }
    if (!one) {
        return tuple_of(t->strides, t->ndim);
    }
    PyObject *mine = PyObject_CallMethodNoArgs(left, stride), *theirs = PyObject_CallMethodNoArgs(right, stride);
    int same = mine == NULL || theirs == NULL ? -1 : PyObject_RichCompareBool(mine, theirs, Py_EQ);
    Py_XDECREF(theirs);
    if (same != 1) {
        Py_XDECREF(mine);
        return same < 0 ? NULL : Py_NewRef(Py_None);
    }
    return mine;
}

static PyObject *index_of(int64_t flat, const Tensor *t) {
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

static long remaining_bits(uint64_t xor, int mantissa) {
    int length = 0;
    for (; xor != 0 && length < mantissa; xor >>= 1) {
        length++;
    }
    return mantissa < 0 ? -1 : mantissa - length;
}

static PyObject *filled(
    PyObject *name, PyObject *form, const Tensor *shape, const Format *f, const struct input *in, const struct totals *t) {
    double mean = t->n_finite ? t->squares / (double)t->n_finite : 0.0;
    PyObject *values[N_DIFF] = {
        Py_NewRef(name),
        form,
        Py_NewRef(form), /* a frozen value: one for both */
        PyLong_FromSize_t(in->n),
        PyLong_FromUnsignedLongLong(t->n_different),
        PyLong_FromLong(0),
        PyFloat_FromDouble(t->max_abs),
        PyFloat_FromDouble(t->max_rel),
        PyFloat_FromDouble(pow(mean, 0.5)), /* not sqrt, which rounds otherwise than Python's ** */
        PyLong_FromUnsignedLongLong(t->max_ulp),
        PyLong_FromLong(remaining_bits(t->any_xor, f->mantissa)),
        PyLong_FromUnsignedLongLong(t->n_nan),
        PyLong_FromUnsignedLongLong(t->n_inf),
        PyLong_FromUnsignedLongLong(t->n_zero_sign),
        PyLong_FromUnsignedLongLong(t->n_subnormal),
        index_of(t->worst < 0 ? 0 : t->worst, shape),
        PyFloat_FromDouble(t->worst_actual),
        PyFloat_FromDouble(t->worst_expected),
        PyFloat_FromDouble(-1.0),
        PyFloat_FromDouble(-1.0),
        Py_NewRef(nothing),
        PyLong_FromUnsignedLongLong(t->n_from_zero),
    };
    return make(&diff_class, values, N_DIFF);
}

/* diff(name, actual, expected): see numerics/diff.py. None where this cannot tell. */
PyObject *diff(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 3) {
        return wrong_count("diff");
    }
    Tensor a, e;
    if (!is_tensor(args[1]) || !is_tensor(args[2]) || !PyUnicode_Check(args[0]) || !read_tensor(args[1], &a) ||
        !read_tensor(args[2], &e)) {
        Py_RETURN_NONE;
    }
    const Format *f = format_of(&a);
    /* No address: an empty tensor, or a ZeroTensor, which has no memory. */
    if (f == NULL || f != format_of(&e) || a.ndim != e.ndim || !is_on_cpu(&a) || !is_on_cpu(&e) || a.data == NULL ||
        e.data == NULL || !is_contiguous(&a) || !is_contiguous(&e)) {
        Py_RETURN_NONE;
    }
    struct input in = f->input;
    in.left = (memory)a.data + a.byte_offset, in.right = (memory)e.data + e.byte_offset, in.n = 1;
    for (int32_t d = 0; d < a.ndim; d++) {
        if (a.shape[d] != e.shape[d]) {
            Py_RETURN_NONE;
        }
        in.n *= (size_t)a.shape[d];
    }
    int left = is_negated(args[1]), right = left < 0 ? -1 : is_negated(args[2]);
    if (right < 0) {
        return NULL;
    }
    if (left || right || in.n == 0) {
        Py_RETURN_NONE;
    }
    PyObject *strides = strides_of(args[1], args[2], &a);
    if (strides == NULL || strides == Py_None) { /* how they differ is told in Python */
        return strides;
    }
    PyObject *values[N_META] = {
        Py_NewRef(f->name), tuple_of(a.shape, a.ndim), strides, Py_NewRef(cpu), Py_NewRef(strided),
    };
    PyObject *form = make(&meta_class, values, N_META);
    if (form == NULL) {
        return NULL;
    }
    struct totals t = {.worst = -1};
    add_up(&t, &in, f->add, in.n * (size_t)f->bits / 8);
    return filled(args[0], form, &e, f, &in, &t);
}
