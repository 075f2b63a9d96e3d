/* Fast path of a call that is compared: replay/paths/same_device.py, as far as nothing is out of the ordinary. */

#include "compare.h"

#include <string.h>

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

/* Record a call whose results are not equal but close; the rest as `sr_add_close`. */
static int compare_close(
    SrCompareHandler *self, SrCall *call, const SrCopies *copies, PyObject *out, PyObject *expected, long long ns, long long other_ns,
    int *failed) {
    SrOperator *operator = call->operator;
    if (operator->route == SR_FRESH) {
        return sr_add_close(self, call, &out, &expected, 1, ns, other_ns, failed);
    }
    if (operator->route == SR_IN_PLACE) {
        PyObject *first = PyTuple_GET_SIZE(call->args) ? PyTuple_GET_ITEM(call->args, 0) : NULL;
        if (first == NULL || operator->written[0] != 0 || copies->work == NULL || !copies_has_memory(first, copies->at, copies->shape) ||
            !copies_has_memory(copies->work, copies->work_at, copies->shape) || !compare_is_apart(call->args, copies)) {
            return 0;
        }
        return sr_add_close(self, call, &first, &copies->work, 1, ns, other_ns, failed);
    }
    if (operator->n_written || !PyTuple_CheckExact(out) || !PyTuple_CheckExact(expected) || PyTuple_GET_SIZE(out) != PyTuple_GET_SIZE(expected)) {
        return 0;
    }
    return sr_add_close(
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
