/* The type of the handler: what it is made of, and what Python tells it. */

#include "handler.h"

#include <structmember.h>

PyTypeObject *handler_type;

static PyMethodDef dispatch_definition = {"__torch_dispatch__", (PyCFunction)(void (*)(void))dispatch_call,
                                          METH_FASTCALL | METH_KEYWORDS, NULL};

/* bind(mode): a method of the mode's that goes by this handler, which the mode must have as its attribute `quick`. */
static PyObject *bind(Handler *self, PyObject *mode) {
    (void)self;
    return PyCFunction_NewEx(&dispatch_definition, mode, NULL);
}

static void drop_entry(Entry *entry) {
    Py_XDECREF(entry->plan);
    Py_XDECREF(entry->run);
    Py_XDECREF(entry->index);
    Py_XDECREF(entry->skipped);
    PyMem_Free(entry);
}

static void free_entry(PyObject *capsule) { drop_entry(PyCapsule_GetPointer(capsule, "entry")); }

/* learn(id of the operator, plan, run, index, key of skipped calls, silent, fresh, in place) */
static PyObject *learn(Handler *self, PyObject *args) {
    PyObject *id, *plan, *run, *index, *skipped;
    int silent, fresh, in_place;
    if (!PyArg_ParseTuple(args, "O!OOO!O!ppp:learn", &PyLong_Type, &id, &plan, &run, &PyLong_Type, &index,
                          &PyTuple_Type, &skipped, &silent, &fresh, &in_place)) {
        return NULL;
    }
    Entry *entry = PyMem_Malloc(sizeof *entry);
    if (entry == NULL) {
        return PyErr_NoMemory();
    }
    *entry = (Entry){Py_NewRef(plan), Py_NewRef(run), Py_NewRef(index), Py_NewRef(skipped), silent, fresh, in_place};
    PyObject *capsule = PyCapsule_New(entry, "entry", free_entry);
    if (capsule == NULL) {
        drop_entry(entry);
        return NULL;
    }
    int failed = PyDict_SetItem(self->entries, id, capsule);
    Py_DECREF(capsule);
    if (failed) {
        return NULL;
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
    apply(n_modes_below) apply(places) apply(selection) apply(recorder) apply(contexts)                   \
        apply(rows) apply(device) apply(matched) apply(suspects) apply(spares) apply(again) apply(shares_memory)      \
            apply(ended) apply(ended_in_place) apply(failed) apply(unrecorded) apply(lock) apply(gate)

static PyObject *create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args)) {
        PyErr_SetString(PyExc_TypeError, "Handler: arguments by name only");
        return NULL;
    }
    Handler *self = (Handler *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->entries = PyDict_New();
#define TAKE(name)                                                                                                     \
    if ((self->name = Py_XNewRef(kwargs == NULL ? NULL : PyDict_GetItemString(kwargs, #name))) == NULL) {              \
        PyErr_SetString(PyExc_TypeError, "Handler: " #name " is missing");                                            \
        Py_DECREF(self);                                                                                               \
        return NULL;                                                                                                   \
    }
    FIELDS(TAKE)
    if (self->entries == NULL || !is_places(self->places) || !PyDict_Check(self->contexts) ||
        !is_rows(self->rows) || !PyAnySet_Check(self->suspects) || !PyDict_Check(self->spares)) {
        PyErr_SetString(PyExc_TypeError, "Handler: an argument is of the wrong type");
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int traverse(Handler *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->entries);
#define VISIT(name) Py_VISIT(self->name);
    FIELDS(VISIT)
    return 0;
}

static int clear(Handler *self) {
    self->way = OFF;
    Py_CLEAR(self->entries);
#define CLEAR(name) Py_CLEAR(self->name);
    FIELDS(CLEAR)
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
    {"clocks", (PyCFunction)clocks, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"way", T_INT, offsetof(Handler, way), 0, NULL},
    {"on_target", T_INT, offsetof(Handler, on_target), 0, NULL},
    {"worth_timing_ns", T_LONGLONG, offsetof(Handler, worth_timing_ns), 0, NULL},
    {"own_ns", T_LONGLONG, offsetof(Handler, own_ns), 0, NULL},
    {"lock", T_OBJECT_EX, offsetof(Handler, lock), 0, NULL},
    {"gate", T_OBJECT_EX, offsetof(Handler, gate), 0, NULL},
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
    handler_type = (PyTypeObject *)type; /* held by the module, which is never unloaded */
    int failed = type == NULL || PyModule_AddObjectRef(module, "Handler", type) ||
                 PyModule_AddIntConstant(module, "OFF", OFF) || PyModule_AddIntConstant(module, "COMPARING", COMPARING) ||
                 PyModule_AddIntConstant(module, "RECORDING", RECORDING);
    return failed ? -1 : 0;
}
