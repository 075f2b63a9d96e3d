/* The context of a call, which the calls of one row in the data file have in common: its origin, and the key of its operator
 * and arguments; and the contexts already met.
 */

#include "core.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

/* ---- origin: module, phase, source line ----------------------------------------------------------------------------- */

/* The fast half of intercept/attribution.py and intercept/call_sites.py. `Origins` answers where all that it needs is cached,
 * which is nearly always. Anything else, and any failure, goes to the Python code, which finds the origin and fills the
 * caches. Nothing is changed before the answer is known. */

/* Slots of the state of a thread: `_ThreadState` of intercept/attribution.py. */
enum { ABOVE, ENTERED, LAST_NUMBER, LINKS, MODULES, RECOMPUTED, RECOMPUTING, N_SLOTS };

enum { SITES_KEPT = 512 }; /* a power of two */

/* A site that was found: what `found` has for a code and an offset, without the objects that its key is made of. */
typedef struct {
    PyObject *code; /* kept alive by `found` */
    int offset;
    PyObject *found; /* owned */
} KnownSite;

struct SrOrigins {
    PyObject_HEAD
    PyObject *threads; /* threading.local: its attribute `state` */
    PyObject *kinds;   /* dict: file name to kind of code */
    PyObject *found;   /* dict: (id of code, offset) to (site, in optimizer, code) */
    PyObject *mark;    /* type of the marks (f_trace) in frames of optimizers */
    PyObject *phases;  /* tuple: forward, backward, optimizer */
    PyObject *node;    /* callable: the autograd node that is executed */
    PyObject *number;  /* callable: the sequence number that the next autograd node gets */
    PyObject *find;    /* callable: the same in Python */
    PyObject *module_call; /* code that modules are called through, or None */
    PyObject *state;   /* of the thread that called last, or NULL */
    uint64_t state_of; /* id of that thread */
    PyTypeObject *state_type;
    Py_ssize_t slots[N_SLOTS];     /* offsets in it */
    Py_ssize_t found_in_mark;  /* likewise */
    Py_ssize_t max_links;
    KnownSite sites[SITES_KEPT];
};

enum { ORIGIN_LIBRARY, ORIGIN_USER, ORIGIN_OPTIMIZER };

/* The source line of an instruction: a borrowed reference; NULL, perhaps with an exception, where it is not cached. */
static PyObject *origin_site(SrOrigins *self, PyCodeObject *code, int offset) {
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
        PyTuple_GET_ITEM(found, 2) != (PyObject *)code) { /* which keeps the code, and so its id, alive */
        return NULL;
    }
    kept->code = (PyObject *)code;
    kept->offset = offset;
    Py_XSETREF(kept->found, Py_NewRef(found));
    return found;
}

/* What the mark in an optimizer's frame remembers: a new reference, or NULL, perhaps with an exception. */
static PyObject *origin_marked(SrOrigins *self, PyFrameObject *frame) {
    SR_NAME(trace, "f_trace") { return NULL; }
    static PyObject *descriptor;
    if (descriptor == NULL && (descriptor = PyObject_GetAttr((PyObject *)&PyFrame_Type, trace)) == NULL) {
        return NULL;
    }
    PyObject *mark = sr_get_computed((PyObject *)frame, descriptor, trace);
    int ours = mark != NULL && (PyObject *)Py_TYPE(mark) == self->mark;
    PyObject *found = ours ? Py_XNewRef(sr_slot(mark, self->found_in_mark)) : NULL;
    Py_XDECREF(mark);
    return found;
}

static PyObject *origin_from_frame(SrOrigins *self, PyFrameObject *frame, PyObject *above, Py_ssize_t level);

/* What is found above the frame of the module call of that level; remembered for the other operators of the call. */
static PyObject *origin_above_module(SrOrigins *self, PyFrameObject *frame, PyObject *above, Py_ssize_t level) {
    PyObject *found = Py_NewRef(PyList_GET_ITEM(above, level));
    if (found == Py_None) {
        Py_DECREF(found);
        PyFrameObject *back = PyFrame_GetBack(frame);
        found = back == NULL ? NULL : origin_from_frame(self, back, above, level - 1);
        Py_XDECREF(back);
        if (found != NULL && level < PyList_GET_SIZE(above)) {
            PyList_SetItem(above, level, Py_NewRef(found));
        }
    }
    return found;
}

/* What is found from a frame outwards: a new reference; NULL, perhaps with an exception, where it is not cached. */
static PyObject *origin_from_frame(SrOrigins *self, PyFrameObject *frame, PyObject *above, Py_ssize_t level) {
    PyObject *found = NULL;
    int in_optimizer = 0;
    Py_INCREF(frame);
    while (frame != NULL) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        PyObject *kind = PyDict_GetItemWithError(self->kinds, code->co_filename);
        long k = kind == NULL ? -1 : PyLong_AsLong(kind);
        int last = 1;
        if (k == ORIGIN_LIBRARY && !((PyObject *)code == self->module_call && level >= 0)) {
            last = 0;
        } else if (k == ORIGIN_LIBRARY) {
            found = in_optimizer ? NULL : origin_above_module(self, frame, above, level);
        } else if (k == ORIGIN_USER) {
            found = in_optimizer ? NULL : Py_XNewRef(origin_site(self, code, PyFrame_GetLasti(frame)));
        } else if (k == ORIGIN_OPTIMIZER) {
            found = origin_marked(self, frame);
            /* A helper function has no mark, and is not worth one: the loop over the parameters is, one frame up. Where
             * that has none either, Python puts one there. */
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

static sr_result origin_put(SrOrigin *origin, PyObject *module, PyObject *phase, PyObject *site) {
    *origin = (SrOrigin){Py_NewRef(module), Py_NewRef(phase), Py_NewRef(site)};
    return SR_DONE;
}

void sr_drop_origin(SrOrigin *origin) {
    Py_CLEAR(origin->module);
    Py_CLEAR(origin->phase);
    Py_CLEAR(origin->site);
}

/* A slot of a thread's state: borrowed; NULL where it was deleted. */
static PyObject *origin_slot(const SrOrigins *self, PyObject *state, int which) {
    return sr_slot(state, self->slots[which]);
}

/* The state of this thread: a new reference, or NULL. */
static PyObject *origin_thread_state(SrOrigins *self) {
    SR_NAME(state_name, "state") { return NULL; }
    uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
    if (self->state != NULL && self->state_of == thread) {
        return Py_NewRef(self->state);
    }
    PyObject *state = PyObject_GetAttr(self->threads, state_name);
    /* Slots are read at fixed offsets: a state of another type would be read as something else. */
    if (state != NULL && Py_TYPE(state) != self->state_type) {
        Py_CLEAR(state);
    }
    if (state != NULL) {
        self->state_of = thread; /* first: releasing the former state may run other threads */
        Py_XSETREF(self->state, Py_NewRef(state));
    }
    return state;
}

/* The sequence number that the next autograd node gets; -1, perhaps with an exception. */
static long long origin_next_number(SrOrigins *self) {
    PyObject *number = PyObject_CallNoArgs(self->number);
    long long found = number == NULL ? -1 : PyLong_AsLongLong(number);
    Py_XDECREF(number);
    return found;
}

/* Whether autograd has made no node since `last_number` was set; -1 where that is unknown. `number`: of its next node. */
static int origin_is_latest(SrOrigins *self, PyObject *state, long long *number) {
    *number = origin_next_number(self);
    PyObject *last = origin_slot(self, state, LAST_NUMBER);
    if (*number < 0 || last == NULL || !PyLong_CheckExact(last)) {
        return -1;
    }
    return PyLong_AsLongLong(last) == *number;
}

static int origin_is_falsy(PyObject *value) { return value != NULL && PyObject_Not(value) == 1; }

/* Of a call in a backward pass. A fallback may come with an exception, here and below. */
static sr_result origin_in_backward(SrOrigins *self, PyObject *state, PyObject *node, SrOrigin *origin) {
    SR_NAME(sequence_nr, "_sequence_nr") { return 0; }
    if (origin_slot(self, state, ENTERED) != Py_True || !origin_is_falsy(origin_slot(self, state, RECOMPUTING)) ||
        !origin_is_falsy(origin_slot(self, state, RECOMPUTED))) {
        return 0;
    }
    long long counter;
    PyObject *number = PyObject_CallMethodNoArgs(node, sequence_nr);
    PyObject *links = origin_slot(self, state, LINKS);
    sr_result done = SR_FALLBACK;
    if (number != NULL && links != NULL && PyDict_Check(links) && origin_is_latest(self, state, &counter) == 1) {
        PyObject *link = PyDict_GetItemWithError(links, number);
        if (link != NULL && PyTuple_Check(link) && PyTuple_GET_SIZE(link) == 2) {
            done = origin_put(origin, PyTuple_GET_ITEM(link, 0), PyTuple_GET_ITEM(self->phases, 1),
                             PyTuple_GET_ITEM(link, 1));
        }
    }
    Py_XDECREF(number);
    return done;
}

/* Remember the module and line of a forward call, for its backward; -1 where Python has to. */
static int origin_link_forward(SrOrigins *self, PyObject *state, PyObject *module, PyObject *site) {
    long long number;
    int same = origin_is_latest(self, state, &number), failed = same == 1 ? 0 : -1;
    PyObject *links = same == 0 ? origin_slot(self, state, LINKS) : NULL;
    if (links != NULL && PyDict_Check(links) && PyDict_GET_SIZE(links) < self->max_links) {
        /* The node of this very call already exists: its number is the one before the next. */
        PyObject *own = PyLong_FromLongLong(number - 1), *last = PyLong_FromLongLong(number);
        PyObject *link = own == NULL || last == NULL ? NULL : PyTuple_Pack(2, module, site);
        if (link != NULL) {
            PyObject **kept = (PyObject **)((char *)state + self->slots[LAST_NUMBER]);
            Py_XSETREF(*kept, Py_NewRef(last));
            failed = PyDict_SetItem(links, own, link);
        }
        Py_XDECREF(link);
        Py_XDECREF(last);
        Py_XDECREF(own);
    }
    return failed;
}

/* The frame `depth` above the one that is executed: a new reference, or NULL. */
static PyFrameObject *origin_frame_at(int depth) {
    PyFrameObject *frame = (PyFrameObject *)Py_XNewRef(PyEval_GetFrame());
    while (frame != NULL && depth-- > 0) {
        PyFrameObject *back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    return frame;
}

/* Of a call in a forward pass or in an optimizer. */
static sr_result origin_in_forward(SrOrigins *self, PyObject *state, int depth, SrOrigin *origin) {
    static PyObject *nothing;
    if (nothing == NULL && (nothing = PyUnicode_InternFromString("")) == NULL) {
        return 0;
    }
    PyObject *modules = origin_slot(self, state, MODULES), *above = origin_slot(self, state, ABOVE);
    PyFrameObject *frame = modules == NULL || above == NULL ? NULL : origin_frame_at(depth);
    if (frame == NULL || !PyList_Check(modules) || !PyList_Check(above)) {
        Py_XDECREF(frame);
        return 0;
    }
    Py_ssize_t n = PyList_GET_SIZE(modules);
    PyObject *module = Py_NewRef(n ? PyList_GET_ITEM(modules, n - 1) : nothing);
    PyObject *found = origin_from_frame(self, frame, above, PyList_GET_SIZE(above) - 1);
    sr_result done = SR_FALLBACK;
    if (found != NULL) {
        PyObject *site = PyTuple_GET_ITEM(found, 0);
        if (PyTuple_GET_ITEM(found, 1) == Py_True) {
            done = origin_put(origin, module, PyTuple_GET_ITEM(self->phases, 2), site);
        } else if (origin_link_forward(self, state, module, site) == 0) {
            done = origin_put(origin, module, PyTuple_GET_ITEM(self->phases, 0), site);
        }
    }
    Py_DECREF(frame);
    Py_DECREF(module);
    Py_XDECREF(found);
    return done;
}

static sr_result origin_from_caches(SrOrigins *self, int depth, SrOrigin *origin) {
    PyObject *state = origin_thread_state(self);
    PyObject *node = state == NULL ? NULL : PyObject_CallNoArgs(self->node);
    sr_result done = SR_FALLBACK;
    if (node != NULL) {
        done = node == Py_None ? origin_in_forward(self, state, depth, origin) : origin_in_backward(self, state, node, origin);
    }
    Py_XDECREF(node);
    Py_XDECREF(state);
    return done;
}

static sr_result origin_from_python(SrOrigins *self, int depth, SrOrigin *origin) {
    PyObject *number = PyLong_FromLong(depth);
    PyObject *found = number == NULL ? NULL : PyObject_CallOneArg(self->find, number);
    sr_result done = SR_ERROR;
    if (found != NULL && PyTuple_Check(found) && PyTuple_GET_SIZE(found) == 3) {
        done = origin_put(origin, PyTuple_GET_ITEM(found, 0), PyTuple_GET_ITEM(found, 1), PyTuple_GET_ITEM(found, 2));
    } else if (found != NULL) {
        PyErr_SetString(PyExc_TypeError, "Origins: an origin is a tuple of three");
    }
    Py_XDECREF(number);
    Py_XDECREF(found);
    return done;
}

sr_result sr_find_origin(SrOrigins *self, int depth, SrOrigin *origin) {
    *origin = (SrOrigin){NULL, NULL, NULL};
    if (self->find == NULL) { /* cleared by the garbage collector */
        PyErr_SetString(PyExc_RuntimeError, "Origins: cleared");
        return SR_ERROR;
    }
    if (origin_from_caches(self, depth, origin) == SR_DONE) {
        return SR_DONE;
    }
    return sr_interrupted() ? SR_ERROR : origin_from_python(self, depth, origin);
}

sr_result sr_note_origin(SrOrigins *self, int depth) {
    SrOrigin origin;
    if (self->find != NULL) {
        long long number;
        PyObject *state = origin_thread_state(self);
        int same = state == NULL ? -1 : origin_is_latest(self, state, &number);
        Py_XDECREF(state);
        if (same == 1) {
            return SR_DONE;
        }
        if (sr_interrupted()) {
            return SR_ERROR;
        }
    }
    sr_result done = sr_find_origin(self, depth, &origin);
    if (done == SR_DONE) {
        sr_drop_origin(&origin);
    }
    return done;
}

/* The type, and its methods in Python. */

static PyTypeObject *origins_type;

static const SrField origins_fields[] = {
    SR_FIELD(SrOrigins, threads), SR_FIELD(SrOrigins, kinds),  SR_FIELD(SrOrigins, found), SR_FIELD(SrOrigins, mark),
    SR_FIELD(SrOrigins, phases),  SR_FIELD(SrOrigins, node),   SR_FIELD(SrOrigins, number), SR_FIELD(SrOrigins, find),
    {NULL, 0},
};

/* Where the slots of a thread's state lie; -1 with an exception. */
static int origins_find_slots(SrOrigins *self) {
    static const char *names[N_SLOTS] = {"above",   "entered",    "last_number", "links",
                                         "modules", "recomputed", "recomputing"};
    PyObject *state = PyObject_GetAttrString(self->threads, "state");
    if (state == NULL) {
        return -1;
    }
    self->state_type = (PyTypeObject *)Py_NewRef(Py_TYPE(state));
    Py_DECREF(state);
    for (int i = 0; i < N_SLOTS; i++) {
        self->slots[i] = sr_slot_offset(self->state_type, names[i]);
        if (self->slots[i] < 0) {
            return -1;
        }
    }
    self->found_in_mark = sr_slot_offset((PyTypeObject *)self->mark, "found");
    return self->found_in_mark < 0 ? -1 : 0;
}

/* A number of frames; -1 with an exception. */
static int origins_n_frames(PyObject *depth) {
    long n = PyLong_AsLong(depth);
    return n == -1 && PyErr_Occurred() ? -1 : n < 0 ? 0 : (int)Py_MIN(n, 1 << 30);
}

/* find(depth): see Attribution.place. */
static PyObject *origins_find(SrOrigins *self, PyObject *depth) {
    SrOrigin origin;
    int n = origins_n_frames(depth);
    if (n < 0 || sr_find_origin(self, n, &origin) != SR_DONE) {
        return NULL;
    }
    PyObject *made = PyTuple_Pack(3, origin.module, origin.phase, origin.site);
    sr_drop_origin(&origin);
    return made;
}

/* note(depth): see Attribution.note. */
static PyObject *origins_note(SrOrigins *self, PyObject *depth) {
    int n = origins_n_frames(depth);
    if (n < 0 || sr_note_origin(self, n) != SR_DONE) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Fill in the fields from keyword arguments; -1 with an exception. */
static int origins_take(SrOrigins *self, PyObject *given) {
    if (sr_take_fields((PyObject *)self, given, origins_fields)) {
        return -1;
    }
    PyObject *most = PyDict_GetItemString(given, "max_links");
    self->max_links = most == NULL ? -1 : PyLong_AsSsize_t(most);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (self->max_links < 0 || !PyDict_Check(self->kinds) || !PyDict_Check(self->found) ||
        !PyTuple_Check(self->phases) || PyTuple_GET_SIZE(self->phases) != 3 || !PyType_Check(self->mark)) {
        return sr_wrong_type((PyObject *)self);
    }
    return origins_find_slots(self);
}

static PyObject *origins_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    SrOrigins *self = (SrOrigins *)sr_new_by_name(type, args);
    if (self != NULL) {
        self->module_call = Py_NewRef(Py_None);
        if (origins_take(self, kwargs)) {
            Py_CLEAR(self);
        }
    }
    return (PyObject *)self;
}

static int origins_traverse(SrOrigins *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->module_call);
    Py_VISIT(self->state);
    Py_VISIT(self->state_type);
    for (int i = 0; i < SITES_KEPT; i++) {
        Py_VISIT(self->sites[i].found);
    }
    return sr_visit_fields((PyObject *)self, origins_fields, visit, arg);
}

static int origins_clear(SrOrigins *self) {
    sr_clear_fields((PyObject *)self, origins_fields);
    Py_CLEAR(self->module_call);
    Py_CLEAR(self->state);
    Py_CLEAR(self->state_type);
    for (int i = 0; i < SITES_KEPT; i++) {
        self->sites[i].code = NULL;
        Py_CLEAR(self->sites[i].found);
    }
    return 0;
}

static PyMethodDef origins_methods[] = {
    {"find", (PyCFunction)origins_find, METH_O, NULL},
    {"note", (PyCFunction)origins_note, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef origins_members[] = {
    {"module_call", T_OBJECT_EX, offsetof(SrOrigins, module_call), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot origins_slots[] = {
    {Py_tp_new, origins_new},         {Py_tp_dealloc, sr_dealloc}, {Py_tp_traverse, origins_traverse}, {Py_tp_clear, origins_clear},
    {Py_tp_methods, origins_methods},    {Py_tp_members, origins_members}, {0, NULL},
};

static PyType_Spec origins_spec = {
    .name = "shadowrun.native._core.Origins",
    .basicsize = sizeof(SrOrigins),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = origins_slots,
};

int sr_is_origins(PyObject *value) { return Py_IS_TYPE(value, origins_type); }

int sr_add_origins_type(PyObject *module) { return sr_add_type(module, &origins_spec, &origins_type); }

/* ---- keys ----------------------------------------------------------------------------------------------------------- */

/* Shapes, small integers, strings and the like become bytes. A value that is known by its identity (a type, a device)
 * is kept as an object after them. Two keys are equal where those of recording/recorder.py are equal, except that True and
 * 1 are two values here. */

enum { KEY_MAX_ITEMS = 4, KEY_LARGEST_INTEGER = 1024 };

int sr_key_put(SrKey *key, const void *bytes, size_t n) {
    if (key->length + n > key->room) {
        size_t room = 2 * (key->length + n);
        char *more = malloc(room);
        if (more == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(more, key->bytes, key->length);
        if (key->bytes != key->first) {
            free(key->bytes);
        }
        key->bytes = more;
        key->room = room;
    }
    memcpy(key->bytes + key->length, bytes, n);
    key->length += n;
    return 0;
}

static int key_put_tag(SrKey *key, char tag) { return sr_key_put(key, &tag, 1); }

/* Takes the reference. */
static int key_put_object(SrKey *key, PyObject *object) {
    if (object == NULL) {
        return -1;
    }
    if (key->n_objects == key->objects_room) {
        size_t held = (size_t)key->n_objects * sizeof object;
        PyObject **more = malloc(2 * held);
        if (more == NULL) {
            Py_DECREF(object);
            PyErr_NoMemory();
            return -1;
        }
        memcpy(more, key->objects, held);
        if (key->objects != key->first_objects) {
            free(key->objects);
        }
        key->objects = more;
        key->objects_room *= 2;
    }
    key->objects[key->n_objects++] = object;
    return key_put_tag(key, 'O');
}

/* Not by DLPack: that asks for the address, and then a tensor that shares its memory until it is written to
 * (`torch._lazy_clone`) gets its own memory. The program would notice. */
static int key_put_tensor(SrKey *key, PyObject *value) {
    if (key->exact) {
        return key_put_tag(key, 'T');
    }
    const int64_t *sizes;
    int64_t n;
    PyObject *dtype;
    if (sr_shape_and_dtype(value, &n, &sizes, &dtype)) {
        int failed = key_put_tag(key, 'T') || sr_key_put(key, &dtype, sizeof dtype) || sr_key_put(key, &n, sizeof n) ||
                     sr_key_put(key, sizes, (size_t)n * sizeof *sizes);
        return failed ? -1 : 0;
    }
    PyObject *shape = sr_shape(value);
    dtype = shape == NULL ? NULL : sr_dtype(value);
    if (dtype == NULL) {
        Py_XDECREF(shape);
        return -1;
    }
    n = PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : -1;
    Py_DECREF(dtype); /* torch keeps one object for each dtype */
    int failed = key_put_tag(key, 'T') || sr_key_put(key, &dtype, sizeof dtype) || sr_key_put(key, &n, sizeof n);
    for (int64_t d = 0; d < n && !failed; d++) {
        int64_t size = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, d));
        failed = (size == -1 && PyErr_Occurred()) || sr_key_put(key, &size, sizeof size);
    }
    Py_DECREF(shape);
    return failed ? -1 : 0;
}

static int key_put_string(SrKey *key, PyObject *value) {
    Py_ssize_t n;
    const char *text = PyUnicode_AsUTF8AndSize(value, &n);
    if (text == NULL) { /* a lone surrogate, say */
        PyErr_Clear();
        return key_put_object(key, Py_NewRef(value));
    }
    return key_put_tag(key, 's') || sr_key_put(key, &n, sizeof n) || sr_key_put(key, text, (size_t)n) ? -1 : 0;
}

/* The first object that was equal, since the cache below compares addresses, and torch makes a new `torch.device` for each
 * call. There are few such values. A new reference, or NULL with an exception. */
static PyObject *key_first_equal(PyObject *value) {
    static PyObject *first;
    if (first == NULL && (first = PyDict_New()) == NULL) {
        return NULL;
    }
    return Py_XNewRef(PyDict_SetDefault(first, value, value));
}

static int key_put_value(SrKey *key, PyObject *value, int depth) {
    if (sr_is_tensor(value)) {
        return key_put_tensor(key, value);
    }
    if (PyLong_CheckExact(value)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        /* Large ones change from step to step, as floats do: each call would be a new context. */
        if (overflow && key->exact) {
            PyObject *digits = PyObject_Repr(value);
            int failed = digits == NULL || key_put_tag(key, 'i') || key_put_string(key, digits);
            Py_XDECREF(digits);
            return failed ? -1 : 0;
        }
        if (!key->exact && (overflow || number > KEY_LARGEST_INTEGER || number < -KEY_LARGEST_INTEGER)) {
            return key_put_tag(key, 'i');
        }
        return key_put_tag(key, 'I') || sr_key_put(key, &number, sizeof number) ? -1 : 0;
    }
    if (PyFloat_CheckExact(value)) {
        double number = key->exact ? PyFloat_AS_DOUBLE(value) : 0.0; /* zeros of both signs are two values */
        number = isnan(number) ? (double)NAN : number;
        return key_put_tag(key, 'f') || (key->exact && sr_key_put(key, &number, sizeof number)) ? -1 : 0;
    }
    if (value == Py_None || value == Py_True || value == Py_False) {
        return key_put_tag(key, value == Py_None ? 'N' : value == Py_True ? '1' : '0');
    }
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
        Py_ssize_t n = PySequence_Fast_GET_SIZE(value);
        if (depth > 100) {
            PyErr_SetString(PyExc_RecursionError, "lists too deep for a context");
            return -1;
        }
        /* With its length: without it, [[1], 2] and [[1, 2]] would have the same bytes. */
        if (key_put_tag(key, '[') || sr_key_put(key, &n, sizeof n)) {
            return -1;
        }
        for (Py_ssize_t i = 0; i < n && (i < KEY_MAX_ITEMS || key->exact) && i < PySequence_Fast_GET_SIZE(value); i++) {
            PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
            int failed = key_put_value(key, item, depth + 1);
            Py_DECREF(item);
            if (failed) {
                return -1;
            }
        }
        return 0;
    }
    if (PyUnicode_CheckExact(value)) {
        return key_put_string(key, value);
    }
    if (key->exact && PyComplex_CheckExact(value)) {
        Py_complex number = ((PyComplexObject *)value)->cval;
        return key_put_tag(key, 'c') || sr_key_put(key, &number, sizeof number) ? -1 : 0;
    }
    int answer = sr_is_exact(value);
    if (answer == 0 && (answer = sr_is_tensor_or_subclass(value)) == 1) {
        return key_put_tensor(key, value);
    }
    return answer < 0 ? -1 : key_put_object(key, answer ? key_first_equal(value) : Py_NewRef((PyObject *)Py_TYPE(value)));
}

int sr_key_put_call(SrKey *key, PyObject *args, PyObject *kwargs) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
        if (key_put_value(key, PyTuple_GET_ITEM(args, i), 0)) {
            return -1;
        }
    }
    PyObject *name, *value;
    Py_ssize_t position = 0;
    if (PyDict_GET_SIZE(kwargs) && key_put_tag(key, 'k')) { /* else a keyword could be read as a positional string */
        return -1;
    }
    while (PyDict_Next(kwargs, &position, &name, &value)) {
        Py_INCREF(value);
        int failed = key_put_string(key, name) || key_put_value(key, value, 0);
        Py_DECREF(value);
        if (failed) {
            return -1;
        }
    }
    return 0;
}

static PyObject *key_tuple(SrKey *key, PyObject *index, PyObject *device, const SrOrigin *origin) {
    PyObject *bytes = PyBytes_FromStringAndSize(key->bytes, (Py_ssize_t)key->length);
    PyObject *made = bytes == NULL ? NULL : PyTuple_New(6 + key->n_objects);
    if (made == NULL) {
        Py_XDECREF(bytes);
        return NULL;
    }
    PyTuple_SET_ITEM(made, 0, Py_NewRef(index));
    PyTuple_SET_ITEM(made, 1, bytes);
    PyTuple_SET_ITEM(made, 2, Py_NewRef(device));
    PyTuple_SET_ITEM(made, 3, Py_NewRef(origin->module));
    PyTuple_SET_ITEM(made, 4, Py_NewRef(origin->phase));
    PyTuple_SET_ITEM(made, 5, Py_NewRef(origin->site));
    for (Py_ssize_t i = 0; i < key->n_objects; i++) {
        PyTuple_SET_ITEM(made, 6 + i, Py_NewRef(key->objects[i]));
    }
    return made;
}

void sr_key_begin(SrKey *key, int exact) {
    key->exact = exact;
    key->bytes = key->first;
    key->length = 0;
    key->room = sizeof key->first;
    key->objects = key->first_objects;
    key->n_objects = 0;
    key->objects_room = sizeof key->first_objects / sizeof *key->first_objects;
}

void sr_key_drop(SrKey *key) {
    while (key->n_objects) {
        Py_DECREF(key->objects[--key->n_objects]);
    }
    if (key->bytes != key->first) {
        free(key->bytes);
    }
    if (key->objects != key->first_objects) {
        free(key->objects);
    }
}

/* context_key(index, device, place, args, kwargs, exact=False) */
PyObject *sr_context_key(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n < 5 || n > 6 || !PyTuple_Check(args[2]) || PyTuple_GET_SIZE(args[2]) != 3 || !PyTuple_Check(args[3]) ||
        !PyDict_Check(args[4])) {
        return sr_wrong_count("context_key");
    }
    SrOrigin origin = {PyTuple_GET_ITEM(args[2], 0), PyTuple_GET_ITEM(args[2], 1), PyTuple_GET_ITEM(args[2], 2)};
    SrKey key;
    sr_key_begin(&key, n == 6 && args[5] == Py_True);
    PyObject *made = sr_key_put_call(&key, args[3], args[4]) ? NULL : key_tuple(&key, args[0], args[1], &origin);
    sr_key_drop(&key);
    return made;
}

/* ---- the cache: contexts that were met before, so that a call in a known context makes no object ---------------------
 *
 * A hit is a key with the same bytes. The objects whose addresses are in those bytes are held by the table, so an address
 * means one object as long as the key is there.
 */

enum { CACHE_ROOM = 1024, CACHE_MAX_ROOM = 16384 }; /* powers of two; at most half of it is filled */

typedef struct {
    uint64_t hash;
    PyObject **held; /* owned, up to a NULL; the bytes of the key come after it. NULL: the slot is free */
    const char *bytes;
    size_t length;
    long long number;
} CacheItem;

struct SrContextCache {
    CacheItem *items;
    size_t room, n;
    uint64_t mask; /* of hashes: all bits, but in tests */
};

SrContextCache *sr_new_context_cache(void) {
    SrContextCache *cache = malloc(sizeof *cache);
    if (cache != NULL) {
        *cache = (SrContextCache){calloc(CACHE_ROOM, sizeof(CacheItem)), CACHE_ROOM, 0, ~UINT64_C(0)};
        if (cache->items == NULL) {
            free(cache);
            return NULL;
        }
    }
    return cache;
}

static void cache_drop_items(CacheItem *items, size_t room) {
    for (size_t i = 0; i < room; i++) {
        for (PyObject **held = items[i].held; held != NULL && *held != NULL; held++) {
            Py_DECREF(*held);
        }
        free(items[i].held);
    }
    free(items);
}

void sr_drop_context_cache(SrContextCache *cache) {
    if (cache != NULL) {
        cache_drop_items(cache->items, cache->room);
        free(cache);
    }
}

int sr_visit_context_cache(const SrContextCache *cache, visitproc visit, void *arg) {
    for (size_t i = 0; cache != NULL && i < cache->room; i++) {
        for (PyObject **held = cache->items[i].held; held != NULL && *held != NULL; held++) {
            Py_VISIT(*held);
        }
    }
    return 0;
}

void sr_collide_context_cache(SrContextCache *cache) { cache->mask = 0; }

static uint64_t cache_mixed(uint64_t x) { /* the finaliser of MurmurHash3 */
    x = (x ^ (x >> 33)) * UINT64_C(0xFF51AFD7ED558CCD);
    x = (x ^ (x >> 33)) * UINT64_C(0xC4CEB9FE1A85EC53);
    return x ^ (x >> 33);
}

uint64_t sr_key_hash(const char *bytes, size_t n) {
    uint64_t hash = UINT64_C(0x243F6A8885A308D3) ^ n, word;
    while (n) {
        size_t taken = n < sizeof word ? n : sizeof word;
        word = 0;
        memcpy(&word, bytes, taken);
        bytes += taken;
        n -= taken;
        hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
        hash ^= hash >> 29;
    }
    return cache_mixed(hash);
}

/* The slot of a key, or the free one that it would get. */
static CacheItem *cache_slot(CacheItem *items, size_t room, uint64_t hash, const char *bytes, size_t length) {
    size_t i = hash & (room - 1);
    while (items[i].held != NULL && (items[i].hash != hash || items[i].length != length ||
                                     memcmp(items[i].bytes, bytes, length) != 0)) {
        i = (i + 1) & (room - 1);
    }
    return &items[i];
}

/* Room for one more; 0 where there is none. */
static int cache_grow(SrContextCache *cache) {
    if (2 * (cache->n + 1) <= cache->room) {
        return 1;
    }
    int grows = cache->room < CACHE_MAX_ROOM; /* else all are dropped: such a program repeats few calls */
    size_t room = grows ? 2 * cache->room : CACHE_ROOM;
    CacheItem *items = calloc(room, sizeof *items), *former = cache->items;
    if (items == NULL) {
        return 0;
    }
    size_t former_room = cache->room;
    for (size_t i = 0; grows && i < former_room; i++) {
        if (former[i].held != NULL) {
            *cache_slot(items, room, former[i].hash, former[i].bytes, former[i].length) = former[i];
        }
    }
    cache->items = items;
    cache->room = room;
    if (grows) {
        free(former);
    } else {
        cache->n = 0;
        cache_drop_items(former, former_room);
    }
    return 1;
}

/* Remember a number; without memory nothing is. */
static void cache_remember(
    SrContextCache *cache, uint64_t hash, const SrKey *key, size_t length, const SrOrigin *origin, long long number) {
    size_t n_held = (size_t)key->n_objects + 4;
    PyObject **held = malloc(n_held * sizeof *held + length);
    /* Without memory, the context is looked up in the dict at its next call too: slower, and right. */
    if (held == NULL || !cache_grow(cache)) {
        free(held);
        return;
    }
    CacheItem *item = cache_slot(cache->items, cache->room, hash, key->bytes, length);
    if (item->held != NULL) { /* by another thread, while Python compared keys */
        free(held);
        return;
    }
    held[0] = Py_NewRef(origin->module);
    held[1] = Py_NewRef(origin->phase);
    held[2] = Py_NewRef(origin->site);
    for (Py_ssize_t i = 0; i < key->n_objects; i++) {
        held[3 + i] = Py_NewRef(key->objects[i]);
    }
    held[n_held - 1] = NULL;
    memcpy(held + n_held, key->bytes, length);
    *item = (CacheItem){hash, held, (const char *)(held + n_held), length, number};
    cache->n++;
}

/* Append the operator's number and the addresses of the objects. The position of each address follows from the tags in
 * the bytes before; `length` ends those. */
static int cache_put_addresses(SrKey *key, PyObject *index, const SrOrigin *origin) {
    size_t length = key->length;
    long long number = PyLong_AsLongLong(index);
    int failed = (number == -1 && PyErr_Occurred()) || sr_key_put(key, &number, sizeof number) ||
                 sr_key_put(key, origin, sizeof *origin) ||
                 sr_key_put(key, key->objects, (size_t)key->n_objects * sizeof *key->objects) ||
                 sr_key_put(key, &length, sizeof length);
    return failed ? -1 : 0;
}

/* The number in the dict of all contexts, by the key in Python; 0 as `sr_context_number`. */
static int cache_look_up_in_dict(PyObject *contexts, PyObject *key, long long *number) {
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(contexts, key);
    *number = found == NULL ? -1 : PyLong_AsLongLong(found);
    return found != NULL && !(*number == -1 && PyErr_Occurred());
}

int sr_context_number(SrContextCache *cache, PyObject *contexts, PyObject *index, PyObject *device,
                      const SrOrigin *origin, PyObject *args, PyObject *kwargs, int exact, long long *number) {
    SrKey key;
    sr_key_begin(&key, exact);
    int found = 0;
    if (sr_key_put_call(&key, args, kwargs) == 0) {
        size_t call_length = key.length;
        if (cache_put_addresses(&key, index, origin) == 0) {
            size_t length = key.length;
            uint64_t hash = sr_key_hash(key.bytes, length) & cache->mask;
            CacheItem *item = cache_slot(cache->items, cache->room, hash, key.bytes, length);
            if (item->held != NULL) {
                *number = item->number;
                found = 1;
            } else {
                key.length = call_length; /* the tuple holds the objects themselves */
                PyObject *tuple = key_tuple(&key, index, device, origin);
                found = cache_look_up_in_dict(contexts, tuple, number);
                if (found) {
                    cache_remember(cache, hash, &key, length, origin, *number);
                }
                Py_XDECREF(tuple);
            }
        }
    }
    sr_key_drop(&key);
    return found;
}
