/* A call whose results differ by no more than its context passes: `ContextBounds.judge` of judge/remembered_bounds.py and
 * `SameDeviceVerdicts.record_close` of replay/paths/same_device_verdicts.py are the specification.
 *
 * Python records the first such call of a context, and the keys under which it found the rows that this call refers to:
 * its verdict, and the forms of its results. Calls that need the same rows are recorded here.
 */

#include "compare.h"

#include <string.h>

enum { CLOSE_MAX_ULP = 16, CLOSE_MAX_DIMS = 6 };

typedef struct {
    uint64_t max_ulp;
    int of_operator, coarse;
    int n_dims; /* -1 where no form is known */
    uint8_t code, bits; /* of the dtype, as in DLPack */
    int64_t sizes[CLOSE_MAX_DIMS];
    PyObject *strides, *tensor;             /* owned: a tuple; the key of the form; NULL where no form is known */
    PyObject *verdicts[CLOSE_MAX_ULP + 1]; /* owned: keys by distance, NULL where it was not met */
} CloseResult;

typedef struct {
    PyObject_VAR_HEAD
    int passes_subnormals;
    double enough, differing; /* see `ContextBounds` */
    CloseResult results[];
} SrCloseBounds;

static PyTypeObject *close_type;

/* CloseBounds(((max_ulp, of_operator, coarse), …), enough, differing) */
static PyObject *close_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *results;
    double enough, differing;
    if (kwargs != NULL || !PyArg_ParseTuple(args, "O!dd:CloseBounds", &PyTuple_Type, &results, &enough, &differing)) {
        return kwargs == NULL ? NULL : sr_wrong_count("CloseBounds");
    }
    SrCloseBounds *self = (SrCloseBounds *)type->tp_alloc(type, PyTuple_GET_SIZE(results));
    if (self == NULL) {
        return NULL;
    }
    self->enough = enough, self->differing = differing;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(results); k++) {
        CloseResult *r = self->results + k;
        unsigned long long max_ulp;
        r->n_dims = -1;
        if (!PyTuple_Check(PyTuple_GET_ITEM(results, k)) ||
            !PyArg_ParseTuple(PyTuple_GET_ITEM(results, k), "Kpp", &max_ulp, &r->of_operator, &r->coarse)) {
            Py_DECREF(self);
            return PyErr_Occurred() ? NULL : sr_wrong_count("CloseBounds");
        }
        r->max_ulp = max_ulp;
    }
    return (PyObject *)self;
}

static void close_forget(CloseResult *r) {
    r->n_dims = -1;
    Py_CLEAR(r->strides);
    Py_CLEAR(r->tensor);
}

static void close_dealloc(SrCloseBounds *self) {
    PyTypeObject *type = Py_TYPE(self);
    for (Py_ssize_t k = 0; k < Py_SIZE(self); k++) {
        close_forget(self->results + k);
        for (int ulp = 0; ulp <= CLOSE_MAX_ULP; ulp++) {
            Py_CLEAR(self->results[k].verdicts[ulp]);
        }
    }
    type->tp_free(self);
    Py_DECREF(type);
}

static CloseResult *close_result(SrCloseBounds *self, PyObject *position) {
    Py_ssize_t k = PyLong_AsSsize_t(position);
    if (k < 0 || k >= Py_SIZE(self)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_IndexError, "CloseBounds: no such result");
        }
        return NULL;
    }
    return self->results + k;
}

/* learn_form(position, tensor, strides, key): the form of a result that differed. */
static PyObject *close_learn_form(SrCloseBounds *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 4 || !sr_is_tensor(args[1]) || !PyTuple_Check(args[2])) {
        return sr_wrong_count("CloseBounds.learn_form");
    }
    CloseResult *r = close_result(self, args[0]);
    if (r == NULL) {
        return NULL;
    }
    close_forget(r);
    SrTensor t;
    if (sr_read_tensor(args[1], &t) && t.ndim <= CLOSE_MAX_DIMS) {
        memcpy(r->sizes, t.shape, (size_t)t.ndim * sizeof *r->sizes);
        r->n_dims = t.ndim, r->code = t.dtype.code, r->bits = t.dtype.bits;
        r->strides = Py_NewRef(args[2]);
        r->tensor = Py_NewRef(args[3]);
    }
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* learn_verdict(position, ulp, key): of calls whose first result that differs is this one, by that much. */
static PyObject *close_learn_verdict(SrCloseBounds *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 3) {
        return sr_wrong_count("CloseBounds.learn_verdict");
    }
    CloseResult *r = close_result(self, args[0]);
    Py_ssize_t ulp = r == NULL ? -1 : PyLong_AsSsize_t(args[1]);
    if (r == NULL || (ulp == -1 && PyErr_Occurred())) {
        return NULL;
    }
    if (ulp >= 0 && ulp <= CLOSE_MAX_ULP) {
        Py_XSETREF(r->verdicts[ulp], Py_NewRef(args[2]));
    }
    Py_RETURN_NONE;
}

static PyObject *close_pass_subnormals(SrCloseBounds *self, PyObject *none) {
    (void)none;
    self->passes_subnormals = 1;
    Py_RETURN_NONE;
}

/* ContextBounds._passes */
static int close_passes(const SrCloseBounds *self, const CloseResult *r, const SrFigures *d) {
    if (d->max_ulp < 1 || d->max_ulp > r->max_ulp || d->max_ulp > CLOSE_MAX_ULP || d->n_nan || d->n_inf || d->n_zero_sign) {
        return 0;
    }
    if (r->coarse) {
        int few = (double)d->n_elements < self->enough || (double)d->n_different < self->differing * (double)d->n_elements;
        return few && (r->of_operator || !d->n_subnormal);
    }
    return !d->n_subnormal || r->of_operator || (self->passes_subnormals && d->max_ulp == 1);
}

/* Whether a result has the form that is known; -1 with an exception. */
static int close_has_form(const CloseResult *r, PyObject *actual, PyObject *expected, SrFigures *d) {
    int plain = sr_read_forms(actual, expected, d), one = 0;
    if (plain != 1 || d->form.ndim != r->n_dims || d->form.dtype.code != r->code || d->form.dtype.bits != r->bits) {
        return plain < 0 ? -1 : 0;
    }
    for (int k = 0; k < r->n_dims; k++) {
        if (d->form.shape[k] != r->sizes[k]) {
            return 0;
        }
        one |= r->sizes[k] == 1;
    }
    if (!one) { /* it is contiguous: one layout */
        return 1;
    }
    PyObject *strides = sr_common_strides(actual, expected, &d->form);
    int same = strides == NULL ? -1 : PyObject_RichCompareBool(strides, r->strides, Py_EQ);
    Py_XDECREF(strides);
    return same;
}

int sr_add_close(
    SrCompareHandler *self, SrCall *call, PyObject *const *mine, PyObject *const *others, Py_ssize_t n, long long ns, long long other_ns,
    int *failed) {
    long long actual_ns = self->on_target ? ns : other_ns, expected_ns = self->on_target ? other_ns : ns;
    /* What accumulated before this call is followed in Python. */
    if (self->keeps_drift || n > SR_MAX_CLOSE || sr_needs_look(self, call, actual_ns, expected_ns)) {
        return 0;
    }
    PyObject *context = PyLong_FromLongLong(call->context), *rows[SR_MAX_CLOSE] = {0};
    SrCloseBounds *bounds = context == NULL ? NULL : (SrCloseBounds *)PyDict_GetItemWithError(self->bounds, context);
    Py_XDECREF(context);
    if (bounds == NULL || !Py_IS_TYPE((PyObject *)bounds, close_type) || Py_SIZE(bounds) != n) {
        return 0;
    }
    Py_INCREF(bounds); /* another thread may forget it while there is no GIL */
    const SrFigures *measured[SR_MAX_CLOSE] = {0};
    SrFigures figures[SR_MAX_CLOSE];
    PyObject *verdict = NULL;
    Py_ssize_t n_different = 0;
    int passes = 1;
    for (Py_ssize_t k = 0; k < n && passes == 1; k++) {
        PyObject *actual = self->on_target ? mine[k] : others[k], *expected = self->on_target ? others[k] : mine[k];
        PyObject *pair[] = {actual, expected}, *equal = sr_plainly_equal(NULL, pair, 2);
        int same = equal == NULL ? -1 : equal == Py_True;
        Py_XDECREF(equal);
        if (same == 1) {
            continue;
        }
        CloseResult *r = bounds->results + k;
        passes = same < 0 ? -1 : r->max_ulp && r->n_dims >= 0 ? close_has_form(r, actual, expected, figures + k) : 0;
        if (passes != 1) {
            break;
        }
        sr_measure(figures + k);
        passes = close_passes(bounds, r, figures + k);
        if (n_different++ == 0 && passes) {
            PyObject *key = r->verdicts[figures[k].max_ulp];
            verdict = key == NULL ? NULL : PyDict_GetItemWithError(self->verdict_numbers, key);
            passes = verdict != NULL;
        }
        measured[k] = figures + k;
    }
    passes = passes == 1 && n_different > 0;
    /* The number is taken before the rows are made, and they are added before the call: what is written is whole. */
    long long seq = -1;
    Py_XINCREF(verdict);
    PyObject *tensors[SR_MAX_CLOSE] = {0};
    for (Py_ssize_t k = 0; k < n && passes; k++) {
        PyObject *key = measured[k] == NULL ? NULL : bounds->results[k].tensor;
        tensors[k] = key == NULL ? NULL : PyDict_GetItemWithError(self->tensor_numbers, key);
        passes = measured[k] == NULL || tensors[k] != NULL;
        Py_XINCREF(tensors[k]);
    }
    if (passes) {
        seq = sr_next_seq((SrRowBuffer *)self->rows);
        Py_ssize_t position = 0;
        for (Py_ssize_t k = 0; k < n && !*failed; k++) {
            if (measured[k] != NULL) {
                rows[k] = sr_diff_row(seq, position++, tensors[k], measured[k]);
                *failed = rows[k] == NULL || PyList_Append(self->diff_rows, rows[k]) ? -1 : 0;
                Py_XDECREF(rows[k]);
            }
        }
        *failed = *failed || sr_add_row(self, seq, call->context, verdict, expected_ns, actual_ns, -1.0) ? -1 : 0;
    }
    for (Py_ssize_t k = 0; k < n; k++) {
        Py_XDECREF(tensors[k]);
    }
    Py_XDECREF(verdict);
    Py_DECREF(bounds);
    return passes;
}

static PyMethodDef close_methods[] = {
    {"learn_form", (PyCFunction)(void (*)(void))close_learn_form, METH_FASTCALL, NULL},
    {"learn_verdict", (PyCFunction)(void (*)(void))close_learn_verdict, METH_FASTCALL, NULL},
    {"pass_subnormals", (PyCFunction)close_pass_subnormals, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot close_slots[] = {
    {Py_tp_new, close_new}, {Py_tp_dealloc, close_dealloc}, {Py_tp_methods, close_methods}, {0, NULL}};

static PyType_Spec close_spec = {
    .name = "shadowrun.native._core.CloseBounds",
    .basicsize = offsetof(SrCloseBounds, results),
    .itemsize = sizeof(CloseResult),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = close_slots,
};

int sr_add_close_bounds_type(PyObject *module) { return sr_add_type(module, &close_spec, &close_type); }
