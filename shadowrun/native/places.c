/* Where a call comes from: the quick half of intercept/attribution.py and intercept/sites.py.
 *
 * `Places` answers where all that it needs is known already, which is nearly always; else, and where anything fails, it
 * asks the Python code, which finds it and remembers it for the next time. It changes nothing before it knows that it
 * can answer.
 */

#include "places.h"

enum { LIBRARY, USER, OPTIMIZER_CODE };

/* The site of a line: a borrowed reference; NULL, perhaps with an exception, where it is not known. */
static PyObject *site_of(Places *self, PyCodeObject *code, int offset) {
    uintptr_t spread = ((uintptr_t)code >> 4) ^ ((uintptr_t)offset * 37);
    KnownSite *kept = &self->sites[spread & (SITES_KEPT - 1)];
    if (kept->code == (PyObject *)code && kept->offset == offset) {
        return kept->found;
    }
    PyObject *id = PyLong_FromVoidPtr(code), *number = PyLong_FromLong(offset);
    PyObject *key = id == NULL || number == NULL ? NULL : PyTuple_Pack(2, id, number);
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(self->found, key);
    Py_XDECREF(id);
    Py_XDECREF(number);
    Py_XDECREF(key);
    if (found == NULL || !PyTuple_CheckExact(found) || PyTuple_GET_SIZE(found) != 3 ||
        PyTuple_GET_ITEM(found, 2) != (PyObject *)code) { /* it has to keep the code alive */
        return NULL;
    }
    kept->code = (PyObject *)code;
    kept->offset = offset;
    Py_XSETREF(kept->found, Py_NewRef(found));
    return found;
}

/* The mark in an optimizer's frame: what was found from it on; a new reference, or NULL, perhaps with an exception. */
static PyObject *marked(Places *self, PyFrameObject *frame) {
    NAME(trace, "f_trace") { return NULL; }
    static PyObject *descriptor;
    if (descriptor == NULL && (descriptor = PyObject_GetAttr((PyObject *)&PyFrame_Type, trace)) == NULL) {
        return NULL;
    }
    PyObject *mark = get_computed((PyObject *)frame, descriptor, trace);
    int ours = mark != NULL && (PyObject *)Py_TYPE(mark) == self->mark;
    PyObject *found = ours ? Py_XNewRef(in_slot(mark, self->found_in_mark)) : NULL;
    Py_XDECREF(mark);
    return found;
}

static PyObject *find(Places *self, PyFrameObject *frame, PyObject *above, Py_ssize_t level);

/* What is found above the frame of the module call of that level, which is remembered for the others of the call. */
static PyObject *find_above(Places *self, PyFrameObject *frame, PyObject *above, Py_ssize_t level) {
    PyObject *found = Py_NewRef(PyList_GET_ITEM(above, level));
    if (found == Py_None) {
        Py_DECREF(found);
        PyFrameObject *back = PyFrame_GetBack(frame);
        found = back == NULL ? NULL : find(self, back, above, level - 1);
        Py_XDECREF(back);
        if (found != NULL && level < PyList_GET_SIZE(above)) {
            PyList_SetItem(above, level, Py_NewRef(found));
        }
    }
    return found;
}

/* What is found from a frame on: a new reference; NULL, perhaps with an exception, where it is not known. */
static PyObject *find(Places *self, PyFrameObject *frame, PyObject *above, Py_ssize_t level) {
    PyObject *found = NULL;
    int in_optimizer = 0;
    Py_INCREF(frame);
    while (frame != NULL) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        PyObject *kind = PyDict_GetItemWithError(self->kinds, code->co_filename);
        long k = kind == NULL ? -1 : PyLong_AsLong(kind);
        int last = 1;
        if (k == LIBRARY && !((PyObject *)code == self->module_call && level >= 0)) {
            last = 0;
        } else if (k == LIBRARY) {
            found = in_optimizer ? NULL : find_above(self, frame, above, level);
        } else if (k == USER) {
            found = in_optimizer ? NULL : Py_XNewRef(site_of(self, code, PyFrame_GetLasti(frame)));
        } else if (k == OPTIMIZER_CODE) {
            found = marked(self, frame);
            /* A helper of it that was just called has no mark yet, and is not worth one. The loop over parameters is: who
             * finds none in the next either leaves it to Python, which puts one there. */
            last = found != NULL || in_optimizer++;
        }
        Py_DECREF(code);
        PyFrameObject *back = last || PyErr_Occurred() ? NULL : PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    if (found != NULL && !(PyTuple_Check(found) && PyTuple_GET_SIZE(found) == 3)) {
        Py_CLEAR(found);
    }
    return found;
}

static int put_place(Place *place, PyObject *module, PyObject *phase, PyObject *site) {
    *place = (Place){Py_NewRef(module), Py_NewRef(phase), Py_NewRef(site)};
    return 1;
}

void drop_place(Place *place) {
    Py_CLEAR(place->module);
    Py_CLEAR(place->phase);
    Py_CLEAR(place->site);
}

/* What a thread's state has: borrowed; NULL where it was taken away. */
static PyObject *slot(const Places *self, PyObject *state, int which) {
    return in_slot(state, self->slots[which]);
}

/* The state of this thread: a new reference, or NULL. */
static PyObject *state_of_thread(Places *self) {
    NAME(state_name, "state") { return NULL; }
    uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
    if (self->state != NULL && self->state_of == thread) {
        return Py_NewRef(self->state);
    }
    PyObject *state = PyObject_GetAttr(self->threads, state_name);
    if (state != NULL && Py_TYPE(state) != self->state_type) {
        Py_CLEAR(state);
    }
    if (state != NULL) {
        self->state_of = thread; /* first: to give the former state back may run other threads */
        Py_XSETREF(self->state, Py_NewRef(state));
    }
    return state;
}

/* The number that autograd's next node gets; -1, perhaps with an exception, if nobody knows. */
static long long next_number(Places *self) {
    if (self->next_number != NULL) {
        return (long long)self->next_number();
    }
    PyObject *number = PyObject_CallNoArgs(self->number);
    long long found = number == NULL ? -1 : PyLong_AsLongLong(number);
    Py_XDECREF(number);
    return found;
}

/* Whether autograd has made no node since `last_number` was set; -1 where that is not known. Its next in `number`. */
static int is_latest(Places *self, PyObject *state, long long *number) {
    *number = next_number(self);
    PyObject *last = slot(self, state, LAST_NUMBER);
    if (*number < 0 || last == NULL || !PyLong_CheckExact(last)) {
        return -1;
    }
    return PyLong_AsLongLong(last) == *number;
}

static int is_nothing(PyObject *value) { return value != NULL && PyObject_Not(value) == 1; }

/* Of a call in a backward pass: 1; 0, perhaps with an exception, where the slow way must be gone. */
static int backward(Places *self, PyObject *state, PyObject *node, Place *place) {
    NAME(sequence_nr, "_sequence_nr") { return 0; }
    if (slot(self, state, ENTERED) != Py_True || !is_nothing(slot(self, state, RECOMPUTING)) ||
        !is_nothing(slot(self, state, RECOMPUTED))) {
        return 0;
    }
    long long counter;
    PyObject *number = PyObject_CallMethodNoArgs(node, sequence_nr);
    PyObject *links = slot(self, state, LINKS);
    int done = 0;
    if (number != NULL && links != NULL && PyDict_Check(links) && is_latest(self, state, &counter) == 1) {
        PyObject *link = PyDict_GetItemWithError(links, number);
        if (link != NULL && PyTuple_Check(link) && PyTuple_GET_SIZE(link) == 2) {
            done = put_place(place, PyTuple_GET_ITEM(link, 0), PyTuple_GET_ITEM(self->phases, 1),
                             PyTuple_GET_ITEM(link, 1));
        }
    }
    Py_XDECREF(number);
    return done;
}

/* Remember the module and line of a forward call, for its backward; -1 where the slow way must be gone. */
static int link_forward(Places *self, PyObject *state, PyObject *module, PyObject *site) {
    long long number;
    int same = is_latest(self, state, &number), failed = same == 1 ? 0 : -1;
    PyObject *links = same == 0 ? slot(self, state, LINKS) : NULL;
    if (links != NULL && PyDict_Check(links) && PyDict_GET_SIZE(links) < self->most_links) {
        /* The node of this very call already exists: its number is the one before the next. */
        PyObject *mine = PyLong_FromLongLong(number - 1), *last = PyLong_FromLongLong(number);
        PyObject *link = mine == NULL || last == NULL ? NULL : PyTuple_Pack(2, module, site);
        if (link != NULL) {
            PyObject **kept = (PyObject **)((char *)state + self->slots[LAST_NUMBER]);
            Py_XSETREF(*kept, Py_NewRef(last));
            failed = PyDict_SetItem(links, mine, link);
        }
        Py_XDECREF(link);
        Py_XDECREF(last);
        Py_XDECREF(mine);
    }
    return failed;
}

/* So many frames above the one that is executed: a new reference, or NULL. */
static PyFrameObject *frame_at(int depth) {
    PyFrameObject *frame = (PyFrameObject *)Py_XNewRef(PyEval_GetFrame());
    while (frame != NULL && depth-- > 0) {
        PyFrameObject *back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    return frame;
}

/* Of a call in a forward pass or in an optimizer: 1; 0, perhaps with an exception, where the slow way must be gone. */
static int forward(Places *self, PyObject *state, int depth, Place *place) {
    static PyObject *nothing;
    if (nothing == NULL && (nothing = PyUnicode_InternFromString("")) == NULL) {
        return 0;
    }
    PyObject *modules = slot(self, state, MODULES), *above = slot(self, state, ABOVE);
    PyFrameObject *frame = modules == NULL || above == NULL ? NULL : frame_at(depth);
    if (frame == NULL || !PyList_Check(modules) || !PyList_Check(above)) {
        Py_XDECREF(frame);
        return 0;
    }
    Py_ssize_t n = PyList_GET_SIZE(modules);
    PyObject *module = Py_NewRef(n ? PyList_GET_ITEM(modules, n - 1) : nothing);
    PyObject *found = find(self, frame, above, PyList_GET_SIZE(above) - 1);
    int done = 0;
    if (found != NULL) {
        PyObject *site = PyTuple_GET_ITEM(found, 0);
        if (PyTuple_GET_ITEM(found, 1) == Py_True) {
            done = put_place(place, module, PyTuple_GET_ITEM(self->phases, 2), site);
        } else if (link_forward(self, state, module, site) == 0) {
            done = put_place(place, module, PyTuple_GET_ITEM(self->phases, 0), site);
        }
    }
    Py_DECREF(frame);
    Py_DECREF(module);
    Py_XDECREF(found);
    return done;
}

/* Autograd's node that is executed: a new reference, perhaps to None; NULL with an exception. */
static PyObject *node_of(Places *self) {
    int outside = self->graph_task != NULL && self->graph_task() == -1;
    return outside ? Py_NewRef(Py_None) : PyObject_CallNoArgs(self->node);
}

static int quickly(Places *self, int depth, Place *place) {
    PyObject *state = state_of_thread(self);
    PyObject *node = state == NULL ? NULL : node_of(self);
    int done = 0;
    if (node != NULL) {
        done = node == Py_None ? forward(self, state, depth, place) : backward(self, state, node, place);
    }
    Py_XDECREF(node);
    Py_XDECREF(state);
    return done;
}

static int slowly(Places *self, int depth, Place *place) {
    PyObject *number = PyLong_FromLong(depth);
    PyObject *found = number == NULL ? NULL : PyObject_CallOneArg(self->place, number);
    int done = -1;
    if (found != NULL && PyTuple_Check(found) && PyTuple_GET_SIZE(found) == 3) {
        done = put_place(place, PyTuple_GET_ITEM(found, 0), PyTuple_GET_ITEM(found, 1), PyTuple_GET_ITEM(found, 2));
    } else if (found != NULL) {
        PyErr_SetString(PyExc_TypeError, "Places: a place is a tuple of three");
    }
    Py_XDECREF(number);
    Py_XDECREF(found);
    return done;
}

int find_place(Places *self, int depth, Place *place) {
    *place = (Place){NULL, NULL, NULL};
    if (self->place == NULL) { /* the garbage collector has been here */
        PyErr_SetString(PyExc_RuntimeError, "Places: cleared");
        return -1;
    }
    if (quickly(self, depth, place)) {
        return 1;
    }
    return interrupted() ? -1 : slowly(self, depth, place);
}

int note_place(Places *self, int depth) {
    Place place;
    if (self->place != NULL) {
        long long number;
        PyObject *state = state_of_thread(self);
        int same = state == NULL ? -1 : is_latest(self, state, &number);
        Py_XDECREF(state);
        if (same == 1) {
            return 1;
        }
        if (interrupted()) {
            return -1;
        }
    }
    int done = find_place(self, depth, &place);
    if (done == 1) {
        drop_place(&place);
    }
    return done;
}
