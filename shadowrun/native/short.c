/* The short ways of a call that is compared: those of replay/short.py, as far as nothing is out of the ordinary. */

#include "handler.h"

#include <string.h>

static int add_match(Handler *self, PyObject *context, long long ns, long long other_ns) {
    return self->on_target ? add_row(self, context, self->matched, other_ns, ns)
                           : add_row(self, context, self->matched, ns, other_ns);
}

static int is_suspect(Handler *self, Call *call) { return PySet_Contains(self->suspects, call->entry->index) != 0; }

/* One new tensor or number comes back, nothing is written to. */
int compare_fresh(Handler *self, Call *call, PyObject **out) {
    PyObject *context, *place;
    int found = find_context(self, call, &context, &place);
    if (found != 1) {
        return found != 0;
    }
    PyObject *run = call->entry->run, *theirs;
    long long start = now_ns();
    *out = run_operator(run, call->args, call->kwargs);
    long long ended = now_ns(), ns = ended - start;
    if (*out == NULL) {
        Py_DECREF(context);
        Py_DECREF(place);
        return 1;
    }
    theirs = replayed(self, run, call->args, call->kwargs);
    long long other_ns = now_ns() - ended;
    lap(self, PART_REPLAY, ended);
    int failed = theirs == NULL ? -1 : 0;
    if (!failed) {
        long long comparing = started(self);
        PyObject *pair[] = {*out, theirs};
        PyObject *equal = plainly_equal(NULL, pair, 2);
        lap(self, PART_COMPARE, comparing);
        failed = equal == NULL ? -1 : 0;
        if (equal == Py_True && ns + other_ns < self->worth_timing_ns && !is_suspect(self, call)) {
            failed = add_match(self, context, ns, other_ns);
        } else if (!failed) {
            PyObject *times = Py_BuildValue("(LL)", ns, other_ns);
            PyObject *given[] = {call->entry->plan, context, call->args, call->kwargs, *out, theirs, times, equal};
            PyObject *done = times == NULL ? NULL : PyObject_Vectorcall(self->ended, given, 8, NULL);
            failed = done == NULL ? -1 : 0;
            Py_XDECREF(times);
            Py_XDECREF(done);
        }
        Py_XDECREF(equal);
    }
    if (failed && report(self->failed, call, place)) {
        Py_CLEAR(*out);
    }
    Py_XDECREF(theirs);
    Py_DECREF(context);
    Py_DECREF(place);
    self->own_ns += now_ns() - call->entered - ns;
    return 1;
}

/* Bytes at `from` to `to`; the interpreter's lock is given up for many. */
static void move(void *to, const void *from, size_t n) {
    if (n <= FEW_BYTES) {
        memcpy(to, from, n);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    memcpy(to, from, n);
    Py_END_ALLOW_THREADS
}

/* What is needed of a Spare (replay/spares.py), and of the tensor that is written to. */
typedef struct {
    PyObject *spare, *work, *shape; /* owned */
    void *at, *before_at, *work_at;
    size_t n_bytes;
} Copies;

static void drop(Copies *copies) {
    Py_XDECREF(copies->spare);
    Py_XDECREF(copies->work);
    Py_XDECREF(copies->shape);
}

/* A number of a Spare's; 0 where there is none. */
static size_t number_of(PyObject *spare, PyObject *name) {
    PyObject *value = PyObject_GetAttr(spare, name);
    size_t number = value == NULL ? 0 : PyLong_AsSize_t(value);
    Py_XDECREF(value);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return number;
}

/* 1 where the tensor can be copied to a spare that there is; else 0. */
static int prepare(Handler *self, PyObject *first, Copies *copies) {
    NAME(before_at, "before_at") { return 0; }
    NAME(work_at, "work_at") { return 0; }
    NAME(work, "work") { return 0; }
    NAME(n_bytes, "n_bytes") { return 0; }
    Tensor t;
    if (!read_tensor(first, &t) || !is_on_cpu(&t) || t.data == NULL || !is_contiguous(&t) || is_negated(first) != 0) {
        return 0;
    }
    size_t bytes = t.dtype.bits / 8;
    for (int32_t d = 0; d < t.ndim; d++) {
        bytes *= (size_t)t.shape[d];
    }
    copies->at = (char *)t.data + t.byte_offset;
    copies->shape = shape_of(first);
    PyObject *dtype = dtype_of(first);
    PyObject *form = dtype == NULL || copies->shape == NULL ? NULL : PyTuple_Pack(2, dtype, copies->shape);
    Py_XDECREF(dtype);
    copies->spare = form == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(self->spares, form));
    Py_XDECREF(form);
    if (copies->spare == NULL) {
        return 0;
    }
    copies->work = PyObject_GetAttr(copies->spare, work);
    copies->before_at = (void *)number_of(copies->spare, before_at);
    copies->work_at = (void *)number_of(copies->spare, work_at);
    copies->n_bytes = number_of(copies->spare, n_bytes);
    return copies->work != NULL && copies->before_at && copies->work_at && bytes && copies->n_bytes == bytes;
}

/* Whether an argument may share its memory with the first one. */
static int shares(Handler *self, PyObject *args) {
    PyObject *first = PyTuple_GET_ITEM(args, 0);
    for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(args); i++) {
        PyObject *a = PyTuple_GET_ITEM(args, i);
        if (PyList_CheckExact(a) || PyTuple_CheckExact(a)) {
            return 1;
        }
        if (is_tensor(a)) {
            PyObject *given[] = {first, a};
            PyObject *answer = PyObject_Vectorcall(self->shares_memory, given, 2, NULL);
            Py_XDECREF(answer);
            if (answer != Py_False) {
                return 1;
            }
        }
    }
    return 0;
}

/* The same call with `work` in place of the first argument. */
static PyObject *with_first(PyObject *args, PyObject *work) {
    Py_ssize_t n = PyTuple_GET_SIZE(args);
    PyObject *made = PyTuple_New(n);
    for (Py_ssize_t i = 0; i < n && made != NULL; i++) {
        PyTuple_SET_ITEM(made, i, Py_NewRef(i ? PyTuple_GET_ITEM(args, i) : work));
    }
    return made;
}

/* A call may have given a tensor another form or other memory. */
static int is_still(PyObject *tensor, void *at, PyObject *shape) {
    Tensor t;
    if (!read_tensor(tensor, &t) || (char *)t.data + t.byte_offset != (char *)at) {
        return 0;
    }
    PyObject *now = shape_of(tensor);
    int same = now == NULL ? 0 : PyObject_RichCompareBool(now, shape, Py_EQ) == 1;
    Py_XDECREF(now);
    return same;
}

static int judge_in_place(Handler *self, Call *call, Copies *copies, PyObject *context, PyObject *out,
                          PyObject *other_args, long long ns) {
    long long start = now_ns();
    PyObject *theirs = replayed(self, call->entry->run, other_args, call->kwargs);
    long long other_ns = now_ns() - start;
    lap(self, PART_REPLAY, start);
    if (theirs == NULL) {
        return -1;
    }
    start = started(self);
    PyObject *first = PyTuple_GET_ITEM(call->args, 0);
    int equal = is_still(first, copies->at, copies->shape) && is_still(copies->work, copies->work_at, copies->shape) &&
                !bytes_differ(copies->at, copies->work_at, copies->n_bytes);
    PyErr_Clear();
    lap(self, PART_COMPARE, start);
    int failed;
    if (equal && ns + other_ns < self->worth_timing_ns && !is_suspect(self, call)) {
        failed = add_match(self, context, ns, other_ns);
    } else {
        PyObject *times = Py_BuildValue("(LL)", ns, other_ns);
        PyObject *given[] = {call->entry->plan, context, call->args,    call->kwargs, out,
                             theirs,            times,   copies->spare, other_args};
        PyObject *done = times == NULL ? NULL : PyObject_Vectorcall(self->ended_in_place, given, 9, NULL);
        failed = done == NULL ? -1 : 0;
        Py_XDECREF(times);
        Py_XDECREF(done);
    }
    Py_DECREF(theirs);
    return failed;
}

/* The first argument is written to and comes back, and shares its memory with no other. */
int compare_in_place(Handler *self, Call *call, PyObject **out) {
    PyObject *context = NULL, *place = NULL;
    Copies copies = {0};
    long long start = started(self);
    int ready = prepare(self, PyTuple_GET_ITEM(call->args, 0), &copies) && !shares(self, call->args);
    lap(self, PART_COPY, start);
    PyObject *other_args = ready ? with_first(call->args, copies.work) : NULL;
    int found = other_args == NULL ? 0 : find_context(self, call, &context, &place);
    if (found != 1) {
        Py_XDECREF(other_args);
        drop(&copies);
        return found != 0;
    }
    start = started(self);
    move(copies.before_at, copies.at, copies.n_bytes);
    lap(self, PART_COPY, start);
    start = now_ns();
    *out = run_operator(call->entry->run, call->args, call->kwargs);
    long long ns = now_ns() - start;
    if (*out != NULL) {
        start = started(self);
        move(copies.work_at, copies.before_at, copies.n_bytes);
        lap(self, PART_COPY, start);
        if (judge_in_place(self, call, &copies, context, *out, other_args, ns) && report(self->failed, call, place)) {
            Py_CLEAR(*out);
        }
        self->own_ns += now_ns() - call->entered - ns;
    }
    Py_DECREF(other_args);
    Py_DECREF(context);
    Py_DECREF(place);
    drop(&copies);
    return 1;
}
