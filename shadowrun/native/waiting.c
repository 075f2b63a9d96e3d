/* Calls that wait to be written: `PythonRows` of store/rows.py, where what it does is described.
 *
 * Nothing here lets go of the interpreter's lock, not even to copy much: another thread may add meanwhile, which moves
 * the rows. Numbers are read before anything is changed, since to read them may run Python code, which may add rows.
 */

#include "core.h"

#include <string.h>
#include <structmember.h>

enum { WIDTH = 8, ROW_BYTES = WIDTH * sizeof(double) };
enum { FEW_ROWS = 1024 }; /* room for so many is kept: what is written at once */

struct Rows {
    PyObject_HEAD
    double *numbers;
    Py_ssize_t n, capacity; /* in rows */
    long long step, last_step, next;
};

static PyTypeObject *rows_type;

/* Room for `capacity` rows, or an exception. */
static int resize(Rows *self, Py_ssize_t capacity) {
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

static int put(Rows *self, const double row[WIDTH]) {
    if (self->n == self->capacity && resize(self, self->n < FEW_ROWS ? FEW_ROWS : 2 * self->n)) {
        return -1;
    }
    memcpy(self->numbers + self->n * WIDTH, row, ROW_BYTES);
    self->n++;
    return 0;
}

long long write_row(Rows *self, long long context, long long verdict, double ref_us, double target_us) {
    long long seq = self->next++, step = self->step;
    double row[WIDTH] = {(double)seq, (double)step, (double)context, (double)verdict, ref_us, target_us, -1.0, -1.0};
    if (put(self, row)) {
        return -1;
    }
    self->last_step = step;
    return seq;
}

static int read_numbers(PyObject *const *from, Py_ssize_t n, double *numbers) {
    for (Py_ssize_t i = 0; i < n; i++) {
        numbers[i] = PyFloat_AsDouble(from[i]);
        if (numbers[i] == -1.0 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

static PyObject *add(Rows *self, PyObject *const *args, Py_ssize_t n) {
    double given[WIDTH - 1] = {0, 0, 0, 0, 0, -1.0, -1.0};
    if (n < WIDTH - 3 || n > WIDTH - 1) {
        return wrong_count("Rows.add");
    }
    if (read_numbers(args, n, given)) {
        return NULL;
    }
    long long step = self->step;
    double row[WIDTH] = {given[0], (double)step, given[1], given[2], given[3], given[4], given[5], given[6]};
    if (put(self, row)) {
        return NULL;
    }
    self->last_step = step;
    Py_RETURN_NONE;
}

static PyObject *append(Rows *self, PyObject *given) {
    double row[WIDTH];
    PyObject *items = PySequence_Tuple(given);
    if (items == NULL) {
        return NULL;
    }
    int failed = PyTuple_GET_SIZE(items) != WIDTH;
    if (failed) {
        PyErr_Format(PyExc_TypeError, "a row has eight numbers: got %zd", PyTuple_GET_SIZE(items));
    } else {
        failed = read_numbers(((PyTupleObject *)items)->ob_item, WIDTH, row) || put(self, row);
    }
    Py_DECREF(items);
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* How many of the oldest are meant; -1 with an exception. */
static Py_ssize_t count(Rows *self, PyObject *given) {
    Py_ssize_t n = PyNumber_AsSsize_t(given, NULL); /* one that is too large is the greatest */
    if (n == -1 && PyErr_Occurred()) {
        return -1;
    }
    return n < 0 ? 0 : n > self->n ? self->n : n;
}

static PyObject *head(Rows *self, PyObject *given) {
    Py_ssize_t n = count(self, given);
    return n < 0 ? NULL : PyBytes_FromStringAndSize((const char *)self->numbers, n * ROW_BYTES);
}

/* Give back what much more than needed takes. */
static void shrink(Rows *self) {
    Py_ssize_t wanted = self->n < FEW_ROWS ? FEW_ROWS : 2 * self->n;
    if (wanted < self->capacity / 2 && resize(self, wanted)) {
        PyErr_Clear(); /* it stays as large as it was */
    }
}

static PyObject *drop(Rows *self, PyObject *given) {
    Py_ssize_t n = count(self, given);
    if (n < 0) {
        return NULL;
    }
    if (n) {
        self->n -= n;
        memmove(self->numbers, self->numbers + n * WIDTH, (size_t)self->n * ROW_BYTES);
        shrink(self);
    }
    Py_RETURN_NONE;
}

static PyObject *forget_all(Rows *self, PyObject *none) {
    (void)none;
    self->n = 0;
    shrink(self);
    Py_RETURN_NONE;
}

static PyObject *next_seq(Rows *self, PyObject *none) {
    (void)none;
    return PyLong_FromLongLong(self->next++);
}

static PyObject *start(Rows *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 2) {
        return wrong_count("Rows.start");
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

static PyObject *get_step(Rows *self, void *closure) {
    (void)closure;
    return PyLong_FromLongLong(self->step);
}

static int set_step(Rows *self, PyObject *value, void *closure) {
    (void)closure;
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "Rows.step cannot be deleted");
        return -1;
    }
    long long step = PyLong_AsLongLong(value);
    if (step == -1 && PyErr_Occurred()) {
        return -1;
    }
    self->step = step;
    return 0;
}

static PyObject *create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args) || (kwargs != NULL && PyDict_GET_SIZE(kwargs))) {
        return wrong_count("Rows");
    }
    Rows *self = (Rows *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->last_step = -1;
    }
    return (PyObject *)self;
}

static void dealloc(Rows *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(self->numbers);
    type->tp_free(self);
    Py_DECREF(type);
}

static Py_ssize_t length(Rows *self) { return self->n; }

static PyMethodDef methods[] = {
    {"start", (PyCFunction)(void (*)(void))start, METH_FASTCALL, NULL},
    {"next_seq", (PyCFunction)next_seq, METH_NOARGS, NULL},
    {"add", (PyCFunction)(void (*)(void))add, METH_FASTCALL, NULL},
    {"append", (PyCFunction)append, METH_O, NULL},
    {"head", (PyCFunction)head, METH_O, NULL},
    {"drop", (PyCFunction)drop, METH_O, NULL},
    {"clear", (PyCFunction)forget_all, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"step", (getter)get_step, (setter)set_step, NULL, NULL}, /* as a member, it would be -1 after a bad value */
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"last_step", T_LONGLONG, offsetof(Rows, last_step), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, create},      {Py_tp_dealloc, dealloc}, {Py_tp_methods, methods},
    {Py_tp_members, members}, {Py_tp_getset, getset},   {Py_sq_length, length},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "shadowrun.native._core.Rows",
    .basicsize = sizeof(Rows),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

int is_rows(PyObject *value) { return Py_IS_TYPE(value, rows_type); }

int add_rows(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    rows_type = (PyTypeObject *)type; /* held by the module, which is never unloaded */
    return type == NULL || PyModule_AddObjectRef(module, "Rows", type) ? -1 : 0;
}
