/* Rows of calls in a data file: those that wait to be written, and those in its pages.
 *
 * `PythonRows` of store/write_buffer.py is the specification of the former, a query of store/groups.py of the latter.
 */

#include "core.h"

#include <math.h>
#include <string.h>
#include <structmember.h>

/* ---- rows that wait to be written ----------------------------------------------------------------------------------- */

/* Nothing here releases the GIL, not even for long copies: another thread could add a row, which moves the memory. Numbers
 * are read before anything is changed, since reading one may run Python code, which may add rows. */

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

/* ---- rows in leaf pages of the table `call` ------------------------------------------------------------------------- */

/* store/call_pages.py gives the pages, SQLite is the specification.
 *
 * The format: https://www.sqlite.org/fileformat2.html, sections 1.6 and 2.1. The bytes may be a hostile file's: every read is
 * within the page. Whatever the recorder does not write ends the reading with None, and SQLite reads the file instead: a
 * value of another type, a column too few, a record with overflow pages, rows out of order. */

enum { LEAF = 13, HEADER = 8, MAX_USABLE = 1 << 16, MIN_USABLE = 480 };
enum { MAX_RECORD = 200 }; /* bytes of a call: far fewer than those from which a record has overflow pages */
enum { N_COLUMNS = 8, WHOLE_COLUMNS = 4, TIME_COLUMNS = 6 }; /* the numbers of the call, its times, its drift */
enum { TYPE_NULL = 0, TYPE_FLOAT = 7, TYPE_ZERO = 8, TYPE_ONE = 9, TYPE_TEXT_3 = 19 };

static const double EXACT = 9007199254740992.0; /* 2^53: whole numbers below are exact */

typedef struct {
    const uint8_t *at, *end;
} Bytes;

/* A varint that the file may hold, or -1. */
static int64_t varint(Bytes *from) {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) { /* eight bytes hold 2^56 - 1: more than any number that is expected here */
        if (from->at >= from->end) {
            return -1;
        }
        uint8_t byte = *from->at++;
        value = value << 7 | (byte & 0x7F);
        if (!(byte & 0x80)) {
            return (int64_t)value;
        }
    }
    return -1;
}

/* A number; NaN where `type` is no number's, or the bytes end before it. */
static double number(Bytes *from, int64_t type) {
    static const int sizes[] = {0, 1, 2, 3, 4, 6, 8, 8, 0, 0};
    if (type <= TYPE_NULL || type > TYPE_ONE || from->end - from->at < sizes[type]) {
        return NAN;
    }
    if (type >= TYPE_ZERO) {
        return type == TYPE_ONE;
    }
    int size = sizes[type];
    uint64_t bits = *from->at & 0x80 && type != TYPE_FLOAT ? UINT64_MAX : 0; /* the sign of an integer */
    for (int i = 0; i < size; i++) {
        bits = bits << 8 | from->at[i];
    }
    from->at += size;
    double value = (double)(int64_t)bits;
    if (type == TYPE_FLOAT) {
        memcpy(&value, &bits, sizeof value);
    }
    return value;
}

/* One column of a call; 0 where it is not what the recorder writes. NULL becomes -1, the text 'nan' NaN. */
static int column(Bytes *from, int64_t type, int place, double *value) {
    if (type == TYPE_NULL) {
        *value = -1.0;
        return place >= WHOLE_COLUMNS;
    }
    if (place >= TIME_COLUMNS && type == TYPE_TEXT_3) {
        int is_nan = from->end - from->at >= 3 && !memcmp(from->at, "nan", 3);
        from->at += 3 * is_nan;
        *value = NAN;
        return is_nan;
    }
    *value = number(from, type);
    /* Below 2^53; of drift also more, and infinity. Below 0, NULL could not be told from it. */
    return *value >= 0.0 && (place >= TIME_COLUMNS || (type != TYPE_FLOAT && *value < EXACT));
}

static int cell(Bytes page, double row[N_COLUMNS]) {
    int64_t size = varint(&page), seq = varint(&page);
    if (size < 0 || size > MAX_RECORD || size > page.end - page.at || seq < 0 || seq >= (int64_t)1 << 47) {
        return 0;
    }
    Bytes body = {page.at, page.at + size}, types = body;
    int64_t header = varint(&types);
    if (header < 0 || header > size) {
        return 0;
    }
    types.end = body.at + header;
    body.at = types.end;
    for (int place = 0; place < N_COLUMNS; place++) {
        int64_t type = varint(&types);
        if (place == 0) {
            row[place] = (double)seq; /* the key of the table: its column is stored as NULL */
            if (type != TYPE_NULL) {
                return 0;
            }
        } else if (type < 0 || !column(&body, type, place, &row[place])) {
            return 0;
        }
    }
    return types.at == types.end && body.at == body.end;
}

static int count_cells(const uint8_t *page) { return page[3] << 8 | page[4]; }

static int leaf(const uint8_t *page, Py_ssize_t usable, double after, double *rows, Py_ssize_t *n) {
    double last = -1.0;
    int n_cells = count_cells(page);
    for (int i = 0; i < n_cells; i++) {
        const uint8_t *pointer = page + HEADER + 2 * i;
        Py_ssize_t start = pointer[0] << 8 | pointer[1];
        double *row = rows + *n * N_COLUMNS;
        if (start < HEADER + 2 * n_cells || start >= usable || !cell((Bytes){page + start, page + usable}, row) || row[0] <= last) {
            return 0;
        }
        last = row[0];
        *n += last > after;
    }
    return 1;
}

/* call_rows(pages, page_size, usable, after) -> the rows of eight float64 after call `after`, or None. */
PyObject *sr_call_rows(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer pages;
    Py_ssize_t size, usable;
    double after;
    if (!PyArg_ParseTuple(args, "y*nnd", &pages, &size, &usable, &after)) {
        return NULL;
    }
    PyObject *found = NULL;
    if (usable < MIN_USABLE || usable > size || size > MAX_USABLE || pages.len % size) {
        PyErr_SetString(PyExc_ValueError, "call_rows: no pages of this size");
        goto done;
    }
    Py_ssize_t room = 0, n = 0;
    int regular = 1;
    const uint8_t *start = pages.buf, *end = start + pages.len;
    for (const uint8_t *page = start; page < end && regular; page += size) {
        regular = page[0] == LEAF && HEADER + 2 * count_cells(page) <= usable;
        room += count_cells(page);
    }
    if (!regular) {
        found = Py_NewRef(Py_None);
        goto done;
    }
    /* One row more: the row after the last one that counts is written before it is found to be none. */
    found = PyBytes_FromStringAndSize(NULL, (room + 1) * N_COLUMNS * (Py_ssize_t)sizeof(double));
    if (found == NULL) {
        goto done;
    }
    double *rows = (double *)PyBytes_AS_STRING(found);
    double last = after;
    for (const uint8_t *page = start; page < end && regular; page += size) {
        Py_ssize_t before = n;
        regular = leaf(page, usable, after, rows, &n) && (n == before || rows[before * N_COLUMNS] > last);
        last = n ? rows[(n - 1) * N_COLUMNS] : after;
    }
    if (regular) {
        _PyBytes_Resize(&found, n * N_COLUMNS * (Py_ssize_t)sizeof(double));
    } else {
        Py_SETREF(found, Py_NewRef(Py_None));
    }
done:
    PyBuffer_Release(&pages);
    return found;
}
