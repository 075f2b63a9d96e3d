/* The type of the handler: what it is made of, and what Python tells it. */

#include "handler.h"

#include <string.h>
#include <structmember.h>

/* Where an operator is, or would be. */
static Learnt *slot_of(Learnt *learnt, size_t room, const PyObject *func) {
    size_t i = ((uintptr_t)func >> 4) & (room - 1);
    while (learnt[i].func != NULL && learnt[i].func != func) {
        i = (i + 1) & (room - 1);
    }
    return &learnt[i];
}

Entry *find_entry(const Handler *self, PyObject *func) {
    return self->learnt_room ? slot_of(self->learnt, self->learnt_room, func)->entry : NULL;
}

/* Room for one more; -1 with an exception. */
static int make_room(Handler *self) {
    if (2 * (self->n_learnt + 1) <= self->learnt_room) {
        return 0;
    }
    size_t room = self->learnt_room ? 2 * self->learnt_room : 256;
    Learnt *learnt = PyMem_Calloc(room, sizeof *learnt);
    if (learnt == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < self->learnt_room; i++) {
        if (self->learnt[i].func != NULL) {
            *slot_of(learnt, room, self->learnt[i].func) = self->learnt[i];
        }
    }
    PyMem_Free(self->learnt);
    self->learnt = learnt;
    self->learnt_room = room;
    return 0;
}

/* learn(operator, plan, run, index, key of skipped calls, way, positions of what it writes to) */
static PyObject *learn(Handler *self, PyObject *args) {
    PyObject *func, *plan, *run, *index, *skipped, *written;
    int way;
    if (!PyArg_ParseTuple(args, "OOOO!O!iO!:learn", &func, &plan, &run, &PyLong_Type, &index, &PyTuple_Type, &skipped,
                          &way, &PyTuple_Type, &written)) {
        return NULL;
    }
    if (way < 0 || way >= N_WAYS || PyTuple_GET_SIZE(written) > MOST_WRITTEN || PyTuple_GET_SIZE(skipped) != 3) {
        PyErr_SetString(PyExc_ValueError, "learn: no such way");
        return NULL;
    }
    if (make_room(self)) {
        return NULL;
    }
    Learnt *slot = slot_of(self->learnt, self->learnt_room, func);
    if (slot->func != NULL) { /* it may be in use; an operator has one plan */
        Py_RETURN_NONE;
    }
    Entry *entry = PyMem_Calloc(1, sizeof *entry);
    if (entry == NULL) {
        return PyErr_NoMemory();
    }
    entry->way = way;
    entry->n_written = (int)PyTuple_GET_SIZE(written);
    for (int k = 0; k < entry->n_written; k++) {
        entry->written[k] = (int)PyLong_AsLong(PyTuple_GET_ITEM(written, k));
        if (PyErr_Occurred() || entry->written[k] < 0) {
            PyMem_Free(entry);
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_ValueError, "learn: no such position");
            }
            return NULL;
        }
    }
    entry->plan = Py_NewRef(plan);
    entry->run = Py_NewRef(run);
    entry->index = Py_NewRef(index);
    entry->skipped = Py_NewRef(skipped);
    *slot = (Learnt){Py_NewRef(func), entry};
    self->n_learnt++;
    Py_RETURN_NONE;
}

/* guard(acquire, release, locked): hold a lock for the length of a call, unless somebody waits for it. */
static PyObject *guard(Handler *self, PyObject *args) {
    PyObject *acquire, *release, *waited_for;
    if (!PyArg_ParseTuple(args, "OOO:guard", &acquire, &release, &waited_for)) {
        return NULL;
    }
    Py_XSETREF(self->acquire, Py_NewRef(acquire));
    Py_XSETREF(self->release, Py_NewRef(release));
    Py_XSETREF(self->waited_for, Py_NewRef(waited_for));
    Py_RETURN_NONE;
}

/* collect(counter): add the numbers of calls that were not compared to a dict, and begin anew. */
static PyObject *collect(Handler *self, PyObject *counter) {
    if (!PyDict_Check(counter)) {
        PyErr_SetString(PyExc_TypeError, "collect: into a dict");
        return NULL;
    }
    for (size_t i = 0; i < self->learnt_room; i++) {
        Entry *entry = self->learnt[i].func == NULL ? NULL : self->learnt[i].entry;
        if (entry == NULL || entry->n_skipped == 0) {
            continue;
        }
        if (add_count(counter, entry->skipped, entry->n_skipped)) {
            return NULL;
        }
        entry->n_skipped = 0;
    }
    Py_RETURN_NONE;
}

/* clocks(on): nanoseconds and numbers of each part since they were switched on; switches them. */
static PyObject *clocks(Handler *self, PyObject *on) {
    PyObject *found = PyList_New(0);
    for (int part = 0; part < N_PARTS && found != NULL; part++) {
        PyObject *pair = Py_BuildValue("(Ln)", self->parts_ns[part], self->parts_n[part]);
        if (pair == NULL || PyList_Append(found, pair)) {
            Py_CLEAR(found);
        }
        Py_XDECREF(pair);
        self->parts_ns[part] = 0;
        self->parts_n[part] = 0;
    }
    self->clocked = PyObject_IsTrue(on) == 1;
    return found;
}

#define FIELDS(apply)                                                                                                  \
    apply(n_modes_below) apply(asks_functions) apply(places) apply(selection) apply(recorder) apply(contexts) apply(rows) apply(device)      \
        apply(matched) apply(seen_verdict) apply(suspects) apply(spares) apply(make_spare) apply(again)                \
            apply(shares_memory) apply(ended) apply(failed) apply(unrecorded) apply(acquire) apply(release)            \
                apply(waited_for) apply(too_large)

static PyObject *create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args)) {
        PyErr_SetString(PyExc_TypeError, "Handler: arguments by name only");
        return NULL;
    }
    Handler *self = (Handler *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->seen = new_seen();
#define TAKE(name)                                                                                                     \
    if ((self->name = Py_XNewRef(kwargs == NULL ? NULL : PyDict_GetItemString(kwargs, #name))) == NULL) {              \
        PyErr_SetString(PyExc_TypeError, "Handler: " #name " is missing");                                            \
        Py_DECREF(self);                                                                                               \
        return NULL;                                                                                                   \
    }
    FIELDS(TAKE)
    void *n_modes = address_in(kwargs, "n_modes"), *asks = address_in(kwargs, "asks");
    self->everything = slot_in(Py_TYPE(self->selection), "everything");
    if (PyErr_Occurred()) {
        Py_DECREF(self);
        return NULL;
    }
    memcpy(&self->n_modes, &n_modes, sizeof n_modes);
    memcpy(&self->asks, &asks, sizeof asks);
    if (self->seen == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    if (!is_places(self->places) || !PyDict_Check(self->contexts) || !is_rows(self->rows) ||
        !PyAnySet_Check(self->suspects) || !PyDict_Check(self->spares)) {
        PyErr_SetString(PyExc_TypeError, "Handler: an argument is of the wrong type");
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int traverse(Handler *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
#define VISIT(name) Py_VISIT(self->name);
    FIELDS(VISIT)
    for (size_t i = 0; i < self->learnt_room; i++) {
        if (self->learnt[i].func != NULL) {
            Py_VISIT(self->learnt[i].func);
            Py_VISIT(self->learnt[i].entry->plan);
            Py_VISIT(self->learnt[i].entry->run);
        }
    }
    return visit_seen(self->seen, visit, arg);
}

static int clear(Handler *self) {
    self->way = OFF;
#define CLEAR(name) Py_CLEAR(self->name);
    FIELDS(CLEAR)
    Learnt *learnt = self->learnt;
    size_t room = self->learnt_room;
    self->learnt = NULL;
    self->learnt_room = self->n_learnt = 0;
    for (size_t i = 0; i < room; i++) {
        if (learnt[i].func != NULL) {
            Py_DECREF(learnt[i].func);
            Py_DECREF(learnt[i].entry->plan);
            Py_DECREF(learnt[i].entry->run);
            Py_DECREF(learnt[i].entry->index);
            Py_DECREF(learnt[i].entry->skipped);
            PyMem_Free(learnt[i].entry);
        }
    }
    PyMem_Free(learnt);
    Seen *seen = self->seen;
    self->seen = NULL;
    drop_seen(seen);
    return 0;
}

static void dealloc(Handler *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"bind", (PyCFunction)bind, METH_O, NULL},
    {"learn", (PyCFunction)learn, METH_VARARGS, NULL},
    {"guard", (PyCFunction)guard, METH_VARARGS, NULL},
    {"collect", (PyCFunction)collect, METH_O, NULL},
    {"clocks", (PyCFunction)clocks, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"way", T_INT, offsetof(Handler, way), 0, NULL},
    {"on_target", T_INT, offsetof(Handler, on_target), 0, NULL},
    {"slow_ratio", T_DOUBLE, offsetof(Handler, slow_ratio), 0, NULL},
    {"max_bytes", T_DOUBLE, offsetof(Handler, max_bytes), 0, NULL},
    {"own_ns", T_LONGLONG, offsetof(Handler, own_ns), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, create},      {Py_tp_dealloc, dealloc}, {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_methods, methods}, {Py_tp_members, members}, {0, NULL},
};

static PyType_Spec spec = {
    .name = "shadowrun.native._core.Handler",
    .basicsize = sizeof(Handler),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

int add_handler(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    int failed = type == NULL || PyModule_AddObjectRef(module, "Handler", type);
#define ADD(name) failed = failed || PyModule_AddIntConstant(module, #name, name);
    ADD(OFF) ADD(COMPARING) ADD(RECORDING) ADD(FRESH) ADD(IN_PLACE) ADD(SEVERAL) ADD(SILENT) ADD(PASSING) ADD(LONG)
    ADD(MOST_WRITTEN)
    Py_XDECREF(type);
    return failed ? -1 : 0;
}
