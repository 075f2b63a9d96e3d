/* Where a call comes from: the quick half of intercept/attribution.py and intercept/sites.py.
 *
 * `Places` answers where all that it needs is known already, which is nearly always; else, and where anything fails, it
 * asks the Python code, which finds it and remembers it for the next time. It changes nothing before it knows that it
 * can answer.
 */

#include "core.h"

#include <structmember.h>

enum { LIBRARY, USER, OPTIMIZER_CODE };

struct Places {
    PyObject_HEAD
    PyObject *threads;     /* its attribute `state` is that of the thread */
    PyObject *kinds;       /* dict: file name to kind of code */
    PyObject *found;       /* dict: (id of code, offset) to (site, in optimizer, code) */
    PyObject *mark;        /* type of what lies in the frame of an optimizer */
    PyObject *phases;      /* tuple: forward, backward, optimizer */
    PyObject *node;        /* callable: autograd's node that is executed */
    PyObject *number;      /* callable: the number that the next node gets */
    PyObject *get_frame;   /* callable: sys._getframe */
    PyObject *place;       /* callable: the slow way */
    PyObject *module_call; /* code that modules are called through, or None */
    Py_ssize_t most_links;
};

static PyTypeObject *places_type;

/* What is found from a frame on: a new reference; NULL, perhaps with an exception, where it is not known. */
static PyObject *find(Places *self, PyFrameObject *frame, PyObject *above) {
    NAME(trace, "f_trace") { return NULL; }
    NAME(found_name, "found") { return NULL; }
    PyObject *found = NULL;
    Py_ssize_t level = PyList_GET_SIZE(above) - 1;
    Py_INCREF(frame);
    while (frame != NULL) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        PyObject *kind = PyDict_GetItemWithError(self->kinds, code->co_filename);
        long k = kind == NULL ? -1 : PyLong_AsLong(kind);
        int last = 1;
        if (k == LIBRARY) {
            if ((PyObject *)code == self->module_call && level >= 0) {
                PyObject *known = PyList_GET_ITEM(above, level);
                found = known == Py_None ? NULL : Py_NewRef(known);
            } else {
                last = 0;
            }
        } else if (k == USER) {
            PyObject *id = PyLong_FromVoidPtr(code), *offset = PyLong_FromLong(PyFrame_GetLasti(frame));
            PyObject *key = id == NULL || offset == NULL ? NULL : PyTuple_Pack(2, id, offset);
            Py_XDECREF(id);
            Py_XDECREF(offset);
            found = key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(self->found, key));
            Py_XDECREF(key);
        } else if (k == OPTIMIZER_CODE) {
            PyObject *mark = PyObject_GetAttr((PyObject *)frame, trace);
            if (mark != NULL && (PyObject *)Py_TYPE(mark) == self->mark) {
                found = PyObject_GetAttr(mark, found_name);
            }
            Py_XDECREF(mark);
        }
        Py_DECREF(code);
        PyFrameObject *back = last ? NULL : PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    if (found != NULL && !(PyTuple_Check(found) && PyTuple_GET_SIZE(found) == 3)) {
        Py_CLEAR(found);
    }
    return found;
}

static PyObject *new_place(PyObject *module, PyObject *phase, PyObject *site) { return PyTuple_Pack(3, module, phase, site); }

static int is_empty(PyObject *state, PyObject *name) {
    PyObject *value = PyObject_GetAttr(state, name);
    int empty = value == NULL ? 0 : PyObject_Not(value) == 1;
    Py_XDECREF(value);
    return empty;
}

/* Whether autograd has made no node since `last_number` was set; -1 with an exception. Its next number in `number`. */
static int is_latest(Places *self, PyObject *state, PyObject **number) {
    NAME(last_number, "last_number") { return -1; }
    PyObject *last = PyObject_GetAttr(state, last_number);
    *number = last == NULL ? NULL : PyObject_CallNoArgs(self->number);
    int same = *number == NULL ? -1 : PyObject_RichCompareBool(*number, last, Py_EQ);
    Py_XDECREF(last);
    return same;
}

/* The forward calls of a thread by the numbers of their nodes: a new reference; NULL, perhaps with an exception. */
static PyObject *links_of(PyObject *state) {
    NAME(links_name, "links") { return NULL; }
    PyObject *links = PyObject_GetAttr(state, links_name);
    if (links != NULL && !PyDict_Check(links)) {
        Py_CLEAR(links);
    }
    return links;
}

/* Of a call in a backward pass; NULL where the slow way must be gone. */
static PyObject *backward(Places *self, PyObject *state, PyObject *node) {
    NAME(recomputing, "recomputing") { return NULL; }
    NAME(recomputed, "recomputed") { return NULL; }
    NAME(entered, "entered") { return NULL; }
    NAME(sequence_nr, "_sequence_nr") { return NULL; }
    PyObject *followed = PyObject_GetAttr(state, entered), *place = NULL, *counter = NULL;
    Py_XDECREF(followed);
    if (followed != Py_True || !is_empty(state, recomputing) || !is_empty(state, recomputed)) {
        return NULL;
    }
    PyObject *number = PyObject_CallMethodNoArgs(node, sequence_nr);
    PyObject *links = number == NULL ? NULL : links_of(state);
    if (links != NULL && is_latest(self, state, &counter) == 1) {
        PyObject *link = Py_XNewRef(PyDict_GetItemWithError(links, number));
        if (link != NULL && PyTuple_Check(link) && PyTuple_GET_SIZE(link) == 2) {
            place = new_place(PyTuple_GET_ITEM(link, 0), PyTuple_GET_ITEM(self->phases, 1), PyTuple_GET_ITEM(link, 1));
        }
        Py_XDECREF(link);
    }
    Py_XDECREF(counter);
    Py_XDECREF(number);
    Py_XDECREF(links);
    return place;
}

/* Remember the module and line of a forward call, for its backward; -1 where the slow way must be gone. */
static int link_forward(Places *self, PyObject *state, PyObject *module, PyObject *site) {
    NAME(last_number, "last_number") { return -1; }
    PyObject *number = NULL;
    int same = is_latest(self, state, &number), failed = same == 1 ? 0 : -1;
    PyObject *links = same == 0 ? links_of(state) : NULL;
    if (links != NULL && PyDict_GET_SIZE(links) < self->most_links) {
        /* The node of this very call already exists: its number is the one before the next. */
        PyObject *mine = PyLong_FromLongLong(PyLong_AsLongLong(number) - 1);
        PyObject *link = mine == NULL ? NULL : PyTuple_Pack(2, module, site);
        if (link != NULL && PyObject_SetAttr(state, last_number, number) == 0) {
            failed = PyDict_SetItem(links, mine, link);
        }
        Py_XDECREF(link);
        Py_XDECREF(mine);
    }
    Py_XDECREF(links);
    Py_XDECREF(number);
    return failed;
}

/* Of a call in a forward pass or in an optimizer; NULL where the slow way must be gone. */
static PyObject *forward(Places *self, PyObject *state, PyObject *depth) {
    NAME(modules_name, "modules") { return NULL; }
    NAME(above_name, "above") { return NULL; }
    static PyObject *nothing;
    if (nothing == NULL && (nothing = PyUnicode_InternFromString("")) == NULL) {
        return NULL;
    }
    PyObject *modules = PyObject_GetAttr(state, modules_name), *found = NULL, *module = NULL, *place = NULL;
    PyObject *above = modules == NULL ? NULL : PyObject_GetAttr(state, above_name);
    PyObject *frame = above == NULL ? NULL : PyObject_CallOneArg(self->get_frame, depth);
    if (frame != NULL && PyFrame_Check(frame) && PyList_Check(modules) && PyList_Check(above)) {
        Py_ssize_t n = PyList_GET_SIZE(modules);
        module = Py_NewRef(n ? PyList_GET_ITEM(modules, n - 1) : nothing);
        found = find(self, (PyFrameObject *)frame, above);
    }
    if (found != NULL) {
        PyObject *site = PyTuple_GET_ITEM(found, 0);
        if (PyTuple_GET_ITEM(found, 1) == Py_True) {
            place = new_place(module, PyTuple_GET_ITEM(self->phases, 2), site);
        } else if (link_forward(self, state, module, site) == 0) {
            place = new_place(module, PyTuple_GET_ITEM(self->phases, 0), site);
        }
    }
    Py_XDECREF(frame);
    Py_XDECREF(module);
    Py_XDECREF(found);
    Py_XDECREF(modules);
    Py_XDECREF(above);
    return place;
}

static PyObject *quickly(Places *self, PyObject *depth) {
    NAME(state_name, "state") { return NULL; }
    PyObject *state = PyObject_GetAttr(self->threads, state_name), *place = NULL;
    PyObject *node = state == NULL ? NULL : PyObject_CallNoArgs(self->node);
    if (node != NULL) {
        place = node == Py_None ? forward(self, state, depth) : backward(self, state, node);
    }
    Py_XDECREF(node);
    Py_XDECREF(state);
    return place;
}

/* place(depth): see Attribution.place. */
PyObject *place_of(Places *self, PyObject *depth) {
    if (self->place == NULL) { /* the garbage collector has been here */
        PyErr_SetString(PyExc_RuntimeError, "Places: cleared");
        return NULL;
    }
    PyObject *place = quickly(self, depth);
    if (place == NULL && !interrupted()) {
        place = PyObject_CallOneArg(self->place, depth);
    }
    return place;
}

/* note(depth): see Attribution.note. */
PyObject *note_place(Places *self, PyObject *depth) {
    NAME(state_name, "state") { return NULL; }
    if (self->place == NULL) {
        return place_of(self, depth);
    }
    PyObject *state = PyObject_GetAttr(self->threads, state_name), *number = NULL;
    int same = state == NULL ? -1 : is_latest(self, state, &number);
    Py_XDECREF(state);
    Py_XDECREF(number);
    if (same == 1) {
        Py_RETURN_NONE;
    }
    if (interrupted()) {
        return NULL;
    }
    PyObject *place = place_of(self, depth);
    if (place == NULL) {
        return NULL;
    }
    Py_DECREF(place);
    Py_RETURN_NONE;
}

static PyObject *create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"threads", "kinds", "found", "mark", "phases", "node",
                            "number",  "get_frame", "place", "most_links", NULL};
    Places *self = (Places *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->module_call = Py_NewRef(Py_None);
    PyObject **fields[] = {&self->threads, &self->kinds,  &self->found,     &self->mark, &self->phases,
                           &self->node,    &self->number, &self->get_frame, &self->place};
    int parsed = PyArg_ParseTupleAndKeywords(
        args, kwargs, "OO!O!OO!OOOOn:Places", names, &self->threads, &PyDict_Type, &self->kinds, &PyDict_Type,
        &self->found, &self->mark, &PyTuple_Type, &self->phases, &self->node, &self->number, &self->get_frame,
        &self->place, &self->most_links);
    if (parsed && PyTuple_GET_SIZE(self->phases) != 3) {
        PyErr_SetString(PyExc_ValueError, "Places: three phases");
        parsed = 0;
    }
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (parsed) {
            Py_INCREF(*fields[i]);
        } else {
            *fields[i] = NULL; /* what was parsed until then is the caller's */
        }
    }
    if (!parsed) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int traverse(Places *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->threads);
    Py_VISIT(self->kinds);
    Py_VISIT(self->found);
    Py_VISIT(self->mark);
    Py_VISIT(self->phases);
    Py_VISIT(self->node);
    Py_VISIT(self->number);
    Py_VISIT(self->get_frame);
    Py_VISIT(self->place);
    Py_VISIT(self->module_call);
    return 0;
}

static int clear(Places *self) {
    Py_CLEAR(self->threads);
    Py_CLEAR(self->kinds);
    Py_CLEAR(self->found);
    Py_CLEAR(self->mark);
    Py_CLEAR(self->phases);
    Py_CLEAR(self->node);
    Py_CLEAR(self->number);
    Py_CLEAR(self->get_frame);
    Py_CLEAR(self->place);
    Py_CLEAR(self->module_call);
    return 0;
}

static void dealloc(Places *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"place", (PyCFunction)place_of, METH_O, NULL},
    {"note", (PyCFunction)note_place, METH_O, NULL},
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
