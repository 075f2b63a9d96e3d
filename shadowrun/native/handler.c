/* The dispatch mode's handler: calls on the CPU that can go a short way, which nearly all do.
 *
 * It does what intercept/dispatch.py, replay/replayer.py and replay/short.py do, for plain tensors on the CPU alone, and
 * hands everything else to them, before it has done anything. Those remain the description of what happens; tests run
 * both and compare.
 */

#include "handler.h"

#include <structmember.h>
#ifdef _WIN32
#include <windows.h>
#else
#include <time.h>
#endif

static PyTypeObject *handler_type;

/* The clock of time.perf_counter_ns. */
long long now_ns(void) {
#ifdef _WIN32
    LARGE_INTEGER count, frequency;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&frequency);
    return (long long)((double)count.QuadPart * 1e9 / (double)frequency.QuadPart);
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
#endif
}

PyObject *run_operator(PyObject *run, PyObject *args, PyObject *kwargs) {
    return PyObject_Call(run, args, PyDict_GET_SIZE(kwargs) ? kwargs : NULL);
}

/* By a function in Python: warnings that it gives must come at a line of ours, where they are told from the user's. */
PyObject *replayed(Handler *self, PyObject *run, PyObject *args, PyObject *kwargs) {
    PyObject *given[] = {NULL, run, args, kwargs};
    return PyObject_Vectorcall(self->again, given + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

int find_context(Handler *self, Call *call, PyObject **context, PyObject **place) {
    static PyObject *zero;
    if (zero == NULL && (zero = PyLong_FromLong(0)) == NULL) {
        return -1;
    }
    long long start = started(self);
    *context = NULL;
    *place = place_of((Places *)self->places, zero);
    if (*place == NULL) {
        return interrupted() ? -1 : 0;
    }
    lap(self, PART_PLACE, start);
    start = started(self);
    PyObject *given[] = {call->entry->index, self->device, *place, call->args, call->kwargs};
    PyObject *key = context_key(NULL, given, 5);
    if (key != NULL) {
        *context = Py_XNewRef(PyDict_GetItemWithError(self->contexts, key));
        Py_DECREF(key);
    }
    lap(self, PART_CONTEXT, start);
    if (*context == NULL) { /* new, or of a kind that Python must look at, and say why it cannot */
        Py_CLEAR(*place);
        return interrupted() ? -1 : 0;
    }
    return 1;
}

int report(PyObject *reporter, Call *call, PyObject *place) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) {
        PyException_SetTraceback(value, trace);
    }
    PyObject *given[] = {call->entry->plan, call->args, call->kwargs, place, value};
    PyObject *done = PyObject_Vectorcall(reporter, given, 5, NULL);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int add_row(Handler *self, PyObject *context, PyObject *verdict, long long ref_ns, long long target_ns) {
    NAME(step_name, "step") { return -1; }
    NAME(last_step, "_last_step") { return -1; }
    NAME(flush, "_flush_at_times") { return -1; }
    long long start = started(self);
    PyObject *seq = PyIter_Next(self->numbers), *step = PyObject_GetAttr(self->recorder, step_name);
    PyObject *row = seq == NULL || step == NULL ? NULL : PyTuple_New(8);
    if (row == NULL) {
        Py_XDECREF(seq);
        Py_XDECREF(step);
        return -1;
    }
    unsigned long long number = PyLong_AsUnsignedLongLongMask(seq);
    PyObject *ref = ref_ns < 0 ? Py_NewRef(self->minus_one) : PyFloat_FromDouble((double)ref_ns / 1000);
    PyObject *target = target_ns < 0 ? Py_NewRef(self->minus_one) : PyFloat_FromDouble((double)target_ns / 1000);
    PyTuple_SET_ITEM(row, 0, seq);
    PyTuple_SET_ITEM(row, 1, step);
    PyTuple_SET_ITEM(row, 2, Py_NewRef(context));
    PyTuple_SET_ITEM(row, 3, Py_NewRef(verdict));
    PyTuple_SET_ITEM(row, 4, ref);
    PyTuple_SET_ITEM(row, 5, target);
    PyTuple_SET_ITEM(row, 6, Py_NewRef(self->minus_one));
    PyTuple_SET_ITEM(row, 7, Py_NewRef(self->minus_one));
    int failed = ref == NULL || target == NULL || PyObject_SetAttr(self->recorder, last_step, step) ||
                 PyList_Append(self->rows, row);
    Py_DECREF(row);
    if (!failed && !(number & 63)) {
        PyObject *done = PyObject_CallMethodNoArgs(self->recorder, flush);
        failed = done == NULL;
        Py_XDECREF(done);
    }
    lap(self, PART_RECORD, start);
    return failed ? -1 : 0;
}

/* Count a call that is not compared, as Recorder.skip; -1 with an exception. */
static int count_skipped(Handler *self, PyObject *key) {
    NAME(skipped_name, "_skipped") { return -1; }
    static PyObject *one;
    if (one == NULL && (one = PyLong_FromLong(1)) == NULL) {
        return -1;
    }
    PyObject *counter = PyObject_GetAttr(self->recorder, skipped_name);
    if (counter == NULL || !PyDict_Check(counter)) {
        Py_XDECREF(counter);
        return -1;
    }
    PyObject *before = PyDict_GetItemWithError(counter, key);
    PyObject *after = before != NULL ? PyNumber_Add(before, one) : PyErr_Occurred() ? NULL : Py_NewRef(one);
    int failed = after == NULL || PyDict_SetItem(counter, key, after);
    Py_XDECREF(after);
    Py_DECREF(counter);
    return failed ? -1 : 0;
}

/* 1: the lock is held; 0: somebody else has it, or waits for it. */
static int try_lock(Handler *self) {
    NAME(acquire, "acquire") { return -1; }
    NAME(locked, "locked") { return -1; }
    PyObject *waiting = PyObject_CallMethodNoArgs(self->gate, locked), *got = NULL;
    if (waiting == Py_False) {
        got = PyObject_CallMethodOneArg(self->lock, acquire, Py_False);
    }
    int held = got == Py_True;
    Py_XDECREF(waiting);
    Py_XDECREF(got);
    PyErr_Clear();
    return held;
}

/* Keeps an exception that is on its way. */
static void unlock(PyObject *lock) {
    NAME(release, "release") { return; }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallMethodNoArgs(lock, release));
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
}

static int is_true(PyObject *owner, PyObject *name) {
    PyObject *value = PyObject_GetAttr(owner, name);
    Py_XDECREF(value);
    return value == Py_True;
}

/* A call that is not compared (a view, memory without values, a step that is left out): its place is noted for the
 * operators of its backward. 1; 0 where that failed; -1 with an interrupt. */
static int pass_silently(Handler *self, Entry *entry, PyObject *reason, long long entered) {
    static PyObject *zero;
    if (zero == NULL && (zero = PyLong_FromLong(0)) == NULL) {
        return 0;
    }
    PyObject *noted = note_place((Places *)self->places, zero);
    lap(self, PART_PLACE, entered);
    if (noted == NULL) {
        return interrupted() ? -1 : 0;
    }
    Py_DECREF(noted);
    PyObject *key = entry->skipped;
    key = reason == NULL ? Py_NewRef(key)
                         : PyTuple_Pack(3, PyTuple_GET_ITEM(key, 0), PyTuple_GET_ITEM(key, 1), reason);
    int failed = key == NULL || count_skipped(self, key);
    Py_XDECREF(key);
    if (failed) {
        return interrupted() ? -1 : 0;
    }
    self->own_ns += now_ns() - entered;
    return 1;
}

/* 1 where the call was recorded, or why it could not be; 0 where Python must; -1 with an exception. */
static int record(Handler *self, Call *call) {
    NAME(seen_name, "_seen") { return 0; }
    PyObject *context, *place, *seen = PyObject_GetAttr(self->recorder, seen_name);
    int done = 0;
    if (seen != NULL && PyLong_AsLong(seen) >= 0 && (done = find_context(self, call, &context, &place)) == 1) {
        if (add_row(self, context, seen, -1, -1) && report(self->unrecorded, call, place)) {
            done = -1;
        }
        Py_DECREF(context);
        Py_DECREF(place);
    }
    Py_XDECREF(seen);
    self->own_ns += now_ns() - call->entered;
    return done;
}

/* Why no call of this operator is wanted in this step: 1 with a new reference, 1 with NULL if all are; 0 where Python
 * must look; -1 with an exception. */
static int unwanted(Handler *self, Entry *entry, PyObject **reason) {
    NAME(everything, "everything") { return 0; }
    NAME(asked, "unwanted") { return 0; }
    *reason = NULL;
    if (entry->silent || is_true(self->selection, everything)) {
        return 1;
    }
    *reason = PyObject_CallMethodOneArg(self->selection, asked, entry->plan);
    if (*reason == NULL) {
        return interrupted() ? -1 : 0;
    }
    if (!PyUnicode_CheckExact(*reason) || PyUnicode_GET_LENGTH(*reason) == 0) { /* it depends on the module */
        Py_CLEAR(*reason);
        return 0;
    }
    return 1;
}

/* 1 with the result or an exception; 0 where nothing was done. */
static int handle(Handler *self, Call *call, PyObject **out) {
    NAME(is_cpu, "is_cpu") { return 0; }
    Entry *entry = call->entry;
    *out = NULL;
    PyObject *first = PyTuple_GET_SIZE(call->args) ? PyTuple_GET_ITEM(call->args, 0) : NULL, *reason;
    if (first == NULL || !is_tensor(first) || !is_true(first, is_cpu)) {
        return 0;
    }
    int done = unwanted(self, entry, &reason);
    if (done != 1) {
        return done != 0;
    }
    int passes = entry->silent || reason != NULL;
    if (try_lock(self) != 1) {
        Py_XDECREF(reason);
        return 0;
    }
    PyObject *lock = Py_NewRef(self->lock);
    int way = self->way, recording = way == RECORDING; /* it may have been stopped until now */
    if (way == OFF || (!passes && !recording && !entry->fresh && !entry->in_place)) {
        done = 0;
    } else if (passes) {
        done = pass_silently(self, entry, reason, call->entered);
    } else if (recording) {
        done = record(self, call);
    } else {
        done = entry->fresh ? compare_fresh(self, call, out) : compare_in_place(self, call, out);
    }
    if (recording) {
        unlock(lock); /* nobody else waits while it runs */
    }
    if (done > 0 && (passes || recording)) {
        *out = run_operator(entry->run, call->args, call->kwargs);
    }
    if (!recording) {
        unlock(lock);
    }
    Py_XDECREF(reason);
    Py_DECREF(lock);
    return done != 0;
}

static int all_plain(PyObject *types) {
    Py_ssize_t n = PySequence_Fast_GET_SIZE(types);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!is_tensor_type(PySequence_Fast_GET_ITEM(types, i))) {
            return 0;
        }
    }
    return 1;
}

/* A new reference, or NULL. */
static PyObject *known(Handler *self, PyObject *func) {
    PyObject *id = PyLong_FromVoidPtr(func);
    PyObject *capsule = id == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(self->entries, id));
    Py_XDECREF(id);
    return capsule;
}

/* The mode's method in Python, with the arguments as they came. */
static PyObject *in_python(PyObject *mode, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    NAME(method_name, "__torch_dispatch__") { return NULL; }
    PyObject *given[6] = {NULL, mode};
    Py_ssize_t n_all = n + (names == NULL ? 0 : PyTuple_GET_SIZE(names));
    if (n_all > 4) {
        return wrong_count("__torch_dispatch__");
    }
    for (Py_ssize_t i = 0; i < n_all; i++) {
        given[2 + i] = args[i];
    }
    PyObject *method = PyObject_GetAttr((PyObject *)Py_TYPE(mode), method_name);
    if (method == NULL) {
        return NULL;
    }
    PyObject *out = PyObject_Vectorcall(method, given + 1, (size_t)(n + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
    Py_DECREF(method);
    return out;
}

/* As `handle`, of a call as torch hands it over. */
static int try_quickly(Handler *self, PyObject *const *args, Py_ssize_t n, PyObject **out) {
    PyObject *types = args[1], *below = NULL;
    Call call = {NULL, NULL, n > 2 ? Py_NewRef(args[2]) : PyTuple_New(0), NULL, 0};
    call.kwargs = n > 3 && args[3] != Py_None ? Py_NewRef(args[3]) : PyDict_New();
    int done = 0;
    if (call.args != NULL && call.kwargs != NULL && PyTuple_CheckExact(call.args) && PyDict_CheckExact(call.kwargs) &&
        (PyTuple_Check(types) || PyList_Check(types)) && all_plain(types) &&
        (call.known = known(self, args[0])) != NULL) {
        call.entered = now_ns();
        call.entry = PyCapsule_GetPointer(call.known, "entry");
        below = PyObject_CallNoArgs(self->n_modes_below);
        if (call.entry != NULL && below != NULL && PyLong_AsLong(below) == 0) {
            done = handle(self, &call, out);
        }
    }
    Py_XDECREF(below);
    Py_XDECREF(call.known);
    Py_XDECREF(call.args);
    Py_XDECREF(call.kwargs);
    return done;
}

/* mode.__torch_dispatch__(func, types, args=(), kwargs=None) */
static PyObject *dispatch(PyObject *mode, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    NAME(quick, "quick") { return NULL; }
    PyObject *self = PyObject_GetAttr(mode, quick), *out = NULL;
    int done = 0;
    /* It has none where it went blind meanwhile, and an empty one where the garbage collector has been here. */
    if (self != NULL && Py_IS_TYPE(self, handler_type) && ((Handler *)self)->way != OFF && names == NULL && n >= 2 &&
        n <= 4) {
        done = try_quickly((Handler *)self, args, n, &out);
    }
    Py_XDECREF(self);
    if (!done && !interrupted()) {
        out = in_python(mode, args, n, names);
    }
    return out;
}

static PyMethodDef dispatch_definition = {"__torch_dispatch__", (PyCFunction)(void (*)(void))dispatch,
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
    apply(n_modes_below) apply(places) apply(selection) apply(recorder) apply(numbers) apply(contexts)    \
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
    self->minus_one = PyFloat_FromDouble(-1.0);
#define TAKE(name)                                                                                                     \
    if ((self->name = Py_XNewRef(kwargs == NULL ? NULL : PyDict_GetItemString(kwargs, #name))) == NULL) {              \
        PyErr_SetString(PyExc_TypeError, "Handler: " #name " is missing");                                            \
        Py_DECREF(self);                                                                                               \
        return NULL;                                                                                                   \
    }
    FIELDS(TAKE)
    if (self->entries == NULL || self->minus_one == NULL || !is_places(self->places) || !PyDict_Check(self->contexts) ||
        !PyList_Check(self->rows) || !PyAnySet_Check(self->suspects) || !PyDict_Check(self->spares) ||
        !PyIter_Check(self->numbers)) {
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
    Py_CLEAR(self->minus_one);
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
