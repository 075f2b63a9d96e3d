/* Which calls of a recording have the memory of their arguments watched: recording/undeclared_writes.py is the specification.
 *
 * A signature is known by 64 bits of hash. Two that share them are watched as one, which no program will meet: there are
 * few thousand signatures.
 */

#include "contexts.h"
#include "tensor_rows.h"

#include <stdlib.h>
#include <string.h>

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

/* The type, and its methods in Python. */

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

int sr_add_watch_schedule_type(PyObject *module) {
    PyObject *type = PyType_FromSpec(&schedule_spec);
    watch_schedule_type = (PyTypeObject *)type; /* held by the module, which is never unloaded */
    return type == NULL || PyModule_AddObjectRef(module, "WatchSchedule", type) ? -1 : 0;
}
