/* Fast path of `__torch_dispatch__` in a recording: calls on plain tensors whose rows are known, on the CPU or an accelerator.
 *
 * It does what recording/call_recorder.py does, and leaves every other call to it: before anything is done, or after the
 * program's own call, where a result is of another kind. tests/recording/test_native_rows.py holds the two against each
 * other.
 */

#include "dispatch.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

enum { NO_KERNEL = -1, MAX_ROWS = 0xFFFF, FLUSH_EVERY = 16, CALL_BYTES = 20, N_SLOTS = 6, N_COLUMNS = 6 };
enum { IS_RUNNING, IS_BUSY, STEP, HAS_RECORDED, IS_UNSEEN, IS_WATCHING };

typedef struct {
    SrHandler head;
    PyObject *rows;        /* TensorRows */
    PyObject *state;       /* `State` of recording/native_calls.py */
    PyObject *occurrences; /* dict: (number of the operator, module, phase) to calls so far */
    PyObject *calls, *inputs, *results, *rungs, *samples, *row_rungs; /* bytearrays */
    PyObject *new_context; /* callable(plan, origin, device, args, kwargs): number of a context */
    PyObject *conclude;    /* callable(origin, inputs, device, plan, args, kwargs, out): record a call that has run */
    PyObject *raised;      /* callable(plan, args, kwargs): the program's call raised */
    PyObject *failed;      /* callable(plan, error): a call could not be recorded */
    PyObject *flush;       /* callable(): called after each 16 calls */
    PyObject *schedule;    /* WatchSchedule */
    PyObject *device_name; /* callable(tensor): its device's, interned */
    PyObject *may_record;  /* callable(): calls on accelerators may be recorded here */
    PyObject *names[SR_MAX_DEVICE_TYPES]; /* owned: what `device_name` answered, by type */
    Py_ssize_t slots[N_SLOTS];
    Py_ssize_t n_running; /* calls of the program that were made here and have not ended */
} RecordHandler;

static PyObject *record_state(const RecordHandler *self, int which) { return sr_slot(self->state, self->slots[which]); }

static void record_set_state(RecordHandler *self, int which, PyObject *value) {
    PyObject **slot = (PyObject **)((char *)self->state + self->slots[which]);
    Py_XSETREF(*slot, Py_NewRef(value));
}

/* Take the lock and become busy: 1; 0 where another call of this thread is being recorded, recording has ended, or memory may
 * be written to unseen. */
static int record_enter(RecordHandler *self) {
    PyObject *got = PyObject_CallNoArgs(self->head.acquire);
    if (got == NULL) {
        return 0;
    }
    Py_DECREF(got);
    if (record_state(self, IS_RUNNING) == Py_True && record_state(self, IS_BUSY) == Py_False &&
        record_state(self, IS_UNSEEN) == Py_False) {
        record_set_state(self, IS_BUSY, Py_True);
        return 1;
    }
    Py_XDECREF(PyObject_CallNoArgs(self->head.release));
    return 0;
}

static void record_leave(RecordHandler *self, PyObject *release) {
    record_set_state(self, IS_BUSY, Py_False);
    sr_release(release);
}

/* Whether a call on an accelerator is recorded here, and if so, the name of its device. */
static int record_on_device(RecordHandler *self, SrCall *call, const SrOnDevice *found) {
    /* Python notes the state of the generator before the first draw. */
    if (call->operator->is_random || found->type < 0 || found->type >= SR_MAX_DEVICE_TYPES || !sr_answers(self->may_record, Py_True)) {
        return 0;
    }
    PyObject **name = &self->names[found->type];
    if (*name == NULL) {
        *name = PyObject_CallOneArg(self->device_name, found->tensor);
    }
    call->device = *name;
    return *name != NULL;
}

/* Whether all inputs are on the CPU and the result may be elsewhere. */
static int record_leaves_cpu(SrCall *call) {
    SR_NAME(device, "device") { return 1; }
    SR_NAME(type, "type") { return 1; }
    PyObject *wanted = PyDict_GET_SIZE(call->kwargs) ? PyDict_GetItemWithError(call->kwargs, device) : NULL;
    if (wanted == NULL || wanted == Py_None) {
        return PyErr_Occurred() != NULL;
    }
    PyObject *name = PyObject_GetAttr(wanted, type);
    int stays = name != NULL && PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, "cpu") == 0;
    Py_XDECREF(name);
    PyErr_Clear();
    return !stays;
}

/* What is known before the call: its origin and the rows of its inputs. A fallback where Python has to look. */
static sr_result record_before(RecordHandler *self, SrCall *call, PyObject **inputs) {
    if (!record_enter(self)) {
        return sr_failed();
    }
    PyObject *release = Py_NewRef(self->head.release);
    sr_result done = SR_FALLBACK;
    *inputs = NULL;
    if (sr_find_origin((SrOrigins *)self->head.origins, 0, &call->origin) == SR_DONE) {
        SrOnDevice on_device;
        *inputs = sr_rows_of_inputs(self->rows, call->args, call->kwargs, &on_device);
        int is_known = *inputs != NULL && (on_device.tensor == NULL ? !record_leaves_cpu(call) : record_on_device(self, call, &on_device));
        /* Last, since it counts the call: one that is left to Python is counted there. */
        int is_left = !is_known || (call->operator->is_watched && sr_is_next_watched(self->schedule, call->operator->index, call->args, call->kwargs));
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

/* The number of the call's context: -1 with an exception. */
static long long record_context(RecordHandler *self, SrCall *call) {
    long long number = -1;
    PyObject *device = call->device == NULL ? self->head.device : call->device;
    if (sr_context_number(self->head.cache, self->head.contexts, call->operator->index, device, &call->origin, call->args,
                          call->kwargs, 1, &number)) {
        return number;
    }
    PyObject *origin = PyErr_Occurred() ? NULL : sr_pack_origin(call);
    PyObject *given[] = {call->operator->plan, origin, device, call->args, call->kwargs};
    PyObject *found = origin == NULL ? NULL : PyObject_Vectorcall(self->new_context, given, 5, NULL);
    number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(origin);
    Py_XDECREF(found);
    return number;
}

/* How often the operator was called before in this module, phase and step: -1 with an exception. */
static long long record_occurrence(RecordHandler *self, const SrCall *call) {
    PyObject *key = PyTuple_Pack(3, call->operator->index, call->origin.module, call->origin.phase);
    long long before = key == NULL ? -1 : sr_add_count(self->occurrences, key, 1);
    Py_XDECREF(key);
    return before;
}

static int record_append_inputs(RecordHandler *self, PyObject *inputs) {
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
static int record_append_call(RecordHandler *self, long long context, long long occurrence, Py_ssize_t n_results, int n_inputs) {
    PyObject *step = record_state(self, STEP);
    int32_t numbers[] = {step == NULL ? -1 : (int32_t)PyLong_AsLong(step), (int32_t)context, (int32_t)occurrence, NO_KERNEL};
    uint16_t sizes[] = {(uint16_t)n_results, (uint16_t)n_inputs};
    char row[CALL_BYTES];
    memcpy(row, numbers, sizeof numbers);
    memcpy(row + sizeof numbers, sizes, sizeof sizes);
    return PyErr_Occurred() ? -1 : sr_append(self->calls, row, sizeof row);
}

/* Done; a fallback, without anything done, where Python has to record the call; an error with an exception. */
static sr_result record_rows(RecordHandler *self, SrCall *call, PyObject *inputs, PyObject *out) {
    Py_ssize_t before = PyByteArray_GET_SIZE(self->results);
    long long base = PyList_GET_SIZE(inputs) ? sr_row_number(self->rows, PyList_GET_ITEM(inputs, 0)) : NO_KERNEL;
    if (base == -1 && PyErr_Occurred()) {
        return SR_ERROR;
    }
    sr_result done = sr_add_rows(self->rows, call->operator, call->args, out, base);
    if (done != SR_DONE) {
        return done;
    }
    Py_ssize_t n_results = (PyByteArray_GET_SIZE(self->results) - before) / SR_ROW_BYTES;
    if (n_results > MAX_ROWS) {
        PyErr_Format(PyExc_OverflowError, "%zd tensors in one call", n_results);
        return SR_ERROR;
    }
    long long context = record_context(self, call);
    long long occurrence = PyErr_Occurred() ? -1 : record_occurrence(self, call);
    int n_inputs = occurrence < 0 ? -1 : record_append_inputs(self, inputs);
    if (n_inputs < 0 || record_append_call(self, context, occurrence, n_results, n_inputs)) {
        return SR_ERROR;
    }
    record_set_state(self, HAS_RECORDED, Py_True);
    if (PyByteArray_GET_SIZE(self->calls) / CALL_BYTES % FLUSH_EVERY == 0 || PyByteArray_GET_SIZE(self->results) >= SR_MANY_ROWS * SR_ROW_BYTES) {
        PyObject *flushed = PyObject_CallNoArgs(self->flush);
        Py_XDECREF(flushed);
        return flushed == NULL ? SR_ERROR : SR_DONE;
    }
    return SR_DONE;
}

/* Record a call that has run; -1 with an exception that must reach the program. */
static int record_after(RecordHandler *self, SrCall *call, PyObject *inputs, PyObject *out) {
    if (!record_enter(self)) {
        return sr_interrupted() ? -1 : 0;
    }
    PyObject *release = Py_NewRef(self->head.release);
    /* The lengths before, so that half a call can be cut off again. */
    PyObject *columns[N_COLUMNS] = {self->calls, self->inputs, self->results, self->rungs, self->samples, self->row_rungs};
    Py_ssize_t sizes[N_COLUMNS];
    for (int i = 0; i < N_COLUMNS; i++) {
        sizes[i] = PyByteArray_GET_SIZE(columns[i]);
    }
    sr_result done = record_rows(self, call, inputs, out);
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
        PyObject *given[] = {call->operator->plan, error};
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
        PyObject *origin = sr_pack_origin(call);
        PyObject *device = call->device == NULL ? self->head.device : call->device;
        PyObject *given[] = {origin, inputs, device, call->operator->plan, call->args, call->kwargs, out};
        PyObject *concluded = origin == NULL ? NULL : PyObject_Vectorcall(self->conclude, given, 7, NULL);
        Py_XDECREF(origin);
        Py_XDECREF(concluded);
        return concluded == NULL && sr_interrupted() ? -1 : 0;
    }
    return 0;
}

/* Done, with the result or an exception of the operator; or a fallback, where nothing was done. */
static sr_result record_call(RecordHandler *self, SrCall *call, PyObject **out) {
    PyObject *inputs;
    sr_result done = record_before(self, call, &inputs);
    if (done != SR_DONE) {
        return done;
    }
    self->n_running++;
    *out = sr_run_operator(call);
    self->n_running--;
    if (*out == NULL) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyObject *given[] = {call->operator->plan, call->args, call->kwargs};
        Py_XDECREF(PyObject_Vectorcall(self->raised, given, 3, NULL));
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    } else if (record_after(self, call, inputs, *out)) {
        Py_CLEAR(*out);
    }
    Py_DECREF(inputs);
    sr_drop_origin(&call->origin);
    return SR_DONE;
}

static sr_result record_handle(SrHandler *head, SrCall *call, PyObject **out) {
    RecordHandler *self = (RecordHandler *)head;
    if (record_state(self, IS_RUNNING) != Py_True || record_state(self, IS_WATCHING) == Py_True || call->operator->is_left ||
        !sr_selects_all(head)) {
        return SR_FALLBACK;
    }
    if (!sr_answers(head->profiler_on, Py_False) || sr_has_modes_below(head)) {
        return sr_failed();
    }
    return record_call(self, call, out);
}

/* ---- the type ---------------------------------------------------------------------------------------------------------- */

/* add_operator(operator, plan, run, index, whether some of its calls are watched, returns, returns that are arguments, returns
 * without values, has values, is a view, counts as a write, positions of the arguments that are written to, whether it
 * returns the number of a tensor, whether it may draw random numbers): its calls may come here. */
static PyObject *record_add_operator(RecordHandler *self, PyObject *args) {
    PyObject *func, *plan, *run, *index, *written;
    int is_watched, n_returns, has_values, is_view, counts, is_item, is_random;
    unsigned long long aliases, uninitialised;
    if (!PyArg_ParseTuple(args, "OOOO!piKKpppO!pp:add_operator", &func, &plan, &run, &PyLong_Type, &index, &is_watched, &n_returns,
                          &aliases, &uninitialised, &has_values, &is_view, &counts, &PyTuple_Type, &written, &is_item, &is_random)) {
        return NULL;
    }
    int positions[SR_MAX_WRITTEN] = {0}, n_written = sr_read_written(written, SR_MAX_WRITTEN, positions);
    SrOperator *operator = n_written < 0 ? NULL : sr_add_operator(&self->head, func, plan, run, index);
    if (operator == NULL) {
        return NULL;
    }
    operator->n_written = n_written;
    memcpy(operator->written, positions, sizeof positions);
    operator->is_left = 0;
    operator->is_watched = (char)is_watched, operator->has_values = (char)has_values, operator->is_view = (char)is_view;
    operator->counts = (char)counts, operator->is_item = (char)is_item, operator->is_random = (char)is_random;
    operator->n_returns = n_returns, operator->aliases = aliases, operator->uninitialised = uninitialised;
    Py_RETURN_NONE;
}

/* remove_operator(operator): its calls go to Python from here on. */
static PyObject *record_remove_operator(RecordHandler *self, PyObject *func) {
    SrOperator *operator = sr_find_operator(&self->head, func);
    if (operator != NULL) {
        operator->is_left = 1; /* the entry stays: a call of another thread may be using it */
    }
    Py_RETURN_NONE;
}

/* guard(acquire, release): another lock, in a forked child. */
static PyObject *record_guard(RecordHandler *self, PyObject *args) {
    PyObject *acquire, *release;
    if (!PyArg_ParseTuple(args, "OO:guard", &acquire, &release)) {
        return NULL;
    }
    Py_XSETREF(self->head.acquire, Py_NewRef(acquire));
    Py_XSETREF(self->head.release, Py_NewRef(release));
    Py_RETURN_NONE;
}

static const SrField record_fields[] = {
    SR_HANDLER_FIELDS,
    SR_FIELD(RecordHandler, rows),
    SR_FIELD(RecordHandler, state),
    SR_FIELD(RecordHandler, occurrences),
    SR_FIELD(RecordHandler, calls),
    SR_FIELD(RecordHandler, inputs),
    SR_FIELD(RecordHandler, results),
    SR_FIELD(RecordHandler, rungs),
    SR_FIELD(RecordHandler, samples),
    SR_FIELD(RecordHandler, row_rungs),
    SR_FIELD(RecordHandler, new_context),
    SR_FIELD(RecordHandler, conclude),
    SR_FIELD(RecordHandler, raised),
    SR_FIELD(RecordHandler, failed),
    SR_FIELD(RecordHandler, flush),
    SR_FIELD(RecordHandler, schedule),
    SR_FIELD(RecordHandler, device_name),
    SR_FIELD(RecordHandler, may_record),
    {NULL, 0},
};

/* Where the slots of the state lie; -1 with an exception. */
static int record_find_slots(RecordHandler *self) {
    static const char *const names[N_SLOTS] = {"running", "busy", "step", "has_recorded", "unseen", "watching"};
    for (int i = 0; i < N_SLOTS; i++) {
        if ((self->slots[i] = sr_slot_offset(Py_TYPE(self->state), names[i])) < 0) {
            return -1;
        }
    }
    return 0;
}

static int record_start(RecordHandler *self, PyObject *kwargs) {
    self->head.handle = record_handle;
    if (sr_start_handler(&self->head, kwargs, record_fields)) {
        return -1;
    }
    if (!sr_is_tensor_rows(self->rows) || !PyDict_Check(self->occurrences) || !PyByteArray_Check(self->calls) ||
        !PyByteArray_Check(self->inputs) || !PyByteArray_Check(self->results) || !PyByteArray_Check(self->rungs) ||
        !PyByteArray_Check(self->samples) || !PyByteArray_Check(self->row_rungs) || !sr_is_watch_schedule(self->schedule)) {
        return sr_wrong_type((PyObject *)self);
    }
    return record_find_slots(self);
}

static PyObject *record_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    RecordHandler *self = (RecordHandler *)sr_new_by_name(type, args);
    if (self != NULL && record_start(self, kwargs)) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int record_traverse(RecordHandler *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return sr_visit_handler(&self->head, record_fields, visit, arg);
}

static int record_clear(RecordHandler *self) {
    sr_clear_handler(&self->head, record_fields); /* first its operators, so that no call comes here any more */
    for (int i = 0; i < SR_MAX_DEVICE_TYPES; i++) {
        Py_CLEAR(self->names[i]);
    }
    return 0;
}

static PyMethodDef record_methods[] = {
    {"bind", sr_bind_handler, METH_O, NULL},
    {"add_operator", (PyCFunction)record_add_operator, METH_VARARGS, NULL},
    {"guard", (PyCFunction)record_guard, METH_VARARGS, NULL},
    {"remove_operator", (PyCFunction)record_remove_operator, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef record_members[] = {
    {"n_running", T_PYSSIZET, offsetof(RecordHandler, n_running), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot record_slots[] = {
    {Py_tp_new, record_new},     {Py_tp_dealloc, sr_dealloc}, {Py_tp_traverse, record_traverse},
    {Py_tp_clear, record_clear}, {Py_tp_methods, record_methods}, {Py_tp_members, record_members},
    {0, NULL},
};

static PyType_Spec record_spec = {
    .name = "shadowrun.native._core.RecordHandler",
    .basicsize = sizeof(RecordHandler),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = record_slots,
};

int sr_add_record_handler_type(PyObject *module) {
    static PyTypeObject *type;
    return sr_add_type(module, &record_spec, &type) || PyModule_AddIntConstant(module, "MAX_WRITTEN", SR_MAX_WRITTEN) ? -1 : 0;
}
