/* Rows of records that wait to be written: `PythonRows` of store/write_buffer.py is the specification.
 *
 * Nothing here releases the GIL, not even for long copies: another thread could add a row, which moves the memory. Numbers
 * are read before anything is changed, since reading one may run Python code, which may add rows.
 */

#include "core.h"

#include <string.h>
#include <structmember.h>

enum { ROW_WIDTH = 8, ROW_BYTES = ROW_WIDTH * sizeof(double) };
enum { FEW_ROWS = 1024 }; /* room for this many is kept: they are written together */

struct SrRowBuffer {
    PyObject_HEAD
    double *numbers;
    Py_ssize_t n, capacity; /* in rows */
    long long step, last_step, next;
};

static PyTypeObject *rows_type;

/* Room for `capacity` rows, or an exception. */
static int rows_resize(SrRowBuffer *self, Py_ssize_t capacity) {
    double *numbers = capacity > PY_SSIZE_T_MAX / ROW_BYTES
                          ? NULL
                          : PyMem_Realloc(self->numbers, (size_t)capacity * ROW_BYTES);
    if (numbers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->numbers = numbers;
    self->capacity = capacity;
    return 0;
}

static int rows_put(SrRowBuffer *self, const double row[ROW_WIDTH]) {
    if (self->n == self->capacity && rows_resize(self, self->n < FEW_ROWS ? FEW_ROWS : 2 * self->n)) {
        return -1;
    }
    memcpy(self->numbers + self->n * ROW_WIDTH, row, ROW_BYTES);
    self->n++;
    return 0;
}

long long sr_next_seq(SrRowBuffer *self) { return self->next++; }

int sr_write_row(
    SrRowBuffer *self, long long seq, long long context, long long verdict, double ref_us, double target_us, double drift) {
    long long step = self->step;
    double row[ROW_WIDTH] = {(double)seq, (double)step, (double)context, (double)verdict, ref_us, target_us, drift, drift};
    if (rows_put(self, row)) {
        return -1;
    }
    self->last_step = step;
    return 0;
}

static int rows_read_numbers(PyObject *const *from, Py_ssize_t n, double *numbers) {
    for (Py_ssize_t i = 0; i < n; i++) {
        numbers[i] = PyFloat_AsDouble(from[i]);
        if (numbers[i] == -1.0 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

static PyObject *rows_add(SrRowBuffer *self, PyObject *const *args, Py_ssize_t n) {
    double given[ROW_WIDTH - 1] = {0, 0, 0, 0, 0, -1.0, -1.0};
    if (n < ROW_WIDTH - 3 || n > ROW_WIDTH - 1) {
        return sr_wrong_count("RowBuffer.add");
    }
    if (rows_read_numbers(args, n, given)) {
        return NULL;
    }
    long long step = self->step;
    double row[ROW_WIDTH] = {given[0], (double)step, given[1], given[2], given[3], given[4], given[5], given[6]};
    if (rows_put(self, row)) {
        return NULL;
    }
    self->last_step = step;
    Py_RETURN_NONE;
}

static PyObject *rows_append(SrRowBuffer *self, PyObject *given) {
    double row[ROW_WIDTH];
    PyObject *items = PySequence_Tuple(given);
    if (items == NULL) {
        return NULL;
    }
    int failed = PyTuple_GET_SIZE(items) != ROW_WIDTH;
    if (failed) {
        PyErr_Format(PyExc_TypeError, "a row has eight numbers: got %zd", PyTuple_GET_SIZE(items));
    } else {
        failed = rows_read_numbers(((PyTupleObject *)items)->ob_item, ROW_WIDTH, row) || rows_put(self, row);
    }
    Py_DECREF(items);
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* A number of rows, at most all; -1 with an exception. */
static Py_ssize_t rows_count(SrRowBuffer *self, PyObject *given) {
    Py_ssize_t n = PyNumber_AsSsize_t(given, NULL); /* a number that is too large becomes the greatest */
    if (n == -1 && PyErr_Occurred()) {
        return -1;
    }
    return n < 0 ? 0 : n > self->n ? self->n : n;
}

static PyObject *rows_head(SrRowBuffer *self, PyObject *given) {
    Py_ssize_t n = rows_count(self, given);
    return n < 0 ? NULL : PyBytes_FromStringAndSize((const char *)self->numbers, n * ROW_BYTES);
}

/* Release memory that is far more than needed. */
static void rows_shrink(SrRowBuffer *self) {
    Py_ssize_t wanted = self->n < FEW_ROWS ? FEW_ROWS : 2 * self->n;
    /* At half, not below what is needed: a buffer near the edge would be made larger and smaller in turn. */
    if (wanted < self->capacity / 2 && rows_resize(self, wanted)) {
        PyErr_Clear(); /* it stays as large as it was */
    }
}

static PyObject *rows_drop(SrRowBuffer *self, PyObject *given) {
    Py_ssize_t n = rows_count(self, given);
    if (n < 0) {
        return NULL;
    }
    if (n) {
        self->n -= n;
        memmove(self->numbers, self->numbers + n * ROW_WIDTH, (size_t)self->n * ROW_BYTES);
        rows_shrink(self);
    }
    Py_RETURN_NONE;
}

static PyObject *rows_clear(SrRowBuffer *self, PyObject *none) {
    (void)none;
    self->n = 0;
    rows_shrink(self);
    Py_RETURN_NONE;
}

static PyObject *rows_next_seq(SrRowBuffer *self, PyObject *none) {
    (void)none;
    return PyLong_FromLongLong(self->next++);
}

static PyObject *rows_start(SrRowBuffer *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 2) {
        return sr_wrong_count("RowBuffer.start");
    }
    long long seq = PyLong_AsLongLong(args[0]), step = PyErr_Occurred() ? -1 : PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    self->next = seq;
    self->step = step;
    self->last_step = -1;
    Py_RETURN_NONE;
}

static PyObject *rows_get_step(SrRowBuffer *self, void *closure) {
    (void)closure;
    return PyLong_FromLongLong(self->step);
}

static int rows_set_step(SrRowBuffer *self, PyObject *value, void *closure) {
    (void)closure;
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "RowBuffer.step cannot be deleted");
        return -1;
    }
    long long step = PyLong_AsLongLong(value);
    if (step == -1 && PyErr_Occurred()) {
        return -1;
    }
    self->step = step;
    return 0;
}

static PyObject *rows_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args) || (kwargs != NULL && PyDict_GET_SIZE(kwargs))) {
        return sr_wrong_count("RowBuffer");
    }
    SrRowBuffer *self = (SrRowBuffer *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->last_step = -1;
    }
    return (PyObject *)self;
}

static void rows_dealloc(SrRowBuffer *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(self->numbers);
    type->tp_free(self);
    Py_DECREF(type);
}

static Py_ssize_t rows_length(SrRowBuffer *self) { return self->n; }

static PyMethodDef rows_methods[] = {
    {"start", (PyCFunction)(void (*)(void))rows_start, METH_FASTCALL, NULL},
    {"next_seq", (PyCFunction)rows_next_seq, METH_NOARGS, NULL},
    {"add", (PyCFunction)(void (*)(void))rows_add, METH_FASTCALL, NULL},
    {"append", (PyCFunction)rows_append, METH_O, NULL},
    {"head", (PyCFunction)rows_head, METH_O, NULL},
    {"drop", (PyCFunction)rows_drop, METH_O, NULL},
    {"clear", (PyCFunction)rows_clear, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef rows_getset[] = {
    {"step", (getter)rows_get_step, (setter)rows_set_step, NULL, NULL}, /* as a member, it would be -1 after a bad value */
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef rows_members[] = {
    {"last_step", T_LONGLONG, offsetof(SrRowBuffer, last_step), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot rows_slots[] = {
    {Py_tp_new, rows_new},      {Py_tp_dealloc, rows_dealloc}, {Py_tp_methods, rows_methods},
    {Py_tp_members, rows_members}, {Py_tp_getset, rows_getset},   {Py_sq_length, rows_length},
    {0, NULL},
};

static PyType_Spec rows_spec = {
    .name = "shadowrun.native._core.RowBuffer",
    .basicsize = sizeof(SrRowBuffer),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = rows_slots,
};

int sr_is_row_buffer(PyObject *value) { return Py_IS_TYPE(value, rows_type); }

int sr_add_row_buffer_type(PyObject *module) { return sr_add_type(module, &rows_spec, &rows_type); }
