/* The type of the dispatch handler: its table of operators, and its methods in Python. */

#include "dispatch.h"

#include <structmember.h>

/* The slot of an operator, or the free one that it would get. */
static SrTableSlot *handler_table_slot(SrTableSlot *table, size_t room, const PyObject *func) {
    size_t i = ((uintptr_t)func >> 4) & (room - 1);
    while (table[i].func != NULL && table[i].func != func) {
        i = (i + 1) & (room - 1);
    }
    return &table[i];
}

SrOperator *sr_find_operator(const SrHandler *self, PyObject *func) {
    return self->table_room ? handler_table_slot(self->table, self->table_room, func)->operator : NULL;
}

/* Room for one more; -1 with an exception. */
static int handler_grow_table(SrHandler *self) {
    if (2 * (self->n_operators + 1) <= self->table_room) {
        return 0;
    }
    size_t room = self->table_room ? 2 * self->table_room : 256;
    SrTableSlot *table = PyMem_Calloc(room, sizeof *table);
    if (table == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < self->table_room; i++) {
        if (self->table[i].func != NULL) {
            *handler_table_slot(table, room, self->table[i].func) = self->table[i];
        }
    }
    PyMem_Free(self->table);
    self->table = table;
    self->table_room = room;
    return 0;
}

/* learn(operator, plan, run, index, key of skipped calls, route, positions of the arguments that it writes to) */
static PyObject *handler_learn(SrHandler *self, PyObject *args) {
    PyObject *func, *plan, *run, *index, *skipped, *written;
    int route;
    if (!PyArg_ParseTuple(args, "OOOO!O!iO!:learn", &func, &plan, &run, &PyLong_Type, &index, &PyTuple_Type, &skipped,
                          &route, &PyTuple_Type, &written)) {
        return NULL;
    }
    if (route < 0 || route >= SR_N_ROUTES || PyTuple_GET_SIZE(written) > SR_MAX_WRITTEN || 
        PyTuple_GET_SIZE(skipped) != 3) {
        PyErr_SetString(PyExc_ValueError, "learn: no such route");
        return NULL;
    }
    if (handler_grow_table(self)) {
        return NULL;
    }
    SrTableSlot *slot = handler_table_slot(self->table, self->table_room, func);
    if (slot->func != NULL) { /* an operator has one plan, which may be in use */
        Py_RETURN_NONE;
    }
    SrOperator *operator = PyMem_Calloc(1, sizeof *operator);
    if (operator == NULL) {
        return PyErr_NoMemory();
    }
    operator->route = route;
    operator->n_written = (int)PyTuple_GET_SIZE(written);
    for (int k = 0; k < operator->n_written; k++) {
        operator->written[k] = (int)PyLong_AsLong(PyTuple_GET_ITEM(written, k));
        if (PyErr_Occurred() || operator->written[k] < 0) {
            PyMem_Free(operator);
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_ValueError, "learn: no such position");
            }
            return NULL;
        }
    }
    operator->plan = Py_NewRef(plan);
    operator->run = Py_NewRef(run);
    operator->index = Py_NewRef(index);
    operator->skipped = Py_NewRef(skipped);
    *slot = (SrTableSlot){Py_NewRef(func), operator};
    self->n_operators++;
    Py_RETURN_NONE;
}

/* guard(acquire, release, locked): hold a lock for the length of a call, unless another thread waits for it. */
static PyObject *handler_guard(SrHandler *self, PyObject *args) {
    PyObject *acquire, *release, *waited_for;
    if (!PyArg_ParseTuple(args, "OOO:guard", &acquire, &release, &waited_for)) {
        return NULL;
    }
    Py_XSETREF(self->acquire, Py_NewRef(acquire));
    Py_XSETREF(self->release, Py_NewRef(release));
    Py_XSETREF(self->waited_for, Py_NewRef(waited_for));
    Py_RETURN_NONE;
}

/* collect(counter): add the numbers of calls that were not compared to a dict, and set them to 0. */
static PyObject *handler_collect(SrHandler *self, PyObject *counter) {
    if (!PyDict_Check(counter)) {
        PyErr_SetString(PyExc_TypeError, "collect: into a dict");
        return NULL;
    }
    for (size_t i = 0; i < self->table_room; i++) {
        SrOperator *operator = self->table[i].func == NULL ? NULL : self->table[i].operator;
        if (operator == NULL || operator->n_skipped == 0) {
            continue;
        }
        if (sr_add_count(counter, operator->skipped, operator->n_skipped)) {
            return NULL;
        }
        operator->n_skipped = 0;
    }
    Py_RETURN_NONE;
}

/* clocks(on): nanoseconds and number of calls of each part since the last call; switches the clocks. */
static PyObject *handler_clocks(SrHandler *self, PyObject *on) {
    PyObject *found = PyList_New(0);
    for (int part = 0; part < SR_N_PARTS && found != NULL; part++) {
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

/* collide(): give all contexts the same hash, for the tests of collisions. */
static PyObject *handler_collide(SrHandler *self, PyObject *none) {
    (void)none;
    sr_collide_context_cache(self->cache);
    Py_RETURN_NONE;
}

#define HANDLER_FIELDS(apply)                                                                                          \
    apply(n_modes_below) apply(function_mode_on) apply(profiler_on) apply(origins) apply(selection) apply(recorder)    \
        apply(contexts) apply(rows) apply(device) apply(matched) apply(seen_verdict) apply(watched) apply(buffers)     \
            apply(make_buffer) apply(replay) apply(shares_memory) apply(conclude) apply(failed) apply(unrecorded)      \
                apply(acquire) apply(release) apply(waited_for) apply(too_large)

static PyObject *handler_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args)) {
        PyErr_SetString(PyExc_TypeError, "Handler: arguments by name only");
        return NULL;
    }
    SrHandler *self = (SrHandler *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->cache = sr_new_context_cache();
#define HANDLER_TAKE(name)                                                                                             \
    if ((self->name = Py_XNewRef(kwargs == NULL ? NULL : PyDict_GetItemString(kwargs, #name))) == NULL) {              \
        PyErr_SetString(PyExc_TypeError, "Handler: " #name " is missing");                                             \
        Py_DECREF(self);                                                                                               \
        return NULL;                                                                                                   \
    }
    HANDLER_FIELDS(HANDLER_TAKE)
    self->everything = sr_slot_offset(Py_TYPE(self->selection), "everything");
    if (PyErr_Occurred()) {
        Py_DECREF(self);
        return NULL;
    }
    if (self->cache == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    if (!sr_is_origins(self->origins) || !PyDict_Check(self->contexts) || !sr_is_row_buffer(self->rows) ||
        !PyAnySet_Check(self->watched) || !PyDict_Check(self->buffers)) {
        PyErr_SetString(PyExc_TypeError, "Handler: an argument is of the wrong type");
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int handler_traverse(SrHandler *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
#define HANDLER_VISIT(name) Py_VISIT(self->name);
    HANDLER_FIELDS(HANDLER_VISIT)
    for (size_t i = 0; i < self->table_room; i++) {
        if (self->table[i].func != NULL) {
            Py_VISIT(self->table[i].func);
            Py_VISIT(self->table[i].operator->plan);
            Py_VISIT(self->table[i].operator->run);
        }
    }
    return sr_visit_context_cache(self->cache, visit, arg);
}

static int handler_clear(SrHandler *self) {
    self->state = SR_OFF;
#define HANDLER_CLEAR(name) Py_CLEAR(self->name);
    HANDLER_FIELDS(HANDLER_CLEAR)
    SrTableSlot *table = self->table;
    size_t room = self->table_room;
    self->table = NULL;
    self->table_room = self->n_operators = 0;
    for (size_t i = 0; i < room; i++) {
        if (table[i].func != NULL) {
            Py_DECREF(table[i].func);
            Py_DECREF(table[i].operator->plan);
            Py_DECREF(table[i].operator->run);
            Py_DECREF(table[i].operator->index);
            Py_DECREF(table[i].operator->skipped);
            PyMem_Free(table[i].operator);
        }
    }
    PyMem_Free(table);
    SrContextCache *cache = self->cache;
    self->cache = NULL;
    sr_drop_context_cache(cache);
    return 0;
}

static void handler_dealloc(SrHandler *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    handler_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *handler_bind(PyObject *self, PyObject *mode) { return sr_bind_method(self, mode); }

static PyMethodDef handler_methods[] = {
    {"bind", handler_bind, METH_O, NULL},
    {"learn", (PyCFunction)handler_learn, METH_VARARGS, NULL},
    {"guard", (PyCFunction)handler_guard, METH_VARARGS, NULL},
    {"collect", (PyCFunction)handler_collect, METH_O, NULL},
    {"clocks", (PyCFunction)handler_clocks, METH_O, NULL},
    {"collide", (PyCFunction)handler_collide, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef handler_members[] = {
    {"state", T_INT, offsetof(SrHandler, state), 0, NULL},
    {"on_target", T_INT, offsetof(SrHandler, on_target), 0, NULL},
    {"slow_ratio", T_DOUBLE, offsetof(SrHandler, slow_ratio), 0, NULL},
    {"max_bytes", T_DOUBLE, offsetof(SrHandler, max_bytes), 0, NULL},
    {"own_ns", T_LONGLONG, offsetof(SrHandler, own_ns), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot handler_slots[] = {
    {Py_tp_new, handler_new},         {Py_tp_dealloc, handler_dealloc}, {Py_tp_traverse, handler_traverse},
    {Py_tp_clear, handler_clear},     {Py_tp_methods, handler_methods}, {Py_tp_members, handler_members},
    {0, NULL},
};

static PyType_Spec handler_spec = {
    .name = "shadowrun.native._core.Handler",
    .basicsize = sizeof(SrHandler),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = handler_slots,
};

int sr_add_handler_type(PyObject *module) {
    PyObject *type = PyType_FromSpec(&handler_spec);
    int failed = type == NULL || PyModule_AddObjectRef(module, "Handler", type);
#define HANDLER_ADD(name) failed = failed || PyModule_AddIntConstant(module, #name, SR_##name);
    HANDLER_ADD(OFF) HANDLER_ADD(COMPARING) HANDLER_ADD(RECORDING) HANDLER_ADD(FRESH) HANDLER_ADD(IN_PLACE)
    HANDLER_ADD(SEVERAL) HANDLER_ADD(SILENT) HANDLER_ADD(PASSING) HANDLER_ADD(LONG) HANDLER_ADD(MAX_WRITTEN)
    Py_XDECREF(type);
    return failed ? -1 : 0;
}
