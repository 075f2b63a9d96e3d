/* Rows of the tensors of a call, in and out: the fast half of recording/call_results.py and recording/data_flow.py.
 *
 * It answers for plain tensors with memory of their own, which nearly all are, and leaves every other call to Python before
 * anything is done; Python digests those of accelerators. Both work on the same objects: rows by storage, forms, and the columns of the block that is being filled.
 */

#include "digest.h"
#include "record.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

enum { MAX_POSITION = 255, MAX_FORMS = 50000, MAX_RETURNS = 64, MAX_DEPTH = 8, NONE = -1 };
enum { KIND_RESULT = 0, KIND_WRITTEN = 1, KIND_VIEW = 3 }; /* `Kind` of recording/model.py */

/* A row of `RESULT` of recording/model.py. */
enum { BASE_AT = 12, STATISTICS_AT = 20 };

typedef struct {
    PyObject_HEAD
    PyObject *storages;                              /* dict: identity to StorageRows; of the data flow */
    PyObject *forms;                                 /* dict: bytes to number */
    PyObject *form, *digest;                         /* callables: number of a tensor's form; its packed digest, or None */
    PyObject *number_form;                           /* callable: number of the form of a tensor with that number */
    PyObject *number_forms;                          /* dict: its answers, by type */
    PyObject *results, *rungs, *samples, *row_rungs; /* bytearrays: columns of a block */
    PyObject *leaf;                                  /* type; its slot `row` */
    long long first_row;                             /* of the block */
    Py_ssize_t row_of_leaf;
    int plain_digests; /* no ladders of rows are wanted */
} TensorRows;

/* A tensor that a call returned or wrote to. */
typedef struct {
    PyObject *tensor; /* owned */
    size_t n_bytes;   /* of its elements; 0 of a view */
    int position;
    char is_written, has_values;
} RowsValue;

typedef struct {
    RowsValue *values, first[16];
    Py_ssize_t n, room;
} RowsValues;

/* The number of a form: owned; NULL with an exception. */
static PyObject *rows_form(TensorRows *self, PyObject *tensor, const SrPlace *place) {
    enum { MAX_DIMS = 16 };
    int64_t words[2 + 2 * MAX_DIMS];
    if (place->n_dims > MAX_DIMS) {
        return PyObject_CallOneArg(self->form, tensor);
    }
    size_t n = (size_t)place->n_dims;
    words[0] = (int64_t)(intptr_t)place->dtype; /* of which there is one for the process */
    words[1] = place->n_dims;
    memcpy(words + 2, place->sizes, n * sizeof *words);
    memcpy(words + 2 + n, place->strides, n * sizeof *words);
    PyObject *key = PyBytes_FromStringAndSize((const char *)words, (Py_ssize_t)((2 + 2 * n) * sizeof *words));
    PyObject *known = key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(self->forms, key));
    if (known == NULL && key != NULL && !PyErr_Occurred()) {
        known = PyObject_CallOneArg(self->form, tensor);
        /* Programs whose shapes change without end must not fill memory: what is dropped is asked of Python once
         * more. */
        if (known != NULL && PyDict_GET_SIZE(self->forms) >= MAX_FORMS) {
            PyDict_Clear(self->forms);
        }
        if (known != NULL && PyDict_SetItem(self->forms, key, known)) {
            Py_CLEAR(known);
        }
    }
    Py_XDECREF(key);
    return known;
}

/* -- inputs */

/* The row with a tensor's values: owned; NULL, perhaps with an exception, where Python has to look. */
static PyObject *rows_of_input(TensorRows *self, PyObject *tensor, SrOnDevice *on_device) {
    SrPlace place;
    long long version;
    int known = sr_read_place(tensor, &place);
    SrStorageRows *storage = known ? sr_known_storage(self->storages, &place) : NULL;
    if (known && place.device != SR_TORCH_CPU && on_device->tensor == NULL) {
        on_device->tensor = tensor;
        on_device->type = place.device;
    }
    if (storage == NULL || sr_read_version(tensor, &version) || !sr_is_current(storage, version)) {
        return NULL;
    }
    PyObject *form = rows_form(self, tensor, &place), *key = form == NULL ? NULL : sr_place_key(&place, form);
    PyObject *row = key == NULL ? NULL : PyDict_GetItemWithError(storage->rows, key);
    if (row == NULL && key != NULL && !PyErr_Occurred() && storage->last != Py_None) {
        row = storage->last;
    }
    Py_XINCREF(row);
    Py_XDECREF(form);
    Py_XDECREF(key);
    if (row != NULL && Py_IS_TYPE(row, (PyTypeObject *)self->leaf)) {
        PyObject *number = sr_slot(row, self->row_of_leaf);
        if (number != NULL && PyLong_CheckExact(number) && PyLong_AsLongLong(number) != NONE) {
            Py_SETREF(row, Py_NewRef(number)); /* else the call that uses it first is not recorded yet */
        }
    }
    return row;
}

long long sr_row_number(PyObject *rows, PyObject *row) {
    TensorRows *self = (TensorRows *)rows;
    PyObject *number = Py_IS_TYPE(row, (PyTypeObject *)self->leaf) ? sr_slot(row, self->row_of_leaf) : row;
    return number == NULL ? NONE : PyLong_AsLongLong(number);
}

/* Append the rows of the tensors in a value: 1; 0, perhaps with an exception, where Python has to. */
static int rows_note(TensorRows *self, PyObject *value, PyObject *found, SrOnDevice *on_device, int depth) {
    if (sr_is_tensor(value)) {
        PyObject *row = rows_of_input(self, value, on_device);
        int failed = row == NULL || PyList_Append(found, row);
        Py_XDECREF(row);
        return !failed;
    }
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++) {
            PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
            int done = depth < MAX_DEPTH && rows_note(self, item, found, on_device, depth + 1);
            Py_DECREF(item);
            if (!done) {
                return 0;
            }
        }
        return 1;
    }
    return value == Py_None || PyLong_Check(value) || PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) ||
           sr_is_exact(value) == 1 || sr_is_tensor_or_subclass(value) == 0;
}

PyObject *sr_rows_of_inputs(PyObject *rows, PyObject *args, PyObject *kwargs, SrOnDevice *on_device) {
    TensorRows *self = (TensorRows *)rows;
    PyObject *found = PyList_New(0), *name, *value;
    if (found == NULL) {
        return NULL;
    }
    on_device->tensor = NULL;
    int done = rows_note(self, args, found, on_device, 0);
    Py_ssize_t position = 0;
    while (done && PyDict_Next(kwargs, &position, &name, &value)) {
        Py_INCREF(value);
        done = rows_note(self, value, found, on_device, 0);
        Py_DECREF(value);
    }
    if (!done || !PyList_GET_SIZE(found)) { /* without a tensor, a keyword says where the call runs */
        Py_CLEAR(found);
    }
    return found;
}

/* -- results */

/* Grows to twice the size: Python adds an eighth, and each time may move the column to memory between the program's tensors. */
int sr_append(PyObject *column, const void *bytes, size_t n) {
    Py_ssize_t size = PyByteArray_GET_SIZE(column), wanted = size + (Py_ssize_t)n;
    if (n == 0) {
        return 0;
    }
    if (wanted >= ((PyByteArrayObject *)column)->ob_alloc && PyByteArray_Resize(column, 2 * wanted)) {
        return -1;
    }
    if (PyByteArray_Resize(column, wanted)) {
        return -1;
    }
    memcpy(PyByteArray_AS_STRING(column) + size, bytes, n);
    return 0;
}

typedef struct {
    const void *statistics, *rungs, *samples, *row_rungs;
    size_t n_rungs, n_samples, n_rows;
} RowsDigest;

/* A row of results; `digest`: or NULL. -1 with an exception. */
static int rows_put(TensorRows *self, int kind, int position, PyObject *form, long long base, const RowsDigest *digest) {
    static const SrStatistics no_statistics = {0, 0, 0, 0, 0, 0, NAN, NAN, NAN};
    static const RowsDigest no_digest = {&no_statistics, NULL, NULL, NULL, 0, 0, 0};
    const RowsDigest *d = digest == NULL ? &no_digest : digest;
    unsigned char row[SR_ROW_BYTES];
    int32_t form_number = (int32_t)PyLong_AsLong(form), n_rows = (int32_t)d->n_rows;
    int64_t base_number = base;
    if (form_number == -1 && PyErr_Occurred()) {
        return -1;
    }
    memcpy(row, &form_number, sizeof form_number);
    row[4] = (unsigned char)kind, row[5] = (unsigned char)(position < MAX_POSITION ? position : MAX_POSITION);
    row[6] = (unsigned char)d->n_samples, row[7] = (unsigned char)d->n_rungs;
    memcpy(row + 8, &n_rows, sizeof n_rows);
    memcpy(row + BASE_AT, &base_number, sizeof base_number);
    memcpy(row + STATISTICS_AT, d->statistics, sizeof no_statistics);
    size_t word = sizeof(uint64_t);
    int failed = sr_append(self->results, row, sizeof row) || sr_append(self->rungs, d->rungs, d->n_rungs * word) ||
                 sr_append(self->samples, d->samples, d->n_samples * word) ||
                 sr_append(self->row_rungs, d->row_rungs, d->n_rows * d->n_rungs * word);
    return failed ? -1 : 0;
}

/* The same with a digest that Python has packed, or None. */
static int rows_put_packed(TensorRows *self, int kind, int position, PyObject *form, long long base, PyObject *packed) {
    const char *parts[4];
    Py_ssize_t lengths[4];
    if (packed == Py_None) {
        return rows_put(self, kind, position, form, base, NULL);
    }
    if (!PyArg_ParseTuple(packed, "y#y#y#y#", &parts[0], &lengths[0], &parts[1], &lengths[1], &parts[2], &lengths[2],
                          &parts[3], &lengths[3])) {
        return -1;
    }
    if (lengths[0] != sizeof(SrStatistics) || lengths[1] <= 0) {
        PyErr_SetString(PyExc_ValueError, "TensorRows: no digest");
        return -1;
    }
    RowsDigest digest = {parts[0], parts[1], parts[2], parts[3],
                         (size_t)lengths[1] / 8, (size_t)lengths[2] / 8, (size_t)(lengths[3] / lengths[1])};
    return rows_put(self, kind, position, form, base, &digest);
}

static int rows_put_digested(TensorRows *self, int kind, int position, PyObject *form, long long base, PyObject *tensor) {
    SrTensor t;
    SrDigest found;
    int done = self->plain_digests && sr_read_tensor(tensor, &t) ? sr_digest_tensor(tensor, &t, &found) : 0;
    if (done == 1) {
        RowsDigest digest = {&found.statistics, found.rungs, found.samples, NULL, found.n_rungs, found.n_samples, 0};
        return rows_put(self, kind, position, form, base, &digest);
    }
    PyObject *packed = done < 0 ? NULL : PyObject_CallOneArg(self->digest, tensor);
    int failed = packed == NULL || rows_put_packed(self, kind, position, form, base, packed);
    Py_XDECREF(packed);
    return failed ? -1 : 0;
}

/* DataFlow.note_write: `base` is the row that the rest of the storage comes from. */
static int rows_written(TensorRows *self, const RowsValue *value, const SrPlace *place, PyObject *key, PyObject *row, long long *base) {
    SrStorageRows *before = sr_known_storage(self->storages, place);
    PyObject *rest = Py_NewRef(before == NULL ? Py_None : before->last);
    SrStorageRows *storage = PyErr_Occurred() ? NULL : sr_renewed_storage(self->storages, value->tensor, place);
    int64_t all;
    int failed = storage == NULL || PyDict_SetItem(storage->rows, key, row);
    int covers = sr_read_storage_size(value->tensor, &all) && value->n_bytes >= (size_t)all;
    *base = NONE;
    if (!failed) {
        storage->counts = 1;
        if (covers || rest != Py_None) { /* else its other tensors are to become leaves */
            Py_XSETREF(storage->last, Py_NewRef(row));
        }
        if (!covers && rest != Py_None) {
            *base = sr_row_number((PyObject *)self, rest);
            failed = PyErr_Occurred() != NULL;
        }
    }
    Py_DECREF(rest);
    return failed ? -1 : 0;
}

/* One tensor: its row, and that the row has its values. -1 with an exception. */
static int rows_add_value(TensorRows *self, const SrOperator *operator, const RowsValue *value, long long base, long long row_number) {
    SrPlace place;
    if (!sr_read_place(value->tensor, &place)) {
        PyErr_SetString(PyExc_RuntimeError, "TensorRows: a tensor changed its kind");
        return -1;
    }
    PyObject *form = rows_form(self, value->tensor, &place), *key = form == NULL ? NULL : sr_place_key(&place, form);
    PyObject *row = key == NULL ? NULL : PyLong_FromLongLong(row_number);
    SrStorageRows *storage = NULL;
    int failed = row == NULL, kind = value->is_written ? KIND_WRITTEN : KIND_RESULT;
    if (!failed && operator->is_view) { /* of memory that is known: `rows_can_add` has looked */
        storage = sr_known_storage(self->storages, &place);
        failed = storage == NULL || PyDict_SetItem(storage->rows, key, row);
        if (!failed) {
            storage->counts = (char)(storage->counts || operator->counts);
            failed = rows_put(self, KIND_VIEW, value->position, form, base, NULL);
        }
    } else if (!failed && value->is_written) {
        failed = rows_written(self, value, &place, key, row, &base);
    } else if (!failed) {
        storage = sr_renewed_storage(self->storages, value->tensor, &place);
        failed = storage == NULL || PyDict_SetItem(storage->rows, key, row);
        if (!failed) {
            Py_XSETREF(storage->last, Py_NewRef(row));
        }
        base = NONE;
    }
    if (!failed && !operator->is_view) {
        failed = value->has_values ? rows_put_digested(self, kind, value->position, form, base, value->tensor)
                                   : rows_put(self, kind, value->position, form, base, NULL);
    }
    if (failed && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_RuntimeError, "TensorRows: a storage is not known any more");
    }
    Py_XDECREF(form);
    Py_XDECREF(key);
    Py_XDECREF(row);
    return failed ? -1 : 0;
}

/* Whether `rows_add_value` has all that it needs: a tensor with memory, on known memory if it is a view, and only then. */
static int rows_can_add(TensorRows *self, const SrOperator *operator, PyObject *tensor, int is_written, size_t *n_bytes) {
    SrPlace place;
    SrTensor t;
    if (!sr_is_tensor(tensor) || !sr_read_place(tensor, &place)) {
        return 0;
    }
    if (operator->is_view) {
        return sr_known_storage(self->storages, &place) != NULL;
    }
    /* A result in known memory is none of its own: Python looks at it. */
    if ((!is_written && sr_known_storage(self->storages, &place) != NULL) || !sr_read_tensor_anywhere(tensor, &t)) {
        return 0;
    }
    *n_bytes = sr_n_bytes(&t);
    return t.data != NULL || *n_bytes == 0; /* else it is one of zeros, without memory */
}

/* Add the tensors of a value, as `_flat`: 1; 0, perhaps with an exception, where Python has to. */
static int rows_collect(TensorRows *self, const SrOperator *operator, PyObject *value, RowsValue like, int *position, RowsValues *found, int skips) {
    if (value == Py_None) {
        return 1;
    }
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++) {
            PyObject *item = PySequence_Fast_GET_ITEM(value, i);
            if (PyList_Check(item) || PyTuple_Check(item) || !rows_collect(self, operator, item, like, position, found, skips)) {
                return 0;
            }
        }
        return 1;
    }
    like.position = (*position)++;
    if (skips) {
        return 1;
    }
    if (!rows_can_add(self, operator, value, like.is_written, &like.n_bytes)) {
        return 0;
    }
    if (found->n == found->room) {
        size_t held = (size_t)found->n * sizeof *found->values;
        RowsValue *more = malloc(4 * held);
        if (more == NULL) {
            return 0;
        }
        memcpy(more, found->values, held);
        if (found->values != found->first) {
            free(found->values);
        }
        found->values = more;
        found->room *= 4;
    }
    like.tensor = Py_NewRef(value);
    found->values[found->n++] = like;
    return 1;
}

/* All tensors that a call returned or wrote to: 1; 0, perhaps with an exception, where Python has to look. */
static int rows_collect_all(TensorRows *self, const SrOperator *operator, PyObject *args, PyObject *out, RowsValues *found) {
    int position = 0, done = 1;
    if (operator->n_returns == 1) {
        RowsValue like = {.has_values = (char)(operator->has_values && !(operator->uninitialised & 1))};
        done = rows_collect(self, operator, out, like, &position, found, (int)(operator->aliases & 1));
    } else if (PyList_CheckExact(out) || PyTuple_CheckExact(out)) {
        Py_ssize_t n = PySequence_Fast_GET_SIZE(out);
        for (Py_ssize_t i = 0; i < n && done; i++) {
            done = i < MAX_RETURNS;
            RowsValue like = {.has_values = (char)(operator->has_values && !(operator->uninitialised >> (i & 63) & 1))};
            done = done && rows_collect(self, operator, PySequence_Fast_GET_ITEM(out, i), like, &position, found,
                                        (int)(operator->aliases >> (i & 63) & 1));
        }
    }
    position = 0;
    for (int i = 0; i < operator->n_written && done; i++) {
        RowsValue like = {.is_written = 1, .has_values = operator->has_values};
        done = operator->written[i] < PyTuple_GET_SIZE(args) &&
               rows_collect(self, operator, PyTuple_GET_ITEM(args, operator->written[i]), like, &position, found, 0);
    }
    return done;
}

/* The number that a tensor of one element has: a view of it. */
static sr_result rows_add_item(TensorRows *self, PyObject *out, long long base) {
    PyObject *type = (PyObject *)Py_TYPE(out);
    PyObject *form = Py_XNewRef(PyDict_GetItemWithError(self->number_forms, type));
    if (form == NULL && !PyErr_Occurred()) {
        form = PyObject_CallOneArg(self->number_form, out);
        if (form != NULL && PyDict_SetItem(self->number_forms, type, form)) {
            Py_CLEAR(form);
        }
    }
    int failed = form == NULL || rows_put(self, KIND_VIEW, 0, form, base, NULL);
    Py_XDECREF(form);
    return failed ? SR_ERROR : SR_DONE;
}

sr_result sr_add_rows(PyObject *rows, const SrOperator *operator, PyObject *args, PyObject *out, long long base) {
    TensorRows *self = (TensorRows *)rows;
    if (operator->is_item && base != NONE && (PyFloat_CheckExact(out) || PyLong_CheckExact(out) || PyBool_Check(out))) {
        return rows_add_item(self, out, base);
    }
    RowsValues found = {.values = found.first, .n = 0, .room = sizeof found.first / sizeof *found.first};
    int done = rows_collect_all(self, operator, args, out, &found);
    for (Py_ssize_t i = 0; i < found.n && done == 1; i++) {
        long long row = self->first_row + PyByteArray_GET_SIZE(self->results) / SR_ROW_BYTES;
        done = rows_add_value(self, operator, &found.values[i], base, row) ? -1 : 1;
    }
    while (found.n) {
        Py_DECREF(found.values[--found.n].tensor);
    }
    if (found.values != found.first) {
        free(found.values);
    }
    return PyErr_Occurred() ? SR_ERROR : done ? SR_DONE : SR_FALLBACK;
}

/* The type. */

static const SrField rows_fields[] = {
    SR_FIELD(TensorRows, storages), SR_FIELD(TensorRows, form),    SR_FIELD(TensorRows, digest),
    SR_FIELD(TensorRows, number_form), SR_FIELD(TensorRows, results), SR_FIELD(TensorRows, rungs),
    SR_FIELD(TensorRows, samples),  SR_FIELD(TensorRows, row_rungs), SR_FIELD(TensorRows, leaf),
    {NULL, 0},
};

static int rows_start(TensorRows *self, PyObject *kwargs) {
    if (sr_take_fields((PyObject *)self, kwargs, rows_fields)) {
        return -1;
    }
    PyObject *plain = PyDict_GetItemString(kwargs, "plain_digests");
    self->plain_digests = plain == Py_True;
    self->forms = PyDict_New();
    self->number_forms = PyDict_New();
    if (!(PyDict_Check(self->storages) && PyByteArray_Check(self->results) && PyByteArray_Check(self->rungs) &&
          PyByteArray_Check(self->samples) && PyByteArray_Check(self->row_rungs) && PyType_Check(self->leaf))) {
        return sr_wrong_type((PyObject *)self);
    }
    self->row_of_leaf = sr_slot_offset((PyTypeObject *)self->leaf, "row");
    return self->row_of_leaf < 0 || self->forms == NULL || self->number_forms == NULL ? -1 : 0;
}

static PyObject *rows_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    TensorRows *self = (TensorRows *)sr_new_by_name(type, args);
    if (self != NULL && rows_start(self, kwargs)) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int rows_traverse(TensorRows *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return sr_visit_fields((PyObject *)self, rows_fields, visit, arg);
}

static int rows_clear(TensorRows *self) {
    sr_clear_fields((PyObject *)self, rows_fields);
    Py_CLEAR(self->forms);
    Py_CLEAR(self->number_forms);
    return 0;
}

static PyMemberDef rows_members[] = {
    {"first_row", T_LONGLONG, offsetof(TensorRows, first_row), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject *rows_type;

int sr_is_tensor_rows(PyObject *value) { return Py_IS_TYPE(value, rows_type); }

static PyType_Slot rows_slots[] = {
    {Py_tp_new, rows_new},     {Py_tp_dealloc, sr_dealloc}, {Py_tp_traverse, rows_traverse},
    {Py_tp_clear, rows_clear}, {Py_tp_members, rows_members},
    {0, NULL},
};

static PyType_Spec rows_spec = {
    .name = "shadowrun.native._core.TensorRows",
    .basicsize = sizeof(TensorRows),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = rows_slots,
};

int sr_add_tensor_rows_type(PyObject *module) {
    return sr_add_type(module, &rows_spec, &rows_type) || PyModule_AddIntConstant(module, "MAX_RETURNS", MAX_RETURNS) ? -1 : 0;
}
