/* Memory for the values of tensors that a call writes to: replay/spares.py, and what replay/short.py does with it. */

#include "handler.h"

enum { MOST_COPIED = 1 << 20 };

#include <string.h>

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

void drop_copies(Copies *copies) {
    Py_CLEAR(copies->spare);
    Py_CLEAR(copies->work);
    Py_CLEAR(copies->shape);
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

/* A Spare for a tensor: a new reference; NULL, perhaps with an exception, where there is none. */
static PyObject *spare_for(Handler *self, PyObject *tensor, PyObject *shape, int k) {
    PyObject *dtype = dtype_of(tensor), *number = k ? PyLong_FromLong(k) : NULL, *found = NULL;
    PyObject *form = dtype == NULL ? NULL : k == 0 ? PyTuple_Pack(2, dtype, shape) : NULL;
    if (dtype != NULL && number != NULL) {
        form = PyTuple_Pack(3, dtype, shape, number);
    }
    if (form != NULL && (found = Py_XNewRef(PyDict_GetItemWithError(self->spares, form))) == NULL && !PyErr_Occurred()) {
        PyObject *given = number == NULL ? PyLong_FromLong(k) : Py_NewRef(number);
        PyObject *pair[] = {tensor, given};
        found = given == NULL ? NULL : PyObject_Vectorcall(self->make_spare, pair, 2, NULL);
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

int prepare_copies(Handler *self, PyObject *tensor, int k, Copies *copies) {
    NAME(before_at, "before_at") { return 0; }
    NAME(work_at, "work_at") { return 0; }
    NAME(work, "work") { return 0; }
    NAME(n_bytes, "n_bytes") { return 0; }
    Tensor t;
    if (!read_tensor(tensor, &t) || !is_on_cpu(&t) || t.data == NULL || !is_contiguous(&t) || is_negated(tensor) != 0) {
        return interrupted() ? -1 : 0;
    }
    size_t bytes = t.dtype.bits / 8;
    for (int32_t d = 0; d < t.ndim; d++) {
        bytes *= (size_t)t.shape[d];
    }
    if (bytes > MOST_COPIED) { /* Python sees to it that the copies do not take the room that the call needs */
        return 0;
    }
    copies->at = (char *)t.data + t.byte_offset;
    copies->shape = shape_of(tensor);
    copies->spare = copies->shape == NULL ? NULL : spare_for(self, tensor, copies->shape, k);
    if (copies->spare == NULL) {
        return interrupted() ? -1 : 0;
    }
    copies->work = PyObject_GetAttr(copies->spare, work);
    copies->before_at = (void *)number_of(copies->spare, before_at);
    copies->work_at = (void *)number_of(copies->spare, work_at);
    copies->n_bytes = number_of(copies->spare, n_bytes);
    if (copies->work == NULL) {
        return interrupted() ? -1 : 0;
    }
    return copies->before_at && copies->work_at && bytes && copies->n_bytes == bytes;
}

void keep_values(Handler *self, const Copies *copies) {
    long long start = started(self);
    move(copies->before_at, copies->at, copies->n_bytes);
    lap(self, PART_COPY, start);
}

void give_values(Handler *self, const Copies *copies) {
    long long start = started(self);
    move(copies->work_at, copies->before_at, copies->n_bytes);
    lap(self, PART_COPY, start);
}

/* A call may have given a tensor another form or other memory. */
static int is_still(PyObject *tensor, const void *at, PyObject *shape) {
    Tensor t;
    if (!read_tensor(tensor, &t) || (char *)t.data + t.byte_offset != (const char *)at) {
        return 0;
    }
    PyObject *now = shape_of(tensor);
    int same = now == NULL ? 0 : PyObject_RichCompareBool(now, shape, Py_EQ) == 1;
    Py_XDECREF(now);
    return same;
}

int same_values(PyObject *tensor, const Copies *copies) {
    return is_still(tensor, copies->at, copies->shape) && is_still(copies->work, copies->work_at, copies->shape) &&
           !bytes_differ(copies->at, copies->work_at, copies->n_bytes);
}

/* Of any subclass, too: one with no handler of its own comes to us as it is. What cannot be told counts as one. */
static int may_be_tensor(PyObject *value) {
    if (is_tensor(value)) {
        return 1;
    }
    return !(value == Py_None || PyLong_Check(value) || PyFloat_CheckExact(value)) && is_any_tensor(value) != 0;
}

int shares_memory(Handler *self, PyObject *args, Py_ssize_t position) {
    PyObject *written = PyTuple_GET_ITEM(args, position);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
        PyObject *a = PyTuple_GET_ITEM(args, i);
        if (i == position) {
            continue;
        }
        if (PyList_CheckExact(a) || PyTuple_CheckExact(a)) {
            return 1;
        }
        if (may_be_tensor(a)) {
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

PyObject *with_copies(PyObject *args, const int *positions, const Copies *copies, int n) {
    Py_ssize_t size = PyTuple_GET_SIZE(args);
    PyObject *made = PyTuple_New(size);
    for (Py_ssize_t i = 0; i < size && made != NULL; i++) {
        PyTuple_SET_ITEM(made, i, Py_NewRef(PyTuple_GET_ITEM(args, i)));
    }
    for (int k = 0; k < n && made != NULL; k++) {
        if (copies[k].work != NULL) {
            PyTuple_SetItem(made, positions[k], Py_NewRef(copies[k].work)); /* gives the former back */
        }
    }
    return made;
}
