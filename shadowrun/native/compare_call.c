/* Fast path of a call that is compared: its replay, and its row where results are equal or close.
 *
 * replay/paths/same_device.py is the specification, as far as nothing is out of the ordinary; of results that differ by no
 * more than their context passes, `ContextBounds.judge` of judge/remembered_bounds.py and `SameDeviceVerdicts.record_close`
 * of replay/paths/same_device_verdicts.py.
 */

#include "compare.h"

#include <string.h>

/* ---- results that are close ----------------------------------------------------------------------------------------- */

/* Python records the first such call of a context, and the keys under which it found the rows that this call refers to:
 * its verdict, and the forms of its results. Calls that need the same rows are recorded here. */

enum { CLOSE_MAX_ULP = 16, CLOSE_MAX_DIMS = 6, CLOSE_MAX_RESULTS = 8 };

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

/* Record a call whose results differ within what its context passes: 1; 0 where Python must look; `failed` is -1 with an
 * exception. `mine` and `others` are the `n` results of the program's run and of the replay. */
static int close_add(
    SrCompareHandler *self, SrCall *call, PyObject *const *mine, PyObject *const *others, Py_ssize_t n, long long ns, long long other_ns,
    int *failed) {
    long long actual_ns = self->on_target ? ns : other_ns, expected_ns = self->on_target ? other_ns : ns;
    /* What accumulated before this call is followed in Python. */
    if (self->keeps_drift || n > CLOSE_MAX_RESULTS || sr_needs_look(self, call, actual_ns, expected_ns)) {
        return 0;
    }
    PyObject *context = PyLong_FromLongLong(call->context), *rows[CLOSE_MAX_RESULTS] = {0};
    SrCloseBounds *bounds = context == NULL ? NULL : (SrCloseBounds *)PyDict_GetItemWithError(self->bounds, context);
    Py_XDECREF(context);
    if (bounds == NULL || !Py_IS_TYPE((PyObject *)bounds, close_type) || Py_SIZE(bounds) != n) {
        return 0;
    }
    Py_INCREF(bounds); /* another thread may forget it while there is no GIL */
    const SrFigures *measured[CLOSE_MAX_RESULTS] = {0};
    SrFigures figures[CLOSE_MAX_RESULTS];
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
    PyObject *tensors[CLOSE_MAX_RESULTS] = {0};
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

/* ---- copies of written arguments ------------------------------------------------------------------------------------ */

/* Buffers for the values of a tensor that a call writes to: replay/input_copies.py. */
typedef struct {
    PyObject *buffer, *work, *shape; /* owned */
    void *at, *before_at, *work_at;
    size_t n_bytes;
} SrCopies;

enum { COPIES_MAX_BYTES = 1 << 20, COMPARE_BYTES_PER_NS = 1000 }; /* the latter: see replay/input_copies.py */

/* memcpy, which releases the GIL for many bytes. */
static void copies_move(void *to, const void *from, size_t n) {
    if (n <= SR_FEW_BYTES) {
        memcpy(to, from, n);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    memcpy(to, from, n);
    Py_END_ALLOW_THREADS
}

static void copies_drop(SrCopies *copies) {
    Py_CLEAR(copies->buffer);
    Py_CLEAR(copies->work);
    Py_CLEAR(copies->shape);
}

/* A number that is an attribute; 0 where there is none. */
static size_t copies_number(PyObject *buffer, PyObject *name) {
    PyObject *value = PyObject_GetAttr(buffer, name);
    size_t number = value == NULL ? 0 : PyLong_AsSize_t(value);
    Py_XDECREF(value);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return number;
}

/* The CopyBuffer of a tensor: a new reference; NULL, perhaps with an exception, where there is none. */
static PyObject *copies_buffer(SrCompareHandler *self, PyObject *tensor, PyObject *shape, int k) {
    PyObject *dtype = sr_dtype(tensor), *number = k ? PyLong_FromLong(k) : NULL, *found = NULL;
    PyObject *form = dtype == NULL ? NULL : k == 0 ? PyTuple_Pack(2, dtype, shape) : NULL;
    if (dtype != NULL && number != NULL) {
        form = PyTuple_Pack(3, dtype, shape, number);
    }
    if (form != NULL && (found = Py_XNewRef(PyDict_GetItemWithError(self->buffers, form))) == NULL && !PyErr_Occurred()) {
        PyObject *given = number == NULL ? PyLong_FromLong(k) : Py_NewRef(number);
        PyObject *pair[] = {tensor, given};
        found = given == NULL ? NULL : PyObject_Vectorcall(self->make_buffer, pair, 2, NULL);
        Py_XDECREF(given);
    }
    Py_XDECREF(form);
    Py_XDECREF(number);
    Py_XDECREF(dtype);
    if (found == Py_None) {
        Py_CLEAR(found);
    }
    return found;
}

/* Done if the tensor can be copied to a buffer, the k-th of its form. */
static sr_result copies_prepare(SrCompareHandler *self, PyObject *tensor, int k, SrCopies *copies) {
    SR_NAME(before_at, "before_at") { return sr_failed(); }
    SR_NAME(work_at, "work_at") { return sr_failed(); }
    SR_NAME(work, "work") { return sr_failed(); }
    SR_NAME(n_bytes, "n_bytes") { return sr_failed(); }
    SrTensor t;
    if (!sr_read_tensor(tensor, &t) || !sr_is_on_cpu(&t) || t.data == NULL || !sr_is_contiguous(&t) ||
        sr_is_negated(tensor) != 0) {
        return sr_failed();
    }
    size_t bytes = sr_n_bytes(&t);
    if (bytes > COPIES_MAX_BYTES) { /* Python checks that memory for the copies is left */
        return SR_FALLBACK;
    }
    copies->at = (char *)t.data + t.byte_offset;
    copies->shape = sr_shape(tensor);
    copies->buffer = copies->shape == NULL ? NULL : copies_buffer(self, tensor, copies->shape, k);
    if (copies->buffer == NULL) {
        return sr_failed();
    }
    copies->work = PyObject_GetAttr(copies->buffer, work);
    copies->before_at = (void *)copies_number(copies->buffer, before_at);
    copies->work_at = (void *)copies_number(copies->buffer, work_at);
    copies->n_bytes = copies_number(copies->buffer, n_bytes);
    if (copies->work == NULL) {
        return sr_failed();
    }
    return copies->before_at && copies->work_at && bytes && copies->n_bytes == bytes ? SR_DONE : SR_FALLBACK;
}

/* Keep the values of the tensor, as they are now. */
static void copies_keep(SrCompareHandler *self, const SrCopies *copies) {
    long long start = sr_clock_start(self);
    copies_move(copies->before_at, copies->at, copies->n_bytes);
    sr_lap(self, SR_PART_COPY, start);
}

/* Give the kept values to the replay's tensor. */
static void copies_give(SrCompareHandler *self, const SrCopies *copies) {
    long long start = sr_clock_start(self);
    copies_move(copies->work_at, copies->before_at, copies->n_bytes);
    sr_lap(self, SR_PART_COPY, start);
}

/* Whether a tensor still has this memory and shape: a call may have changed both (`set_`, `resize_`). */
static int copies_has_memory(PyObject *tensor, const void *at, PyObject *shape) {
    SrTensor t;
    if (!sr_read_tensor(tensor, &t) || (char *)t.data + t.byte_offset != (const char *)at) {
        return 0;
    }
    PyObject *now = sr_shape(tensor);
    int same = now == NULL ? 0 : PyObject_RichCompareBool(now, shape, Py_EQ) == 1;
    Py_XDECREF(now);
    return same;
}

/* Whether the tensor and the replay's have equal bytes, where neither was moved. */
static int copies_equal(PyObject *tensor, const SrCopies *copies) {
    return copies_has_memory(tensor, copies->at, copies->shape) &&
           copies_has_memory(copies->work, copies->work_at, copies->shape) &&
           !sr_bytes_differ(copies->at, copies->work_at, copies->n_bytes);
}

/* A subclass without `__torch_dispatch__` arrives as it is. Where asking fails, the answer is yes. */
static int copies_may_be_tensor(PyObject *value) {
    if (sr_is_tensor(value)) {
        return 1;
    }
    return !(value == Py_None || PyLong_Check(value) || PyFloat_CheckExact(value)) && sr_is_tensor_or_subclass(value) != 0;
}

/* Whether an argument may share its memory with the one at `position`. */
static int copies_share_memory(SrCompareHandler *self, PyObject *args, Py_ssize_t position) {
    PyObject *written = PyTuple_GET_ITEM(args, position);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
        PyObject *a = PyTuple_GET_ITEM(args, i);
        if (i == position) {
            continue;
        }
        /* Python looks at its tensors one by one. */
        if (PyList_CheckExact(a) || PyTuple_CheckExact(a)) {
            return 1;
        }
        if (copies_may_be_tensor(a)) {
            if (PyErr_Occurred()) {
                return 1;
            }
            PyObject *given[] = {written, a};
            PyObject *answer = PyObject_Vectorcall(self->shares_memory, given, 2, NULL);
            Py_XDECREF(answer);
            if (answer != Py_False) {
                return 1;
            }
        }
    }
    return 0;
}

/* The arguments with the replay's tensors in place of those that are written to. */
static PyObject *copies_as_args(PyObject *args, const int *positions, const SrCopies *copies, int n) {
    Py_ssize_t size = PyTuple_GET_SIZE(args);
    PyObject *made = PyTuple_New(size);
    for (Py_ssize_t i = 0; i < size && made != NULL; i++) {
        PyTuple_SET_ITEM(made, i, Py_NewRef(PyTuple_GET_ITEM(args, i)));
    }
    for (int k = 0; k < n && made != NULL; k++) {
        if (copies[k].work != NULL) {
            PyTuple_SetItem(made, positions[k], Py_NewRef(copies[k].work)); /* releases the former */
        }
    }
    return made;
}

/* Running, replaying and comparing. */

/* Copies of what the call writes to. */
static sr_result compare_prepare(SrCompareHandler *self, SrCall *call, SrCopies *copies) {
    SrOperator *operator = call->operator;
    for (int k = 0; k < operator->n_written; k++) {
        int position = operator->written[k];
        if (position >= PyTuple_GET_SIZE(call->args)) {
            if (PyDict_GET_SIZE(call->kwargs)) { /* it may be one of those */
                return SR_FALLBACK;
            }
            continue;
        }
        PyObject *written = PyTuple_GET_ITEM(call->args, position);
        if (written == Py_None) {
            continue;
        }
        sr_result done = sr_is_tensor(written) ? copies_prepare(self, written, k, &copies[k]) : SR_FALLBACK;
        if (done != SR_DONE) {
            return done;
        }
        if (copies_share_memory(self, call->args, position)) {
            return sr_failed();
        }
    }
    return SR_DONE;
}

/* Whether two results are plain tensors of equal bits; -1 with an exception. */
static int compare_values(PyObject *actual, PyObject *expected) {
    PyObject *pair[] = {actual, expected};
    PyObject *equal = sr_plainly_equal(NULL, pair, 2);
    int answer = equal == NULL ? -1 : equal == Py_True;
    Py_XDECREF(equal);
    return answer;
}

static int compare_sequences(PyObject *actual, PyObject *expected) {
    if (Py_TYPE(actual) != Py_TYPE(expected) || !(PyTuple_CheckExact(actual) || PyList_CheckExact(actual)) ||
        PySequence_Fast_GET_SIZE(actual) != PySequence_Fast_GET_SIZE(expected)) {
        return 0;
    }
    int equal = 1;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(actual) && equal == 1; i++) {
        PyObject *a = PySequence_Fast_GET_ITEM(actual, i), *e = PySequence_Fast_GET_ITEM(expected, i);
        equal = a == Py_None && e == Py_None ? 1 : compare_values(a, e);
    }
    return equal;
}

/* Whether all that the call returned and wrote to has the bits of the replay; -1 with an exception. */
static int compare_all(SrCompareHandler *self, SrCall *call, const SrCopies *copies, PyObject *out, PyObject *expected) {
    long long start = sr_clock_start(self);
    SrOperator *operator = call->operator;
    int equal = 1;
    if (operator->route == SR_FRESH) {
        equal = compare_values(out, expected);
    } else if (operator->route == SR_SEVERAL) {
        equal = compare_sequences(out, expected);
    }
    for (int k = 0; k < operator->n_written && equal == 1; k++) {
        equal = copies[k].work == NULL || copies_equal(PyTuple_GET_ITEM(call->args, operator->written[k]), &copies[k]);
    }
    sr_lap(self, SR_PART_COMPARE, start);
    return equal;
}

static PyObject *compare_buffers(const SrCopies *copies, int n) {
    PyObject *made = PyTuple_New(n);
    for (int k = 0; k < n && made != NULL; k++) {
        PyTuple_SET_ITEM(made, k, Py_NewRef(copies[k].buffer == NULL ? Py_None : copies[k].buffer));
    }
    return made;
}

/* Whether a second result would take too much memory, which is recorded then; -1 with an exception. A call that took
 * less time than any processor needs to write that much is not asked about. */
static int compare_is_too_large(SrCompareHandler *self, SrCall *call, PyObject *out, long long ns) {
    if (call->operator->route == SR_IN_PLACE || (double)ns * COMPARE_BYTES_PER_NS <= self->max_bytes) {
        return 0;
    }
    PyObject *context = PyLong_FromLongLong(call->context), *answer = NULL;
    if (context != NULL) {
        answer = PyObject_CallFunctionObjArgs(self->too_large, call->operator->plan, context, out, NULL);
    }
    int large = answer == NULL ? -1 : answer == Py_True;
    Py_XDECREF(answer);
    Py_XDECREF(context);
    return large;
}

/* By a Python function, so that its warnings come at a line of shadowrun's, which separates them from the program's. */
static PyObject *compare_run_again(SrCompareHandler *self, PyObject *run, PyObject *args, PyObject *kwargs) {
    PyObject *given[] = {NULL, run, args, kwargs};
    return PyObject_Vectorcall(self->replay, given + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* Whether no other argument has the memory of the first, by another storage: `_is_apart` of replay/paths/same_device.py. */
static int compare_is_apart(PyObject *args, const SrCopies *copies) {
    const char *begin = copies->at, *end = begin + copies->n_bytes;
    for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(args); i++) {
        PyObject *a = PyTuple_GET_ITEM(args, i);
        SrTensor t;
        if (a == Py_None || PyBool_Check(a) || PyLong_CheckExact(a) || PyFloat_CheckExact(a)) {
            continue;
        }
        if (!sr_is_tensor(a) || !sr_read_tensor(a, &t) || !sr_is_contiguous(&t)) {
            return 0;
        }
        const char *at = (char *)t.data + t.byte_offset;
        if (at < end && begin < at + sr_n_bytes(&t)) {
            return 0;
        }
    }
    return 1;
}

/* Record a call whose results are not equal but close; the rest as `close_add`. */
static int compare_close(
    SrCompareHandler *self, SrCall *call, const SrCopies *copies, PyObject *out, PyObject *expected, long long ns, long long other_ns,
    int *failed) {
    SrOperator *operator = call->operator;
    if (operator->route == SR_FRESH) {
        return close_add(self, call, &out, &expected, 1, ns, other_ns, failed);
    }
    if (operator->route == SR_IN_PLACE) {
        PyObject *first = PyTuple_GET_SIZE(call->args) ? PyTuple_GET_ITEM(call->args, 0) : NULL;
        if (first == NULL || operator->written[0] != 0 || copies->work == NULL || !copies_has_memory(first, copies->at, copies->shape) ||
            !copies_has_memory(copies->work, copies->work_at, copies->shape) || !compare_is_apart(call->args, copies)) {
            return 0;
        }
        return close_add(self, call, &first, &copies->work, 1, ns, other_ns, failed);
    }
    if (operator->n_written || !PyTuple_CheckExact(out) || !PyTuple_CheckExact(expected) || PyTuple_GET_SIZE(out) != PyTuple_GET_SIZE(expected)) {
        return 0;
    }
    return close_add(
        self, call, ((PyTupleObject *)out)->ob_item, ((PyTupleObject *)expected)->ob_item, PyTuple_GET_SIZE(out), ns, other_ns, failed);
}

/* Run the operator once more, compare, and record; -1 with an exception. */
static int compare_replay(
    SrCompareHandler *self, SrCall *call, const SrCopies *copies, PyObject *out, PyObject *replay_args, long long ns) {
    int large = compare_is_too_large(self, call, out, ns);
    if (large != 0) {
        return large < 0 ? -1 : 0;
    }
    long long start = sr_now_ns();
    PyObject *expected = compare_run_again(self, call->operator->run, replay_args, call->kwargs);
    long long replay_ns = sr_now_ns() - start;
    sr_lap(self, SR_PART_REPLAY, start);
    if (expected == NULL) {
        return -1;
    }
    int equal = compare_all(self, call, copies, out, expected), failed = equal < 0 ? -1 : 0;
    if (!failed) {
        PyErr_Clear(); /* of a value that could not be compared here: Python says so */
    }
    int recorded = failed ? 0
                   : equal ? sr_add_match(self, call, ns, replay_ns, &failed)
                           : compare_close(self, call, copies, out, expected, ns, replay_ns, &failed);
    if (!failed && !recorded) {
        PyErr_Clear();
        PyObject *times = Py_BuildValue("(LL)", ns, replay_ns), *context = PyLong_FromLongLong(call->context);
        PyObject *buffers = compare_buffers(copies, call->operator->n_written), *done = NULL;
        PyObject *given[] = {call->operator->plan, context, call->args, call->kwargs, out,
                             expected, times, buffers, replay_args};
        if (times != NULL && context != NULL && buffers != NULL) {
            done = PyObject_Vectorcall(self->conclude, given, sizeof given / sizeof *given, NULL);
        }
        failed = done == NULL ? -1 : 0;
        Py_XDECREF(done);
        Py_XDECREF(buffers);
        Py_XDECREF(context);
        Py_XDECREF(times);
    }
    Py_DECREF(expected);
    return failed;
}

/* The program's own call, and its comparison: the result, or NULL with an exception. */
static PyObject *compare_run(SrCompareHandler *self, SrCall *call, const SrCopies *copies, PyObject *replay_args) {
    int n = call->operator->n_written;
    for (int k = 0; k < n; k++) {
        if (copies[k].work != NULL) {
            copies_keep(self, &copies[k]);
        }
    }
    long long start = sr_now_ns();
    PyObject *out = sr_run_operator(call);
    long long ns = sr_now_ns() - start;
    if (out == NULL) {
        return NULL;
    }
    for (int k = 0; k < n; k++) {
        if (copies[k].work != NULL) {
            copies_give(self, &copies[k]);
        }
    }
    /* What goes wrong in a replay must not reach the program: it is recorded, unless it is an interrupt. */
    if (compare_replay(self, call, copies, out, replay_args, ns) && sr_report(self->failed, call)) {
        Py_CLEAR(out);
    }
    self->own_ns += sr_now_ns() - call->entered - ns;
    return out;
}

sr_result sr_compare_call(SrCompareHandler *self, SrCall *call, PyObject **out) {
    SrOperator *operator = call->operator;
    SrCopies copies[SR_MAX_COPIED] = {{0}};
    PyObject *replay_args = NULL;
    long long start = sr_clock_start(self);
    sr_result ready = compare_prepare(self, call, copies);
    if (ready == SR_DONE) {
        replay_args = operator->n_written ? copies_as_args(call->args, operator->written, copies, operator->n_written)
                                         : Py_NewRef(call->args);
        if (operator->n_written) {
            sr_lap(self, SR_PART_COPY, start);
        }
        ready = replay_args != NULL ? sr_find_context(self, call) : sr_failed();
    }
    if (ready == SR_DONE) {
        *out = compare_run(self, call, copies, replay_args);
        sr_drop_origin(&call->origin);
    }
    Py_XDECREF(replay_args);
    for (int k = 0; k < operator->n_written; k++) {
        copies_drop(&copies[k]);
    }
    return ready;
}
