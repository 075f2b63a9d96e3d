/* What is known of a call, and the rows and counts that it becomes: replay/recorder.py. */

#include "handler.h"

int find_context(Handler *self, Call *call, PyObject **context, PyObject **place) {
    static PyObject *zero;
    if (zero == NULL && (zero = PyLong_FromLong(0)) == NULL) {
        return -1;
    }
    long long start = started(self);
    *context = NULL;
    *place = place_of((Places *)self->places, zero);
    if (*place == NULL) {
        return interrupted() ? -1 : 0;
    }
    lap(self, PART_PLACE, start);
    start = started(self);
    PyObject *given[] = {call->entry->index, self->device, *place, call->args, call->kwargs};
    PyObject *key = context_key(NULL, given, 5);
    if (key != NULL) {
        *context = Py_XNewRef(PyDict_GetItemWithError(self->contexts, key));
        Py_DECREF(key);
    }
    lap(self, PART_CONTEXT, start);
    if (*context == NULL) { /* new, or of a kind that Python must look at, and say why it cannot */
        Py_CLEAR(*place);
        return interrupted() ? -1 : 0;
    }
    return 1;
}

int report(PyObject *reporter, Call *call, PyObject *place) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) {
        PyException_SetTraceback(value, trace);
    }
    PyObject *given[] = {call->entry->plan, call->args, call->kwargs, place, value};
    PyObject *done = PyObject_Vectorcall(reporter, given, 5, NULL);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static double microseconds(long long ns) { return ns < 0 ? -1.0 : (double)ns / 1000; }

int add_row(Handler *self, PyObject *context, PyObject *verdict, long long ref_ns, long long target_ns) {
    NAME(flush, "_flush_at_times") { return -1; }
    long long start = started(self);
    long long context_number = PyLong_AsLongLong(context), verdict_number = PyLong_AsLongLong(verdict);
    if ((context_number == -1 || verdict_number == -1) && PyErr_Occurred()) {
        return -1;
    }
    long long seq = write_row((Rows *)self->rows, context_number, verdict_number, microseconds(ref_ns),
                              microseconds(target_ns));
    int failed = seq < 0;
    if (!failed && !(seq & 63)) {
        PyObject *done = PyObject_CallMethodNoArgs(self->recorder, flush);
        failed = done == NULL;
        Py_XDECREF(done);
    }
    lap(self, PART_RECORD, start);
    return failed ? -1 : 0;
}

int count_skipped(Handler *self, PyObject *key) {
    NAME(skipped_name, "_skipped") { return -1; }
    static PyObject *one;
    if (one == NULL && (one = PyLong_FromLong(1)) == NULL) {
        return -1;
    }
    PyObject *counter = PyObject_GetAttr(self->recorder, skipped_name);
    if (counter == NULL || !PyDict_Check(counter)) {
        Py_XDECREF(counter);
        return -1;
    }
    PyObject *before = PyDict_GetItemWithError(counter, key);
    PyObject *after = before != NULL ? PyNumber_Add(before, one) : PyErr_Occurred() ? NULL : Py_NewRef(one);
    int failed = after == NULL || PyDict_SetItem(counter, key, after);
    Py_XDECREF(after);
    Py_DECREF(counter);
    return failed ? -1 : 0;
}
