/* The type of `Places`: what it is made of, and its methods in Python. */

#include "places.h"

#include <string.h>
#include <structmember.h>

static PyTypeObject *places_type;

#define FIELDS(apply)                                                                                                  \
    apply(threads) apply(kinds) apply(found) apply(mark) apply(phases) apply(node) apply(number) apply(place)

/* Where the slots of a thread's state lie; -1 with an exception. */
static int find_slots(Places *self) {
    static const char *names[N_SLOTS] = {"above",   "entered",    "last_number", "links",
                                         "modules", "recomputed", "recomputing"};
    PyObject *state = PyObject_GetAttrString(self->threads, "state");
    if (state == NULL) {
        return -1;
    }
    self->state_type = (PyTypeObject *)Py_NewRef(Py_TYPE(state));
    Py_DECREF(state);
    for (int i = 0; i < N_SLOTS; i++) {
        self->slots[i] = slot_in(self->state_type, names[i]);
        if (self->slots[i] < 0) {
            return -1;
        }
    }
    self->found_in_mark = slot_in((PyTypeObject *)self->mark, "found");
    return self->found_in_mark < 0 ? -1 : 0;
}

/* So many frames as an object says; -1 with an exception. */
static int n_frames(PyObject *depth) {
    long n = PyLong_AsLong(depth);
    return n == -1 && PyErr_Occurred() ? -1 : n < 0 ? 0 : (int)Py_MIN(n, 1 << 30);
}

/* place(depth): see Attribution.place. */
static PyObject *place_in_python(Places *self, PyObject *depth) {
    Place place;
    int n = n_frames(depth);
    if (n < 0 || find_place(self, n, &place) != 1) {
        return NULL;
    }
    PyObject *made = PyTuple_Pack(3, place.module, place.phase, place.site);
    drop_place(&place);
    return made;
}

/* note(depth): see Attribution.note. */
static PyObject *note_in_python(Places *self, PyObject *depth) {
    int n = n_frames(depth);
    if (n < 0 || note_place(self, n) != 1) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Takes what is needed of the arguments; -1 with an exception. */
static int take(Places *self, PyObject *given) {
#define TAKE(name)                                                                                                     \
    if ((self->name = Py_XNewRef(given == NULL ? NULL : PyDict_GetItemString(given, #name))) == NULL) {                \
        PyErr_SetString(PyExc_TypeError, "Places: " #name " is missing");                                              \
        return -1;                                                                                                     \
    }
    FIELDS(TAKE)
    PyObject *most = PyDict_GetItemString(given, "most_links");
    self->most_links = most == NULL ? -1 : PyLong_AsSsize_t(most);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (self->most_links < 0 || !PyDict_Check(self->kinds) || !PyDict_Check(self->found) ||
        !PyTuple_Check(self->phases) || PyTuple_GET_SIZE(self->phases) != 3 || !PyType_Check(self->mark)) {
        PyErr_SetString(PyExc_TypeError, "Places: an argument is of the wrong type");
        return -1;
    }
    void *next_number = address_in(given, "next_number"), *graph_task = address_in(given, "graph_task");
    if (PyErr_Occurred()) {
        return -1;
    }
    memcpy(&self->next_number, &next_number, sizeof next_number);
    memcpy(&self->graph_task, &graph_task, sizeof graph_task);
    return find_slots(self);
}

static PyObject *create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args)) {
        PyErr_SetString(PyExc_TypeError, "Places: arguments by name only");
        return NULL;
    }
    Places *self = (Places *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->module_call = Py_NewRef(Py_None);
        if (take(self, kwargs)) {
            Py_CLEAR(self);
        }
    }
    return (PyObject *)self;
}

static int traverse(Places *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
#define VISIT(name) Py_VISIT(self->name);
    FIELDS(VISIT)
    Py_VISIT(self->module_call);
    Py_VISIT(self->state);
    Py_VISIT(self->state_type);
    for (int i = 0; i < SITES_KEPT; i++) {
        Py_VISIT(self->sites[i].found);
    }
    return 0;
}

static int clear(Places *self) {
#define CLEAR(name) Py_CLEAR(self->name);
    FIELDS(CLEAR)
    Py_CLEAR(self->module_call);
    Py_CLEAR(self->state);
    for (int i = 0; i < SITES_KEPT; i++) {
        self->sites[i].code = NULL;
        Py_CLEAR(self->sites[i].found);
    }
    return 0;
}

static void dealloc(Places *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    Py_CLEAR(self->state_type);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"place", (PyCFunction)place_in_python, METH_O, NULL},
    {"note", (PyCFunction)note_in_python, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"module_call", T_OBJECT_EX, offsetof(Places, module_call), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, create},         {Py_tp_dealloc, dealloc}, {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_methods, methods},    {Py_tp_members, members}, {0, NULL},
};

static PyType_Spec spec = {
    .name = "shadowrun.native._core.Places",
    .basicsize = sizeof(Places),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

int is_places(PyObject *value) { return Py_IS_TYPE(value, places_type); }

int add_places(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    places_type = (PyTypeObject *)type; /* held by the module, which is never unloaded */
    return type == NULL || PyModule_AddObjectRef(module, "Places", type) ? -1 : 0;
}
