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

int add_row(Handler *self, long long context, PyObject *verdict, long long ref_ns, long long target_ns) {
    NAME(step_name, "step") { return -1; }
    NAME(last_step, "_last_step") { return -1; }
    NAME(flush, "_flush_at_times") { return -1; }
    long long start = started(self);
    PyObject *seq = PyIter_Next(self->numbers), *step = PyObject_GetAttr(self->recorder, step_name);
    PyObject *row = seq == NULL || step == NULL ? NULL : PyTuple_New(8);
    if (row == NULL) {
        Py_XDECREF(seq);
        Py_XDECREF(step);
        return -1;
    }
    unsigned long long number = PyLong_AsUnsignedLongLongMask(seq);
    PyObject *ref = ref_ns < 0 ? Py_NewRef(self->minus_one) : PyFloat_FromDouble((double)ref_ns / 1000);
    PyObject *target = target_ns < 0 ? Py_NewRef(self->minus_one) : PyFloat_FromDouble((double)target_ns / 1000);
    PyTuple_SET_ITEM(row, 0, seq);
    PyTuple_SET_ITEM(row, 1, step);
    PyTuple_SET_ITEM(row, 2, PyLong_FromLongLong(context));
    PyTuple_SET_ITEM(row, 3, Py_NewRef(verdict));
    PyTuple_SET_ITEM(row, 4, ref);
    PyTuple_SET_ITEM(row, 5, target);
    PyTuple_SET_ITEM(row, 6, Py_NewRef(self->minus_one));
    PyTuple_SET_ITEM(row, 7, Py_NewRef(self->minus_one));
    int failed = ref == NULL || target == NULL || PyObject_SetAttr(self->recorder, last_step, step) ||
                 PyList_Append(self->rows, row);
    Py_DECREF(row);
    if (!failed && !(number & 63)) {
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
