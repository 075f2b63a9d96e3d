/* The short way of a call that is compared: replay/short.py and, for several results, replay/shared.py, as far as nothing
 * is out of the ordinary. */

#include "handler.h"

enum { BYTES_PER_NS = 1000 }; /* see replay/room.py */

/* Copies of what the call writes to: 1; 0 where Python must look; -1 with an interrupt. */
static int prepare(Handler *self, Call *call, Copies *copies) {
    Entry *entry = call->entry;
    for (int k = 0; k < entry->n_written; k++) {
        int position = entry->written[k];
        if (position >= PyTuple_GET_SIZE(call->args)) {
            if (PyDict_GET_SIZE(call->kwargs)) { /* it may be there */
                return 0;
            }
            continue;
        }
        PyObject *written = PyTuple_GET_ITEM(call->args, position);
        if (written == Py_None) {
            continue;
        }
        int done = is_tensor(written) ? prepare_copies(self, written, k, &copies[k]) : 0;
        if (done != 1) {
            return done;
        }
        if (shares_memory(self, call->args, position)) {
            return interrupted() ? -1 : 0;
        }
    }
    return 1;
}

/* 1, or 0 where that cannot be told so: a number, say; -1 with an exception. */
static int plainly(PyObject *actual, PyObject *expected) {
    PyObject *pair[] = {actual, expected};
    PyObject *equal = plainly_equal(NULL, pair, 2);
    int answer = equal == NULL ? -1 : equal == Py_True;
    Py_XDECREF(equal);
    return answer;
}

static int each_plainly(PyObject *actual, PyObject *expected) {
    if (Py_TYPE(actual) != Py_TYPE(expected) || !(PyTuple_CheckExact(actual) || PyList_CheckExact(actual)) ||
        PySequence_Fast_GET_SIZE(actual) != PySequence_Fast_GET_SIZE(expected)) {
        return 0;
    }
    int equal = 1;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(actual) && equal == 1; i++) {
        PyObject *mine = PySequence_Fast_GET_ITEM(actual, i), *theirs = PySequence_Fast_GET_ITEM(expected, i);
        equal = mine == Py_None && theirs == Py_None ? 1 : plainly(mine, theirs);
    }
    return equal;
}

/* Whether all that the call gave and wrote to has the bits of the replay: 1, 0, or -1 with an exception. */
static int all_equal(Handler *self, Call *call, const Copies *copies, PyObject *out, PyObject *theirs) {
    long long start = started(self);
    Entry *entry = call->entry;
    int equal = entry->way == FRESH ? plainly(out, theirs) : entry->way == SEVERAL ? each_plainly(out, theirs) : 1;
    for (int k = 0; k < entry->n_written && equal == 1; k++) {
        equal = copies[k].work == NULL || same_values(PyTuple_GET_ITEM(call->args, entry->written[k]), &copies[k]);
    }
    lap(self, PART_COMPARE, start);
    return equal;
}

static PyObject *spares_of(const Copies *copies, int n) {
    PyObject *made = PyTuple_New(n);
    for (int k = 0; k < n && made != NULL; k++) {
        PyTuple_SET_ITEM(made, k, Py_NewRef(copies[k].spare == NULL ? Py_None : copies[k].spare));
    }
    return made;
}

/* Whether there shall be no second result beside the one of the user's call, which is recorded then: 1; 0; -1 with an
 * exception. What was done in less time than any processor writes so much in is not asked. */
static int is_too_large(Handler *self, Call *call, PyObject *out, long long ns) {
    if (call->entry->way == IN_PLACE || (double)ns * BYTES_PER_NS <= self->max_bytes) {
        return 0;
    }
    PyObject *context = PyLong_FromLongLong(call->context), *answer = NULL;
    if (context != NULL) {
        answer = PyObject_CallFunctionObjArgs(self->too_large, call->entry->plan, context, out, NULL);
    }
    int large = answer == NULL ? -1 : answer == Py_True;
    Py_XDECREF(answer);
    Py_XDECREF(context);
    return large;
}

/* Run the operator once more, compare, and record; -1 with an exception. */
static int judge(Handler *self, Call *call, const Copies *copies, PyObject *out, PyObject *other_args, long long ns) {
    int large = is_too_large(self, call, out, ns);
    if (large != 0) {
        return large < 0 ? -1 : 0;
    }
    long long start = now_ns();
    PyObject *theirs = replayed(self, call->entry->run, other_args, call->kwargs);
    long long other_ns = now_ns() - start;
    lap(self, PART_REPLAY, start);
    if (theirs == NULL) {
        return -1;
    }
    int equal = all_equal(self, call, copies, out, theirs), failed = equal < 0 ? -1 : 0;
    if (!failed) {
        PyErr_Clear(); /* of what could not be told */
    }
    if (!failed && !(equal && add_match(self, call, ns, other_ns, &failed))) {
        PyObject *times = Py_BuildValue("(LL)", ns, other_ns), *context = PyLong_FromLongLong(call->context);
        PyObject *spares = spares_of(copies, call->entry->n_written), *done = NULL;
        PyObject *given[] = {call->entry->plan, context, call->args, call->kwargs, out, theirs, times, spares, other_args};
        if (times != NULL && context != NULL && spares != NULL) {
            done = PyObject_Vectorcall(self->ended, given, sizeof given / sizeof *given, NULL);
        }
        failed = done == NULL ? -1 : 0;
        Py_XDECREF(done);
        Py_XDECREF(spares);
        Py_XDECREF(context);
        Py_XDECREF(times);
    }
    Py_DECREF(theirs);
    return failed;
}

/* The user's call, and what comes of it: the result, or NULL with an exception. */
static PyObject *run_and_judge(Handler *self, Call *call, const Copies *copies, PyObject *other_args) {
    int n = call->entry->n_written;
    for (int k = 0; k < n; k++) {
        if (copies[k].work != NULL) {
            keep_values(self, &copies[k]);
        }
    }
    long long start = now_ns();
    PyObject *out = run_operator(call);
    long long ns = now_ns() - start;
    if (out == NULL) {
        return NULL;
    }
    for (int k = 0; k < n; k++) {
        if (copies[k].work != NULL) {
            give_values(self, &copies[k]);
        }
    }
    if (judge(self, call, copies, out, other_args, ns) && report(self->failed, call)) {
        Py_CLEAR(out);
    }
    self->own_ns += now_ns() - call->entered - ns;
    return out;
}

int compare_call(Handler *self, Call *call, PyObject **out) {
    Entry *entry = call->entry;
    Copies copies[MOST_WRITTEN] = {{0}};
    PyObject *other_args = NULL;
    long long start = started(self);
    int ready = prepare(self, call, copies);
    if (ready == 1) {
        other_args = entry->n_written ? with_copies(call->args, entry->written, copies, entry->n_written)
                                      : Py_NewRef(call->args);
        if (entry->n_written) {
            lap(self, PART_COPY, start);
        }
        ready = other_args != NULL ? find_context(self, call) : interrupted() ? -1 : 0;
    }
    if (ready == 1) {
        *out = run_and_judge(self, call, copies, other_args);
        drop_place(&call->place);
    }
    Py_XDECREF(other_args);
    for (int k = 0; k < entry->n_written; k++) {
        drop_copies(&copies[k]);
    }
    return ready != 0;
}
