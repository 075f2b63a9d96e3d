/* What a recording knows of memory: which rows have the values of a storage, and which calls have the memory of their
 * arguments watched for writes that no schema declares.
 *
 * `_StorageRows` of recording/data_flow.py and recording/undeclared_writes.py are the specification.
 */

#include "contexts.h"
#include "record.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

/* ---- rows of a storage ----------------------------------------------------------------------------------------------- */

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

SrStorageRows *sr_new_storage_rows(PyObject *tensor, long long version) {
    SrStorageRows *self = PyObject_New(SrStorageRows, storage_rows_type);
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

int sr_renew_storage_rows(SrStorageRows *self, long long version) {
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

int sr_is_current(SrStorageRows *self, long long version) {
    if (self->counts && version == self->version + 1) {
        self->version = version;
        self->counts = 0;
    }
    return version == self->version;
}

int sr_is_storage_rows(PyObject *value) { return Py_IS_TYPE(value, storage_rows_type); }

/* The key of a tensor's place in its storage, as `_place` of recording/data_flow.py: owned; NULL with an exception. */
PyObject *sr_place_key(const SrPlace *place, PyObject *form) {
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
SrStorageRows *sr_known_storage(PyObject *storages, const SrPlace *place) {
    PyObject *key = PyLong_FromVoidPtr(place->storage);
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(storages, key);
    Py_XDECREF(key);
    return found != NULL && sr_is_storage_rows(found) ? (SrStorageRows *)found : NULL;
}

/* The same afresh, for a tensor that a call made or wrote to: borrowed; NULL with an exception. */
SrStorageRows *sr_renewed_storage(PyObject *storages, PyObject *tensor, const SrPlace *place) {
    long long version;
    SrStorageRows *known = sr_known_storage(storages, place);
    if (PyErr_Occurred() || sr_read_version(tensor, &version)) {
        return NULL;
    }
    if (known != NULL) {
        return sr_renew_storage_rows(known, version) ? NULL : known;
    }
    PyObject *key = PyLong_FromVoidPtr(place->storage);
    SrStorageRows *made = key == NULL ? NULL : sr_new_storage_rows(tensor, version);
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
    return (PyObject *)sr_new_storage_rows(tensor, version);
}

static void storage_rows_dealloc(SrStorageRows *self) {
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

static PyObject *storage_rows_renew(SrStorageRows *self, PyObject *given) {
    long long version = PyLong_AsLongLong(given);
    if ((version == -1 && PyErr_Occurred()) || sr_renew_storage_rows(self, version)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef storage_rows_methods[] = {
    {"renew", (PyCFunction)storage_rows_renew, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef storage_rows_members[] = {
    {"version", T_LONGLONG, offsetof(SrStorageRows, version), 0, NULL},
    {"counts", T_BOOL, offsetof(SrStorageRows, counts), 0, NULL},
    {"last", T_OBJECT_EX, offsetof(SrStorageRows, last), 0, NULL},
    {"rows", T_OBJECT_EX, offsetof(SrStorageRows, rows), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot storage_rows_slots[] = {
    {Py_tp_new, storage_rows_new},         {Py_tp_dealloc, storage_rows_dealloc},
    {Py_tp_methods, storage_rows_methods}, {Py_tp_members, storage_rows_members},
    {0, NULL},
};

static PyType_Spec storage_rows_spec = {
    .name = "shadowrun.native._core.StorageRows",
    .basicsize = sizeof(SrStorageRows),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = storage_rows_slots,
};

/* Whether a storage was freed: 1, 0, or -1 with an exception. One that is alive is left out of the next looks: to ask torch
 * takes longer than all else here. */
static int storage_rows_look(SrStorageRows *self) {
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
        if (!sr_is_storage_rows(value)) {
            continue;
        }
        int is_freed = storage_rows_look((SrStorageRows *)value);
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
