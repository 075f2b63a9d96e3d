/* The data flow of a recording: which rows have the values of a storage, the rows of the tensors of a call, in and out, and
 * which calls have the memory of their arguments watched for writes that no schema declares.
 *
 * It is the fast half of recording/call_results.py, recording/data_flow.py and recording/undeclared_writes.py. It answers for
 * plain tensors with memory of their own, which nearly all are, and leaves every other call to Python before anything is done;
 * Python digests those of accelerators. Both work on the same objects: rows by storage, forms, and the columns of the block
 * that is being filled.
 */

#include "digest.h"
#include "dispatch.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

/* ---- rows of a storage ----------------------------------------------------------------------------------------------- */

/* What is known of a storage: `_StorageRows` of recording/data_flow.py, with the same attributes. */
typedef struct {
    PyObject_HEAD
    PyObject *reference; /* weak; a number of torch's */
    PyObject *last, *rows;
    long long version;
    char counts;
    unsigned char n_resting, rest; /* looks for freed storages that leave it out, and how many did last time */
} StorageRows;

static PyTypeObject *storage_rows_type;
enum { STORAGE_OF, REFERENCE_OF, FREE, EXPIRED, N_FUNCTIONS };
static PyObject *storage_rows_of_torch[N_FUNCTIONS];

/* setup_storage_rows((storage of a tensor, weak reference of a storage, what frees such a reference, whether its storage was
 * freed)): functions of torch. */
PyObject *sr_setup_storage_rows(PyObject *module, PyObject *functions) {
    (void)module;
    if (!PyTuple_Check(functions) || PyTuple_GET_SIZE(functions) != N_FUNCTIONS) {
        return sr_wrong_count("setup_storage_rows");
    }
    for (int i = 0; i < N_FUNCTIONS; i++) {
        Py_XSETREF(storage_rows_of_torch[i], Py_NewRef(PyTuple_GET_ITEM(functions, i)));
    }
    Py_RETURN_NONE;
}

static StorageRows *storage_new(PyObject *tensor, long long version) {
    StorageRows *self = PyObject_New(StorageRows, storage_rows_type);
    if (self == NULL) {
        return NULL;
    }
    self->reference = self->last = self->rows = NULL;
    PyObject *storage = PyObject_CallOneArg(storage_rows_of_torch[STORAGE_OF], tensor);
    self->reference = storage == NULL ? NULL : PyObject_CallOneArg(storage_rows_of_torch[REFERENCE_OF], storage);
    Py_XDECREF(storage);
    self->rows = self->reference == NULL ? NULL : PyDict_New();
    if (self->rows == NULL) {
        Py_CLEAR(self);
        return NULL;
    }
    self->last = Py_NewRef(Py_None);
    self->version = version;
    self->counts = 0;
    self->n_resting = self->rest = 0;
    return self;
}

/* Forget all rows; -1 with an exception. */
static int storage_renew(StorageRows *self, long long version) {
    PyObject *rows = PyDict_New(); /* which takes no memory while it is empty */
    if (rows == NULL) {
        return -1;
    }
    self->version = version;
    self->counts = 0;
    Py_XSETREF(self->rows, rows);
    Py_XSETREF(self->last, Py_NewRef(Py_None));
    return 0;
}

/* Whether no write was missed since the last recorded one. */
static int storage_is_current(StorageRows *self, long long version) {
    if (self->counts && version == self->version + 1) {
        self->version = version;
        self->counts = 0;
    }
    return version == self->version;
}

static int storage_is(PyObject *value) { return Py_IS_TYPE(value, storage_rows_type); }

/* The key of a tensor's place in its storage, as `_place` of recording/data_flow.py: owned; NULL with an exception. */
static PyObject *storage_place_key(const SrPlace *place, PyObject *form) {
    if (place->offset == 0) {
        return Py_NewRef(form);
    }
    static PyObject *shift;
    if (shift == NULL && (shift = PyLong_FromLong(32)) == NULL) {
        return NULL;
    }
    PyObject *offset = PyLong_FromLongLong(place->offset);
    PyObject *shifted = offset == NULL ? NULL : PyNumber_Lshift(offset, shift);
    PyObject *key = shifted == NULL ? NULL : PyNumber_Add(shifted, form);
    Py_XDECREF(offset);
    Py_XDECREF(shifted);
    return key;
}

/* What is known of a storage: borrowed; NULL, perhaps with an exception. */
static StorageRows *storage_known(PyObject *storages, const SrPlace *place) {
    PyObject *key = PyLong_FromVoidPtr(place->storage);
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(storages, key);
    Py_XDECREF(key);
    return found != NULL && storage_is(found) ? (StorageRows *)found : NULL;
}

/* The same afresh, for a tensor that a call made or wrote to: borrowed; NULL with an exception. */
static StorageRows *storage_renewed(PyObject *storages, PyObject *tensor, const SrPlace *place) {
    long long version;
    StorageRows *known = storage_known(storages, place);
    if (PyErr_Occurred() || sr_read_version(tensor, &version)) {
        return NULL;
    }
    if (known != NULL) {
        return storage_renew(known, version) ? NULL : known;
    }
    PyObject *key = PyLong_FromVoidPtr(place->storage);
    StorageRows *made = key == NULL ? NULL : storage_new(tensor, version);
    if (made != NULL && PyDict_SetItem(storages, key, (PyObject *)made)) {
        Py_CLEAR(made);
    }
    Py_XDECREF(key);
    Py_XDECREF((PyObject *)made); /* the dict has it */
    return made;
}

static PyObject *storage_rows_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *tensor;
    long long version;
    (void)type;
    if ((kwargs != NULL && PyDict_GET_SIZE(kwargs)) || !PyArg_ParseTuple(args, "OL:StorageRows", &tensor, &version)) {
        return PyErr_Occurred() ? NULL : sr_wrong_count("StorageRows");
    }
    return (PyObject *)storage_new(tensor, version);
}

static void storage_rows_dealloc(StorageRows *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->reference != NULL) {
        PyObject *error_type, *error, *trace;
        PyErr_Fetch(&error_type, &error, &trace);
        Py_XDECREF(PyObject_CallOneArg(storage_rows_of_torch[FREE], self->reference));
        PyErr_Restore(error_type, error, trace);
    }
    Py_XDECREF(self->reference);
    Py_XDECREF(self->last);
    Py_XDECREF(self->rows);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *storage_rows_renew(StorageRows *self, PyObject *given) {
    long long version = PyLong_AsLongLong(given);
    if ((version == -1 && PyErr_Occurred()) || storage_renew(self, version)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef storage_rows_methods[] = {
    {"renew", (PyCFunction)storage_rows_renew, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef storage_rows_members[] = {
    {"version", T_LONGLONG, offsetof(StorageRows, version), 0, NULL},
    {"counts", T_BOOL, offsetof(StorageRows, counts), 0, NULL},
    {"last", T_OBJECT_EX, offsetof(StorageRows, last), 0, NULL},
    {"rows", T_OBJECT_EX, offsetof(StorageRows, rows), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot storage_rows_slots[] = {
    {Py_tp_new, storage_rows_new},         {Py_tp_dealloc, storage_rows_dealloc},
    {Py_tp_methods, storage_rows_methods}, {Py_tp_members, storage_rows_members},
    {0, NULL},
};

static PyType_Spec storage_rows_spec = {
    .name = "shadowrun.native._core.StorageRows",
    .basicsize = sizeof(StorageRows),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = storage_rows_slots,
};

/* Whether a storage was freed: 1, 0, or -1 with an exception. One that is alive is left out of the next looks: to ask torch
 * takes longer than all else here. */
static int storage_rows_look(StorageRows *self) {
    enum { MOST_LOOKS = 3 };
    if (self->n_resting) {
        self->n_resting--;
        return 0;
    }
    PyObject *is_freed = PyObject_CallOneArg(storage_rows_of_torch[EXPIRED], self->reference);
    int found = is_freed == NULL ? -1 : is_freed == Py_True;
    Py_XDECREF(is_freed);
    self->rest = (unsigned char)Py_MIN(2 * self->rest + 1, MOST_LOOKS);
    self->n_resting = self->rest;
    return found;
}

/* forget_freed(storages): `_forget_freed` of recording/data_flow.py, for a dict of StorageRows. */
PyObject *sr_forget_freed(PyObject *module, PyObject *storages) {
    (void)module;
    PyObject *freed = PyDict_Check(storages) ? PyList_New(0) : NULL, *key, *value;
    Py_ssize_t position = 0;
    if (freed == NULL) {
        return PyErr_Occurred() ? NULL : sr_wrong_count("forget_freed");
    }
    int failed = 0;
    while (!failed && PyDict_Next(storages, &position, &key, &value)) {
        if (!storage_is(value)) {
            continue;
        }
        int is_freed = storage_rows_look((StorageRows *)value);
        failed = is_freed < 0 || (is_freed && PyList_Append(freed, key));
    }
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(freed); i++) {
        failed = PyDict_DelItem(storages, PyList_GET_ITEM(freed, i));
    }
    Py_DECREF(freed);
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

int sr_add_storage_rows_type(PyObject *module) { return sr_add_type(module, &storage_rows_spec, &storage_rows_type); }

/* ---- which calls are watched -----------------------------------------------------------------------------------------
 *
 * A signature is known by 64 bits of hash. Two that share them are watched as one, which no program will meet: there are
 * few thousand signatures.
 */

enum { SCHEDULE_ROOM = 256, SCHEDULE_MAX_SIGNATURES = 50000 };

typedef struct {
    uint64_t n_calls, n_watched;
    int always;
} ScheduleOperator;

typedef struct {
    uint64_t hash, n_calls; /* none: a free place */
} ScheduleSignature;

typedef struct {
    PyObject_HEAD
    uint64_t first, rarer, free, share; /* calls of a signature; factor; calls of an operator; its share later */
    ScheduleOperator *operators;        /* by number */
    Py_ssize_t n_operators;
    ScheduleSignature *signatures;
    size_t room, n_signatures; /* a power of two */
} WatchSchedule;

static PyTypeObject *watch_schedule_type;

int sr_is_watch_schedule(PyObject *value) { return Py_IS_TYPE(value, watch_schedule_type); }

/* What is known of an operator; NULL with an exception. */
static ScheduleOperator *schedule_operator(WatchSchedule *self, PyObject *index) {
    Py_ssize_t number = PyLong_AsSsize_t(index);
    if (number < 0 || number > 1 << 20) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "WatchSchedule: no such operator");
        }
        return NULL;
    }
    if (number >= self->n_operators) {
        Py_ssize_t room = 2 * number + 64;
        ScheduleOperator *more = PyMem_Realloc(self->operators, (size_t)room * sizeof *more);
        if (more == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        memset(more + self->n_operators, 0, (size_t)(room - self->n_operators) * sizeof *more);
        self->operators = more;
        self->n_operators = room;
    }
    return self->operators + number;
}

static ScheduleSignature *schedule_place(ScheduleSignature *signatures, size_t room, uint64_t hash) {
    size_t i = hash & (room - 1);
    while (signatures[i].n_calls && signatures[i].hash != hash) {
        i = (i + 1) & (room - 1);
    }
    return signatures + i;
}

/* The place of a signature, perhaps a free one; NULL with an exception. */
static ScheduleSignature *schedule_signature(WatchSchedule *self, PyObject *index, PyObject *args, PyObject *kwargs) {
    SrKey key;
    uint64_t hash = 0;
    sr_key_begin(&key, 0);
    int failed = sr_key_put_call(&key, args, kwargs) || sr_key_put(&key, key.objects, (size_t)key.n_objects * sizeof *key.objects);
    long long number = PyLong_AsLongLong(index);
    failed = failed || sr_key_put(&key, &number, sizeof number);
    if (!failed) {
        hash = sr_key_hash(key.bytes, key.length);
    }
    sr_key_drop(&key);
    if (failed || PyErr_Occurred()) {
        return NULL;
    }
    /* At most half full, so that a search soon meets a free place. */
    if (2 * (self->n_signatures + 1) > self->room) {
        size_t room = self->room ? 2 * self->room : SCHEDULE_ROOM;
        ScheduleSignature *more = calloc(room, sizeof *more);
        if (more == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        for (size_t i = 0; i < self->room; i++) {
            if (self->signatures[i].n_calls) {
                *schedule_place(more, room, self->signatures[i].hash) = self->signatures[i];
            }
        }
        free(self->signatures);
        self->signatures = more;
        self->room = room;
    }
    ScheduleSignature *found = schedule_place(self->signatures, self->room, hash);
    found->hash = hash;
    return found;
}

static int schedule_is_power(uint64_t n, uint64_t base) {
    while (n > 1 && n % base == 0) {
        n /= base;
    }
    return n == 1;
}

/* Whether the call that comes next is due. It counts as made if `counts`, or if it is not due. -1 with an exception. */
static int schedule_next(WatchSchedule *self, PyObject *index, PyObject *args, PyObject *kwargs, int counts) {
    ScheduleOperator *operator = schedule_operator(self, index);
    ScheduleSignature *signature = operator == NULL ? NULL : schedule_signature(self, index, args, kwargs);
    if (signature == NULL && operator != NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear(); /* a nested tensor has no sizes */
        return 0;
    }
    if (signature == NULL) {
        return -1;
    }
    uint64_t n = signature->n_calls + 1, n_of_operator = operator->n_calls + 1;
    int wanted = (n <= self->first || schedule_is_power(n, self->rarer)) &&
                 operator->n_watched < self->free + n_of_operator / self->share;
    int due = wanted || operator->always;
    if (counts || !due) {
        self->n_signatures += signature->n_calls == 0;
        signature->n_calls = n;
        operator->n_calls = n_of_operator;
        operator->n_watched += (uint64_t)(wanted && !operator->always);
        /* All are forgotten, and watched from their first call on again: more work, and nothing is missed. */
        if (self->n_signatures > SCHEDULE_MAX_SIGNATURES) {
            memset(self->signatures, 0, self->room * sizeof *self->signatures);
            self->n_signatures = 0;
        }
    }
    return due;
}

int sr_is_next_watched(PyObject *schedule, PyObject *index, PyObject *args, PyObject *kwargs) {
    return schedule_next((WatchSchedule *)schedule, index, args, kwargs, 0);
}

static PyObject *schedule_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    unsigned long long first, rarer, free_calls, share;
    if ((kwargs != NULL && PyDict_GET_SIZE(kwargs)) || !PyArg_ParseTuple(args, "KKKK:WatchSchedule", &first, &rarer, &free_calls, &share)) {
        return PyErr_Occurred() ? NULL : sr_wrong_count("WatchSchedule");
    }
    if (rarer < 2 || share == 0) {
        PyErr_SetString(PyExc_ValueError, "WatchSchedule: a factor of at least 2, and a share");
        return NULL;
    }
    WatchSchedule *self = (WatchSchedule *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->first = first, self->rarer = rarer, self->free = free_calls, self->share = share;
    }
    return (PyObject *)self;
}

static void schedule_dealloc(WatchSchedule *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(self->operators);
    free(self->signatures);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *schedule_is_due(WatchSchedule *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 3 || !PyTuple_Check(args[1]) || !PyDict_Check(args[2])) {
        return sr_wrong_count("is_due");
    }
    int due = schedule_next(self, args[0], args[1], args[2], 1);
    return due < 0 ? NULL : PyBool_FromLong(due);
}

static PyObject *schedule_always(WatchSchedule *self, PyObject *index) {
    ScheduleOperator *operator = schedule_operator(self, index);
    if (operator == NULL) {
        return NULL;
    }
    operator->always = 1;
    Py_RETURN_NONE;
}

static PyObject *schedule_is_always(WatchSchedule *self, PyObject *index) {
    ScheduleOperator *operator = schedule_operator(self, index);
    return operator == NULL ? NULL : PyBool_FromLong(operator->always);
}

static PyMethodDef schedule_methods[] = {
    {"is_due", (PyCFunction)(void (*)(void))schedule_is_due, METH_FASTCALL, NULL},
    {"watch_always", (PyCFunction)schedule_always, METH_O, NULL},
    {"is_always", (PyCFunction)schedule_is_always, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot schedule_slots[] = {
    {Py_tp_new, schedule_new}, {Py_tp_dealloc, schedule_dealloc}, {Py_tp_methods, schedule_methods}, {0, NULL},
};

static PyType_Spec schedule_spec = {
    .name = "shadowrun.native._core.WatchSchedule",
    .basicsize = sizeof(WatchSchedule),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = schedule_slots,
};

int sr_add_watch_schedule_type(PyObject *module) { return sr_add_type(module, &schedule_spec, &watch_schedule_type); }

/* ---- rows of the tensors of a call ---------------------------------------------------------------------------------- */

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
    StorageRows *storage = known ? storage_known(self->storages, &place) : NULL;
    if (known && place.device != SR_TORCH_CPU && on_device->tensor == NULL) {
        on_device->tensor = tensor;
        on_device->type = place.device;
    }
    if (storage == NULL || sr_read_version(tensor, &version) || !storage_is_current(storage, version)) {
        return NULL;
    }
    PyObject *form = rows_form(self, tensor, &place), *key = form == NULL ? NULL : storage_place_key(&place, form);
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
    StorageRows *before = storage_known(self->storages, place);
    PyObject *rest = Py_NewRef(before == NULL ? Py_None : before->last);
    StorageRows *storage = PyErr_Occurred() ? NULL : storage_renewed(self->storages, value->tensor, place);
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
    PyObject *form = rows_form(self, value->tensor, &place), *key = form == NULL ? NULL : storage_place_key(&place, form);
    PyObject *row = key == NULL ? NULL : PyLong_FromLongLong(row_number);
    StorageRows *storage = NULL;
    int failed = row == NULL, kind = value->is_written ? KIND_WRITTEN : KIND_RESULT;
    if (!failed && operator->is_view) { /* of memory that is known: `rows_can_add` has looked */
        storage = storage_known(self->storages, &place);
        failed = storage == NULL || PyDict_SetItem(storage->rows, key, row);
        if (!failed) {
            storage->counts = (char)(storage->counts || operator->counts);
            failed = rows_put(self, KIND_VIEW, value->position, form, base, NULL);
        }
    } else if (!failed && value->is_written) {
        failed = rows_written(self, value, &place, key, row, &base);
    } else if (!failed) {
        storage = storage_renewed(self->storages, value->tensor, &place);
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
        return storage_known(self->storages, &place) != NULL;
    }
    /* A result in known memory is none of its own: Python looks at it. */
    if ((!is_written && storage_known(self->storages, &place) != NULL) || !sr_read_tensor_anywhere(tensor, &t)) {
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
