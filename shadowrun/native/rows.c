/* What is known of a call, and the rows and counts that it becomes: replay/recorder.py. */

#include "handler.h"

enum { SLOW_NS = 1000000 };

int find_context(Handler *self, Call *call) {
    long long start = started(self);
    int found = find_place((Places *)self->places, 0, &call->place);
    if (found != 1) {
        return interrupted() ? -1 : 0;
    }
    lap(self, PART_PLACE, start);
    start = started(self);
    found = number_of_context(self->seen, self->contexts, call->entry->index, self->device, &call->place, call->args,
                              call->kwargs, &call->context);
    lap(self, PART_CONTEXT, start);
    if (!found) { /* new, or of a kind that Python must look at, and say why it cannot */
        drop_place(&call->place);
        return interrupted() ? -1 : 0;
    }
    return 1;
}

int report(PyObject *reporter, Call *call) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) {
        PyException_SetTraceback(value, trace);
    }
    PyObject *place = PyTuple_Pack(3, call->place.module, call->place.phase, call->place.site);
    PyObject *given[] = {call->entry->plan, call->args, call->kwargs, place, value};
    PyObject *done = place == NULL ? NULL : PyObject_Vectorcall(reporter, given, 5, NULL);
    Py_XDECREF(place);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static double microseconds(long long ns) { return ns < 0 ? -1.0 : (double)ns / 1000; }

int add_row(Handler *self, long long context, PyObject *verdict, long long ref_ns, long long target_ns) {
    NAME(flush, "_flush_at_times") { return -1; }
    long long start = started(self);
    long long verdict_number = PyLong_AsLongLong(verdict);
    if (verdict_number == -1 && PyErr_Occurred()) {
        return -1;
    }
    long long seq = write_row((Rows *)self->rows, context, verdict_number, microseconds(ref_ns), microseconds(target_ns));
    int failed = seq < 0;
    if (!failed && !(seq & 63)) {
        PyObject *done = PyObject_CallMethodNoArgs(self->recorder, flush);
        failed = done == NULL;
        Py_XDECREF(done);
    }
    lap(self, PART_RECORD, start);
    return failed ? -1 : 0;
}

/* As Comparing.is_slow. */
static int is_slow(Handler *self, long long actual_ns, long long expected_ns) {
    double expected = (double)expected_ns, actual = (double)actual_ns;
    return actual >= self->slow_ratio * expected && actual >= expected + SLOW_NS;
}

int add_match(Handler *self, Call *call, long long ns, long long other_ns, int *failed) {
    long long actual = self->on_target ? ns : other_ns, expected = self->on_target ? other_ns : ns;
    if (is_slow(self, actual, expected) || PySet_Contains(self->suspects, call->entry->index) != 0) {
        return 0;
    }
    *failed = add_row(self, call->context, self->matched, expected, actual);
    return 1;
}

int add_count(PyObject *counts, PyObject *key, Py_ssize_t n) {
    PyObject *before = PyDict_GetItemWithError(counts, key);
    if (before != NULL) {
        n += PyLong_AsSsize_t(before);
    }
    PyObject *after = PyErr_Occurred() ? NULL : PyLong_FromSsize_t(n);
    int failed = after == NULL || PyDict_SetItem(counts, key, after);
    Py_XDECREF(after);
    return failed ? -1 : 0;
}

int count_skipped(Handler *self, PyObject *key) {
    NAME(skipped_name, "_skipped") { return -1; }
    PyObject *counts = PyObject_GetAttr(self->recorder, skipped_name);
    int failed = counts == NULL || !PyDict_Check(counts) || add_count(counts, key, 1);
    Py_XDECREF(counts);
    return failed ? -1 : 0;
}
