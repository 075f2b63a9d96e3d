/* Fast path of `__torch_dispatch__` in a recording: calls on plain tensors of the CPU whose rows are known.
 *
 * It does what recording/call_recorder.py does, and leaves every other call to it: before anything is done, or after the
 * program's own call, where a result is of another kind. tests/recording/test_native_rows.py holds the two against each
 * other.
 */

#include "dispatch.h"
#include "tensor_rows.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

enum { NO_KERNEL = -1, MAX_ROWS = 0xFFFF, LOOK_EVERY = 64, CALL_BYTES = 20, N_SLOTS = 6, N_COLUMNS = 6 };
enum { IS_RUNNING, IS_BUSY, STEP, HAS_RECORDED, IS_UNSEEN, IS_WATCHING };

typedef struct {
    PyObject *func, *plan, *run, *index; /* owned */
    int is_watched; /* Python watches some of its calls; see recording/undeclared_writes.py */
} RecordedOperator;

struct SrCallRows {
    PyObject_HEAD
    PyObject *rows;        /* TensorRows */
    PyObject *operators;   /* dict: address of an operator to its place in `learnt` */
    PyObject *state;       /* `State` of recording/native_calls.py */
    PyObject *selection, *origins, *n_modes_below, *function_mode_on, *profiler_on;
    PyObject *acquire, *release; /* bound methods of a lock */
    PyObject *device;      /* "cpu" */
    PyObject *contexts;    /* dict: key to number */
    PyObject *occurrences; /* dict: (number of the operator, module, phase) to calls so far */
    PyObject *calls, *inputs, *results, *rungs, *samples, *row_rungs; /* bytearrays */
    PyObject *new_context; /* callable(plan, origin, device, args, kwargs): number of a context */
    PyObject *conclude;    /* callable(origin, inputs, plan, args, kwargs, out): record a call that has run */
    PyObject *raised;      /* callable(plan, args, kwargs): the program's call raised */
    PyObject *failed;      /* callable(plan, error): a call could not be recorded */
    PyObject *look;        /* callable(): called after each 64 calls */
    PyObject *schedule;    /* WatchSchedule */
    SrContextCache *cache;
    RecordedOperator *learnt;
    Py_ssize_t n_learnt;
    Py_ssize_t everything, slots[N_SLOTS];
    Py_ssize_t n_running; /* calls of the program that were made here and have not ended */
};

static PyTypeObject *call_rows_type;

int sr_is_call_rows(PyObject *value) { return value != NULL && Py_IS_TYPE(value, call_rows_type); }

static PyObject *record_state(const SrCallRows *self, int which) { return sr_slot(self->state, self->slots[which]); }

static void record_set_state(SrCallRows *self, int which, PyObject *value) {
    PyObject **slot = (PyObject **)((char *)self->state + self->slots[which]);
    Py_XSETREF(*slot, Py_NewRef(value));
}

static int record_is(PyObject *callable, PyObject *wanted) {
    PyObject *answer = PyObject_CallNoArgs(callable);
    Py_XDECREF(answer);
    return answer == wanted;
}

static int record_has_modes_below(SrCallRows *self) {
    PyObject *below = PyObject_CallNoArgs(self->n_modes_below);
    int none = below != NULL && PyLong_AsLong(below) == 0;
    Py_XDECREF(below);
    return !none;
}

static RecordedOperator *record_operator(SrCallRows *self, PyObject *func) {
    PyObject *id = PyLong_FromVoidPtr(func);
    PyObject *place = id == NULL ? NULL : PyDict_GetItemWithError(self->operators, id);
    Py_XDECREF(id);
    return place == NULL ? NULL : self->learnt + PyLong_AsSsize_t(place);
}

/* Take the lock and become busy: 1; 0 where another call of this thread is being recorded, recording has ended, or memory may
 * be written to unseen. */
static int record_enter(SrCallRows *self) {
    PyObject *got = PyObject_CallNoArgs(self->acquire);
    if (got == NULL) {
        return 0;
    }
    Py_DECREF(got);
    if (record_state(self, IS_RUNNING) == Py_True && record_state(self, IS_BUSY) == Py_False &&
        record_state(self, IS_UNSEEN) == Py_False) {
        record_set_state(self, IS_BUSY, Py_True);
        return 1;
    }
    Py_XDECREF(PyObject_CallNoArgs(self->release));
    return 0;
}

/* An exception that is set stays set. */
static void record_leave(SrCallRows *self, PyObject *release) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    record_set_state(self, IS_BUSY, Py_False);
    Py_XDECREF(PyObject_CallNoArgs(release));
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
}

/* What is known before the call: its origin and the rows of its inputs. A fallback where Python has to look. */
static sr_result record_before(SrCallRows *self, const RecordedOperator *operator, SrCall *call, PyObject **inputs) {
    if (!record_enter(self)) {
        return sr_failed();
    }
    PyObject *release = Py_NewRef(self->release);
    sr_result done = SR_FALLBACK;
    *inputs = NULL;
    if (sr_find_origin((SrOrigins *)self->origins, 0, &call->origin) == SR_DONE) {
        *inputs = sr_rows_of_inputs(self->rows, call->args, call->kwargs);
        /* Last, since it counts the call: one that is left to Python is counted there. */
        int is_left = *inputs == NULL || (operator->is_watched && sr_is_next_watched(self->schedule, operator->index, call->args, call->kwargs));
        done = is_left ? SR_FALLBACK : SR_DONE;
        if (done != SR_DONE) {
            sr_drop_origin(&call->origin);
            Py_CLEAR(*inputs);
        }
    }
    record_leave(self, release);
    Py_DECREF(release);
    return done == SR_DONE ? done : sr_failed();
}

static PyObject *record_origin(const SrCall *call) {
    return PyTuple_Pack(3, call->origin.module, call->origin.phase, call->origin.site);
}

/* The number of the call's context: -1 with an exception. */
static long long record_context(SrCallRows *self, const RecordedOperator *operator, SrCall *call) {
    long long number = -1;
    if (sr_context_number(self->cache, self->contexts, operator->index, self->device, &call->origin, call->args, call->kwargs, 1, &number)) {
        return number;
    }
    PyObject *origin = PyErr_Occurred() ? NULL : record_origin(call);
    PyObject *given[] = {operator->plan, origin, self->device, call->args, call->kwargs};
    PyObject *found = origin == NULL ? NULL : PyObject_Vectorcall(self->new_context, given, 5, NULL);
    number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(origin);
    Py_XDECREF(found);
    return number;
}

/* How often the operator was called before in this module, phase and step: -1 with an exception. */
static long long record_occurrence(SrCallRows *self, const RecordedOperator *operator, const SrCall *call) {
    PyObject *key = PyTuple_Pack(3, operator->index, call->origin.module, call->origin.phase);
    PyObject *before = key == NULL ? NULL : PyDict_GetItemWithError(self->occurrences, key);
    long long n = before == NULL ? 0 : PyLong_AsLongLong(before);
    PyObject *after = PyErr_Occurred() ? NULL : PyLong_FromLongLong(n + 1);
    int failed = after == NULL || PyDict_SetItem(self->occurrences, key, after);
    Py_XDECREF(after);
    Py_XDECREF(key);
    return failed ? -1 : n;
}

static int record_append_inputs(SrCallRows *self, PyObject *inputs) {
    Py_ssize_t n = Py_MIN(PyList_GET_SIZE(inputs), MAX_ROWS);
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t row = sr_row_number(self->rows, PyList_GET_ITEM(inputs, i));
        if ((row == -1 && PyErr_Occurred()) || sr_append(self->inputs, &row, sizeof row)) {
            return -1;
        }
    }
    return (int)n;
}

/* A row of `CALL` of recording/model.py. */
static int record_append_call(SrCallRows *self, long long context, long long occurrence, Py_ssize_t n_results, int n_inputs) {
    PyObject *step = record_state(self, STEP);
    int32_t numbers[] = {step == NULL ? -1 : (int32_t)PyLong_AsLong(step), (int32_t)context, (int32_t)occurrence, NO_KERNEL};
    uint16_t sizes[] = {(uint16_t)n_results, (uint16_t)n_inputs};
    char row[CALL_BYTES];
    memcpy(row, numbers, sizeof numbers);
    memcpy(row + sizeof numbers, sizes, sizeof sizes);
    return PyErr_Occurred() ? -1 : sr_append(self->calls, row, sizeof row);
}

/* Done; a fallback, without anything done, where Python has to record the call; an error with an exception. */
static sr_result record_rows(SrCallRows *self, const RecordedOperator *operator, SrCall *call, PyObject *inputs, PyObject *out) {
    Py_ssize_t before = PyByteArray_GET_SIZE(self->results);
    long long base = PyList_GET_SIZE(inputs) ? sr_row_number(self->rows, PyList_GET_ITEM(inputs, 0)) : NO_KERNEL;
    if (base == -1 && PyErr_Occurred()) {
        return SR_ERROR;
    }
    sr_result done = sr_add_rows(self->rows, operator->index, call->args, out, base);
    if (done != SR_DONE) {
        return done;
    }
    Py_ssize_t n_results = (PyByteArray_GET_SIZE(self->results) - before) / SR_ROW_BYTES;
    if (n_results > MAX_ROWS) {
        PyErr_Format(PyExc_OverflowError, "%zd tensors in one call", n_results);
        return SR_ERROR;
    }
    long long context = record_context(self, operator, call);
    long long occurrence = PyErr_Occurred() ? -1 : record_occurrence(self, operator, call);
    int n_inputs = occurrence < 0 ? -1 : record_append_inputs(self, inputs);
    if (n_inputs < 0 || record_append_call(self, context, occurrence, n_results, n_inputs)) {
        return SR_ERROR;
    }
    record_set_state(self, HAS_RECORDED, Py_True);
    if (PyByteArray_GET_SIZE(self->calls) / CALL_BYTES % LOOK_EVERY == 0 || PyByteArray_GET_SIZE(self->results) >= SR_MANY_ROWS * SR_ROW_BYTES) {
        PyObject *looked = PyObject_CallNoArgs(self->look);
        Py_XDECREF(looked);
        return looked == NULL ? SR_ERROR : SR_DONE;
    }
    return SR_DONE;
}

/* Record a call that has run; -1 with an exception that must reach the program. */
static int record_after(SrCallRows *self, const RecordedOperator *operator, SrCall *call, PyObject *inputs, PyObject *out) {
    if (!record_enter(self)) {
        return sr_interrupted() ? -1 : 0;
    }
    PyObject *release = Py_NewRef(self->release);
    PyObject *columns[N_COLUMNS] = {self->calls, self->inputs, self->results, self->rungs, self->samples, self->row_rungs};
    Py_ssize_t sizes[N_COLUMNS];
    for (int i = 0; i < N_COLUMNS; i++) {
        sizes[i] = PyByteArray_GET_SIZE(columns[i]);
    }
    sr_result done = record_rows(self, operator, call, inputs, out);
    if (done == SR_ERROR) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
        /* Half a call must not stay. A column that is shorter was written meanwhile. */
        for (int i = 0; i < N_COLUMNS; i++) {
            if (PyByteArray_GET_SIZE(columns[i]) > sizes[i] && PyByteArray_Resize(columns[i], sizes[i])) {
                PyErr_Clear();
            }
        }
        PyObject *given[] = {operator->plan, error};
        PyObject *noted = PyObject_Vectorcall(self->failed, given, 2, NULL);
        Py_XDECREF(noted);
        int reaches = type != NULL && !PyErr_GivenExceptionMatches(type, PyExc_Exception);
        if (reaches) {
            PyErr_Clear();
            PyErr_Restore(type, error, trace);
        } else {
            Py_XDECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(trace);
            reaches = sr_interrupted();
        }
        record_leave(self, release);
        Py_DECREF(release);
        return reaches ? -1 : 0;
    }
    record_leave(self, release);
    Py_DECREF(release);
    if (done == SR_FALLBACK) {
        PyObject *origin = record_origin(call);
        PyObject *given[] = {origin, inputs, operator->plan, call->args, call->kwargs, out};
        PyObject *concluded = origin == NULL ? NULL : PyObject_Vectorcall(self->conclude, given, 6, NULL);
        Py_XDECREF(origin);
        Py_XDECREF(concluded);
        return concluded == NULL && sr_interrupted() ? -1 : 0;
    }
    return 0;
}

/* Done, with the result or an exception of the operator; or a fallback, where nothing was done. */
static sr_result record_call(SrCallRows *self, const RecordedOperator *operator, SrCall *call, PyObject **out) {
    PyObject *inputs;
    sr_result done = record_before(self, operator, call, &inputs);
    if (done != SR_DONE) {
        return done;
    }
    self->n_running++;
    *out = PyObject_Call(operator->run, call->args, PyDict_GET_SIZE(call->kwargs) ? call->kwargs : NULL);
    self->n_running--;
    if (*out == NULL) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyObject *given[] = {operator->plan, call->args, call->kwargs};
        Py_XDECREF(PyObject_Vectorcall(self->raised, given, 3, NULL));
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    } else if (record_after(self, operator, call, inputs, *out)) {
        Py_CLEAR(*out);
    }
    Py_DECREF(inputs);
    sr_drop_origin(&call->origin);
    return SR_DONE;
}

sr_result sr_record_call(SrCallRows *self, PyObject *const *args, Py_ssize_t n, PyObject **out) {
    *out = NULL;
    if (self->state == NULL || record_state(self, IS_RUNNING) != Py_True || !sr_are_plain_types(args[1]) ||
        record_state(self, IS_WATCHING) == Py_True || sr_slot(self->selection, self->everything) != Py_True) {
        return SR_FALLBACK;
    }
    RecordedOperator *found = record_operator(self, args[0]);
    if (found == NULL || !record_is(self->function_mode_on, Py_False) || !record_is(self->profiler_on, Py_False) ||
        record_has_modes_below(self)) {
        return sr_failed();
    }
    RecordedOperator operator = *found; /* another thread may learn one meanwhile, which moves them */
    SrCall call = {.args = n > 2 ? Py_NewRef(args[2]) : PyTuple_New(0),
                   .kwargs = n > 3 && args[3] != Py_None ? Py_NewRef(args[3]) : PyDict_New()};
    sr_result done = SR_FALLBACK;
    if (call.args != NULL && call.kwargs != NULL && PyTuple_CheckExact(call.args) && PyDict_CheckExact(call.kwargs)) {
        Py_INCREF((PyObject *)self);
        done = record_call(self, &operator, &call, out);
        Py_DECREF((PyObject *)self);
    }
    Py_XDECREF(call.args);
    Py_XDECREF(call.kwargs);
    return done;
}

/* learn(operator, plan, run, index, whether some of its calls are watched): its calls may come here. */
static PyObject *record_learn(SrCallRows *self, PyObject *args) {
    PyObject *func, *plan, *run, *index;
    int is_watched;
    if (!PyArg_ParseTuple(args, "OOOO!p:learn", &func, &plan, &run, &PyLong_Type, &index, &is_watched)) {
        return NULL;
    }
    PyObject *id = PyLong_FromVoidPtr(func), *place = PyLong_FromSsize_t(self->n_learnt);
    RecordedOperator *more = PyMem_Realloc(self->learnt, (size_t)(self->n_learnt + 1) * sizeof *more);
    if (more != NULL) {
        self->learnt = more;
    }
    int failed = id == NULL || place == NULL || more == NULL || PyDict_SetItem(self->operators, id, place);
    if (!failed) {
        self->learnt[self->n_learnt++] = (RecordedOperator){Py_NewRef(func), Py_NewRef(plan), Py_NewRef(run), Py_NewRef(index), is_watched};
    }
    Py_XDECREF(id);
    Py_XDECREF(place);
    if (failed) {
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

/* forget(operator): its calls go to Python from here on. */
static PyObject *record_forget(SrCallRows *self, PyObject *func) {
    PyObject *id = PyLong_FromVoidPtr(func);
    int is_there = id == NULL ? -1 : PyDict_Contains(self->operators, id);
    int failed = is_there < 0 || (is_there && PyDict_DelItem(self->operators, id));
    Py_XDECREF(id);
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *record_bind(SrCallRows *self, PyObject *mode) { return sr_bind_method((PyObject *)self, mode); }

/* guard(acquire, release): another lock, in a forked child. */
static PyObject *record_guard(SrCallRows *self, PyObject *args) {
    PyObject *acquire, *release;
    if (!PyArg_ParseTuple(args, "OO:guard", &acquire, &release)) {
        return NULL;
    }
    Py_XSETREF(self->acquire, Py_NewRef(acquire));
    Py_XSETREF(self->release, Py_NewRef(release));
    Py_RETURN_NONE;
}

#define RECORD_FIELDS(apply)                                                                                           \
    apply(rows) apply(state) apply(selection) apply(origins) apply(n_modes_below) apply(function_mode_on)              \
        apply(profiler_on) apply(acquire) apply(release) apply(device) apply(contexts) apply(occurrences) apply(calls) \
            apply(inputs) apply(results) apply(rungs) apply(samples) apply(row_rungs) apply(new_context)               \
                apply(conclude) apply(raised) apply(failed) apply(look) apply(schedule)

/* Where the slots of the state lie; -1 with an exception. */
static int record_find_slots(SrCallRows *self) {
    static const char *const names[N_SLOTS] = {"running", "busy", "step", "has_recorded", "unseen", "watching"};
    self->everything = sr_slot_offset(Py_TYPE(self->selection), "everything");
    for (int i = 0; i < N_SLOTS && self->everything >= 0; i++) {
        if ((self->slots[i] = sr_slot_offset(Py_TYPE(self->state), names[i])) < 0) {
            return -1;
        }
    }
    return self->everything < 0 ? -1 : 0;
}

static PyObject *record_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args) || kwargs == NULL) {
        PyErr_SetString(PyExc_TypeError, "CallRows: arguments by name only");
        return NULL;
    }
    SrCallRows *self = (SrCallRows *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
#define RECORD_TAKE(name)                                                                                              \
    if ((self->name = Py_XNewRef(PyDict_GetItemString(kwargs, #name))) == NULL) {                                      \
        PyErr_SetString(PyExc_TypeError, "CallRows: " #name " is missing");                                            \
        Py_DECREF(self);                                                                                               \
        return NULL;                                                                                                   \
    }
    RECORD_FIELDS(RECORD_TAKE)
    self->cache = sr_new_context_cache();
    self->operators = PyDict_New();
    if (!sr_is_tensor_rows(self->rows) || !sr_is_origins(self->origins) || !PyDict_Check(self->contexts) ||
        !PyDict_Check(self->occurrences) || !PyByteArray_Check(self->calls) || !PyByteArray_Check(self->inputs) ||
        !PyByteArray_Check(self->results) || !PyByteArray_Check(self->rungs) || !PyByteArray_Check(self->samples) ||
        !PyByteArray_Check(self->row_rungs) || !sr_is_watch_schedule(self->schedule)) {
        PyErr_SetString(PyExc_TypeError, "CallRows: an argument is of the wrong type");
    }
    if (PyErr_Occurred() || self->cache == NULL || self->operators == NULL || record_find_slots(self)) {
        Py_DECREF(self);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static int record_traverse(SrCallRows *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
#define RECORD_VISIT(name) Py_VISIT(self->name);
    RECORD_FIELDS(RECORD_VISIT)
    for (Py_ssize_t i = 0; i < self->n_learnt; i++) {
        Py_VISIT(self->learnt[i].func);
        Py_VISIT(self->learnt[i].plan);
        Py_VISIT(self->learnt[i].run);
    }
    return sr_visit_context_cache(self->cache, visit, arg);
}

static int record_clear(SrCallRows *self) {
    Py_CLEAR(self->operators); /* no call comes here any more */
    Py_ssize_t n = self->n_learnt;
    self->n_learnt = 0;
#define RECORD_CLEAR(name) Py_CLEAR(self->name);
    RECORD_FIELDS(RECORD_CLEAR)
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_DECREF(self->learnt[i].func);
        Py_DECREF(self->learnt[i].plan);
        Py_DECREF(self->learnt[i].run);
        Py_DECREF(self->learnt[i].index);
    }
    SrContextCache *cache = self->cache;
    self->cache = NULL;
    sr_drop_context_cache(cache);
    return 0;
}

static void record_dealloc(SrCallRows *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    record_clear(self);
    PyMem_Free(self->learnt);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef record_methods[] = {
    {"bind", (PyCFunction)record_bind, METH_O, NULL},
    {"learn", (PyCFunction)record_learn, METH_VARARGS, NULL},
    {"guard", (PyCFunction)record_guard, METH_VARARGS, NULL},
    {"forget", (PyCFunction)record_forget, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef record_members[] = {
    {"n_running", T_PYSSIZET, offsetof(struct SrCallRows, n_running), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot record_slots[] = {
    {Py_tp_new, record_new},     {Py_tp_dealloc, record_dealloc}, {Py_tp_traverse, record_traverse},
    {Py_tp_clear, record_clear}, {Py_tp_methods, record_methods}, {Py_tp_members, record_members},
    {0, NULL},
};

static PyType_Spec record_spec = {
    .name = "shadowrun.native._core.CallRows",
    .basicsize = sizeof(SrCallRows),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = record_slots,
};

int sr_add_call_rows_type(PyObject *module) {
    PyObject *type = PyType_FromSpec(&record_spec);
    call_rows_type = (PyTypeObject *)type; /* held by the module, which is never unloaded */
    return type == NULL || PyModule_AddObjectRef(module, "CallRows", type) ? -1 : 0;
}
