/* The handler of a comparison: calls on plain CPU tensors, which nearly all calls are.
 *
 * It does what intercept/dispatch.py, replay/replayer.py and recording/recorder.py do; compare_call.c compares a call, and
 * compare_close.c records one whose results differ by no more than its context passes.
 */

#include "compare.h"

#include <string.h>
#include <structmember.h>

#ifdef _WIN32
#include <windows.h>
#else
#include <time.h>
#endif

/* The clock of time.perf_counter_ns. */
long long sr_now_ns(void) {
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

/* Whether the lock was taken; not if another thread holds it, or waits for it. */
static int handler_try_lock(SrCompareHandler *self) {
    PyObject *waiting = PyObject_CallNoArgs(self->waited_for), *got = NULL;
    if (waiting == Py_False) {
        got = PyObject_CallOneArg(self->head.acquire, Py_False);
    }
    int held = got == Py_True;
    Py_XDECREF(waiting);
    Py_XDECREF(got);
    PyErr_Clear();
    return held;
}

/* What a call becomes: recording/recorder.py. */

enum { HANDLER_SLOW_NS = 1000000 };

sr_result sr_find_context(SrCompareHandler *self, SrCall *call) {
    long long start = sr_clock_start(self);
    if (sr_find_origin((SrOrigins *)self->head.origins, 0, &call->origin) != SR_DONE) {
        return sr_failed();
    }
    sr_lap(self, SR_PART_ORIGIN, start);
    start = sr_clock_start(self);
    int found = sr_context_number(self->head.cache, self->head.contexts, call->operator->index, self->head.device, &call->origin, call->args,
                              call->kwargs, 0, &call->context);
    sr_lap(self, SR_PART_CONTEXT, start);
    if (!found) { /* new, or of a kind that only Python knows */
        sr_drop_origin(&call->origin);
        return sr_failed();
    }
    return SR_DONE;
}

int sr_report(PyObject *reporter, SrCall *call) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) {
        PyException_SetTraceback(value, trace);
    }
    PyObject *origin = sr_pack_origin(call);
    PyObject *given[] = {call->operator->plan, call->args, call->kwargs, origin, value};
    PyObject *done = origin == NULL ? NULL : PyObject_Vectorcall(reporter, given, 5, NULL);
    Py_XDECREF(origin);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static double handler_microseconds(long long ns) { return ns < 0 ? -1.0 : (double)ns / 1000; }

int sr_add_row(
    SrCompareHandler *self, long long seq, long long context, PyObject *verdict, long long ref_ns, long long target_ns, double drift) {
    SR_NAME(flush, "_flush_if_due") { return -1; }
    long long verdict_number = PyLong_AsLongLong(verdict);
    if (verdict_number == -1 && PyErr_Occurred()) {
        return -1;
    }
    int failed = sr_write_row((SrRowBuffer *)self->rows, seq, context, verdict_number, handler_microseconds(ref_ns), handler_microseconds(target_ns), drift);
    /* As `_LOOK_AT_CLOCK` of recording/recorder.py: the clock is looked at after each 64 rows. */
    if (!failed && !(seq & 63)) {
        PyObject *done = PyObject_CallMethodNoArgs(self->recorder, flush);
        failed = done == NULL ? -1 : 0;
        Py_XDECREF(done);
    }
    return failed;
}

static int handler_add_row(SrCompareHandler *self, long long context, PyObject *verdict, long long ref_ns, long long target_ns, double drift) {
    long long start = sr_clock_start(self);
    int failed = sr_add_row(self, sr_next_seq((SrRowBuffer *)self->rows), context, verdict, ref_ns, target_ns, drift);
    sr_lap(self, SR_PART_RECORD, start);
    return failed;
}

/* As Comparator.is_slow. */
static int handler_is_slow(SrCompareHandler *self, long long actual_ns, long long expected_ns) {
    double expected = (double)expected_ns, actual = (double)actual_ns;
    return actual >= self->slow_ratio * expected && actual >= expected + HANDLER_SLOW_NS;
}

int sr_needs_look(SrCompareHandler *self, SrCall *call, long long actual_ns, long long expected_ns) {
    return handler_is_slow(self, actual_ns, expected_ns) || PySet_Contains(self->watched, call->operator->index) != 0;
}

int sr_add_match(SrCompareHandler *self, SrCall *call, long long ns, long long other_ns, int *failed) {
    long long actual = self->on_target ? ns : other_ns, expected = self->on_target ? other_ns : ns;
    if (sr_needs_look(self, call, actual, expected)) {
        return 0;
    }
    *failed = handler_add_row(self, call->context, self->matched, expected, actual, self->keeps_drift ? 0.0 : -1.0);
    return 1;
}

/* Count a call that is not compared, by (operator, device, reason), as Recorder.skip; -1 with an exception. */
static int handler_count_skipped(SrCompareHandler *self, PyObject *key) {
    SR_NAME(skipped_name, "_skipped") { return -1; }
    /* Looked up each time: the recorder exchanges the dict when it writes the counts. */
    PyObject *counts = PyObject_GetAttr(self->recorder, skipped_name);
    int failed = counts == NULL || !PyDict_Check(counts) || sr_add_count(counts, key, 1) < 0;
    Py_XDECREF(counts);
    return failed ? -1 : 0;
}

/* A call that is not compared (a view, memory without values, a step that is left out): its origin is noted for the
 * operators of its backward. */
static sr_result handler_note_only(SrCompareHandler *self, SrOperator *operator, PyObject *reason, long long entered) {
    sr_result noted = sr_note_origin((SrOrigins *)self->head.origins, 0);
    sr_lap(self, SR_PART_ORIGIN, entered);
    if (noted != SR_DONE) {
        return sr_failed();
    }
    if (reason == NULL) {
        operator->n_skipped++;
    } else {
        PyObject *key = PyTuple_Pack(3, PyTuple_GET_ITEM(operator->skipped, 0), PyTuple_GET_ITEM(operator->skipped, 1), reason);
        int failed = key == NULL || handler_count_skipped(self, key);
        Py_XDECREF(key);
        if (failed) {
            return sr_failed();
        }
    }
    self->own_ns += sr_now_ns() - entered;
    return SR_DONE;
}

/* Record a call that is not compared, or why it could not be recorded. */
static sr_result handler_record(SrCompareHandler *self, SrCall *call) {
    sr_result done = sr_find_context(self, call);
    if (done == SR_DONE) {
        if (handler_add_row(self, call->context, self->seen_verdict, -1, -1, -1.0) && sr_report(self->unrecorded, call)) {
            done = SR_ERROR;
        }
        sr_drop_origin(&call->origin);
    }
    self->own_ns += sr_now_ns() - call->entered;
    return done;
}

/* Why no call of this operator is selected in this step: done with a new reference, or with NULL if all are. */
static sr_result handler_unwanted(SrCompareHandler *self, SrOperator *operator, PyObject **reason) {
    SR_NAME(asked, "unwanted") { return sr_failed(); }
    *reason = NULL;
    if (operator->route == SR_SILENT || operator->route == SR_PASSING || sr_selects_all(&self->head)) {
        return SR_DONE;
    }
    *reason = PyObject_CallMethodOneArg(self->head.selection, asked, operator->plan);
    if (*reason == NULL) {
        return sr_failed();
    }
    if (!PyUnicode_CheckExact(*reason) || PyUnicode_GET_LENGTH(*reason) == 0) { /* it depends on the module */
        Py_CLEAR(*reason);
        return SR_FALLBACK;
    }
    return SR_DONE;
}

/* Whether a value is no tensor, or one on the CPU, or a list that begins with such a one; `n` counts tensors. */
static int handler_lies_on_cpu(PyObject *value, int *n) {
    if ((PyList_CheckExact(value) || PyTuple_CheckExact(value)) && PySequence_Fast_GET_SIZE(value)) {
        value = PySequence_Fast_GET_ITEM(value, 0);
    }
    if (sr_is_tensor(value)) {
        ++*n;
        return sr_is_cpu_tensor(value);
    }
    return value == Py_None || PyLong_Check(value) || PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) ||
           sr_is_exact(value) == 1;
}

/* Whether it is clear that the call is one of the CPU: see Replayer._role. */
static int handler_is_of_cpu(SrCompareHandler *self, SrCall *call) {
    SR_NAME(device_name, "device") { return 0; }
    Py_ssize_t size = PyTuple_GET_SIZE(call->args), position = 0;
    if (size && sr_is_tensor(PyTuple_GET_ITEM(call->args, 0))) {
        return sr_is_cpu_tensor(PyTuple_GET_ITEM(call->args, 0));
    }
    int n = 0;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (!handler_lies_on_cpu(PyTuple_GET_ITEM(call->args, i), &n)) {
            return 0;
        }
    }
    PyObject *name, *value;
    while (PyDict_Next(call->kwargs, &position, &name, &value)) {
        if (!handler_lies_on_cpu(value, &n)) {
            return 0;
        }
    }
    PyObject *device = PyDict_GetItemWithError(call->kwargs, device_name);
    return device == NULL || device == Py_None || PyObject_RichCompareBool(device, self->head.device, Py_EQ) == 1;
}

/* Whether the program's own profiler records: then Python replays, so that it does not record replays. */
static int handler_is_profiled(SrCompareHandler *self) {
    int is_on = sr_answers(self->head.profiler_on, Py_True);
    PyErr_Clear();
    return is_on;
}

/* Done, with the result or an exception of the operator if this ran it. */
static sr_result handler_treat(SrCompareHandler *self, SrCall *call, PyObject *reason, PyObject **out) {
    SrOperator *operator = call->operator;
    int state = self->state; /* another thread may have ended the comparison */
    if (state == SR_OFF) {
        return SR_FALLBACK;
    }
    if (operator->route == SR_PASSING) {
        operator->n_skipped++;
        return SR_DONE;
    }
    if (operator->route == SR_SILENT || reason != NULL) {
        return handler_note_only(self, operator, reason, call->entered);
    }
    if (state == SR_RECORDING) {
        return handler_record(self, call);
    }
    return operator->route == SR_LONG || handler_is_profiled(self) ? SR_FALLBACK : sr_compare_call(self, call, out);
}

static sr_result handler_handle(SrHandler *head, SrCall *call, PyObject **out) {
    SrCompareHandler *self = (SrCompareHandler *)head;
    SrOperator *operator = call->operator;
    PyObject *reason;
    call->entered = sr_now_ns();
    /* Chains with values of their own need each call that is compared in Python. */
    int follows = self->has_twins && operator->route != SR_PASSING && operator->route != SR_SILENT;
    if (self->state == SR_OFF || follows || (operator->route != SR_PASSING && sr_has_modes_below(head))) {
        return SR_FALLBACK;
    }
    sr_result done = handler_unwanted(self, operator, &reason);
    if (done != SR_DONE) {
        return done;
    }
    if (operator->route != SR_PASSING && !handler_is_of_cpu(self, call)) {
        Py_XDECREF(reason);
        return sr_failed();
    }
    /* Counting and recording take no lock: no other thread runs before they are done. */
    int runs = self->state == SR_RECORDING || operator->route == SR_PASSING, locks = !runs;
    if (locks && !handler_try_lock(self)) {
        Py_XDECREF(reason);
        return SR_FALLBACK;
    }
    PyObject *release = Py_NewRef(head->release); /* a fork in the call exchanges the lock */
    done = handler_treat(self, call, reason, out);
    if (done == SR_DONE && (runs || operator->route == SR_SILENT || reason != NULL)) {
        *out = sr_run_operator(call);
    }
    if (locks) {
        sr_release(release);
    }
    Py_XDECREF(reason);
    Py_DECREF(release);
    return done;
}

/* ---- the type ---------------------------------------------------------------------------------------------------------- */

/* add_operator(operator, plan, run, index, key of skipped calls, route, positions of the arguments that it writes to) */
static PyObject *handler_add_operator(SrCompareHandler *self, PyObject *args) {
    PyObject *func, *plan, *run, *index, *skipped, *written;
    int route;
    if (!PyArg_ParseTuple(args, "OOOO!O!iO!:add_operator", &func, &plan, &run, &PyLong_Type, &index, &PyTuple_Type, &skipped,
                          &route, &PyTuple_Type, &written)) {
        return NULL;
    }
    if (route < 0 || route >= SR_N_ROUTES || PyTuple_GET_SIZE(skipped) != 3) {
        PyErr_SetString(PyExc_ValueError, "add_operator: no such route");
        return NULL;
    }
    int positions[SR_MAX_WRITTEN] = {0}, n_written = sr_read_written(written, SR_MAX_COPIED, positions);
    SrOperator *operator = n_written < 0 ? NULL : sr_add_operator(&self->head, func, plan, run, index);
    if (operator == NULL) {
        return NULL;
    }
    if (operator->skipped == NULL) { /* else it has a plan already, which may be in use */
        operator->route = route;
        operator->skipped = Py_NewRef(skipped);
        operator->n_written = n_written;
        memcpy(operator->written, positions, sizeof positions);
    }
    Py_RETURN_NONE;
}

/* guard(acquire, release, locked): hold a lock for the length of a call, unless another thread waits for it. */
static PyObject *handler_guard(SrCompareHandler *self, PyObject *args) {
    PyObject *acquire, *release, *waited_for;
    if (!PyArg_ParseTuple(args, "OOO:guard", &acquire, &release, &waited_for)) {
        return NULL;
    }
    Py_XSETREF(self->head.acquire, Py_NewRef(acquire));
    Py_XSETREF(self->head.release, Py_NewRef(release));
    Py_XSETREF(self->waited_for, Py_NewRef(waited_for));
    Py_RETURN_NONE;
}

/* collect(counter): add the numbers of calls that were not compared to a dict, and set them to 0. */
static PyObject *handler_collect(SrCompareHandler *self, PyObject *counter) {
    if (!PyDict_Check(counter)) {
        PyErr_SetString(PyExc_TypeError, "collect: into a dict");
        return NULL;
    }
    for (size_t i = 0; i < self->head.room; i++) {
        SrOperator *operator = self->head.operators[i];
        if (operator == NULL || operator->n_skipped == 0) {
            continue;
        }
        if (sr_add_count(counter, operator->skipped, operator->n_skipped) < 0) {
            return NULL;
        }
        operator->n_skipped = 0;
    }
    Py_RETURN_NONE;
}

/* clocks(on): nanoseconds and number of calls of each part since the last call; switches the clocks. */
static PyObject *handler_clocks(SrCompareHandler *self, PyObject *on) {
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
static PyObject *handler_collide(SrCompareHandler *self, PyObject *none) {
    (void)none;
    sr_collide_context_cache(self->head.cache);
    Py_RETURN_NONE;
}

static const SrField handler_fields[] = {
    SR_HANDLER_FIELDS,
    SR_FIELD(SrCompareHandler, recorder),
    SR_FIELD(SrCompareHandler, rows),
    SR_FIELD(SrCompareHandler, matched),
    SR_FIELD(SrCompareHandler, seen_verdict),
    SR_FIELD(SrCompareHandler, watched),
    SR_FIELD(SrCompareHandler, buffers),
    SR_FIELD(SrCompareHandler, make_buffer),
    SR_FIELD(SrCompareHandler, replay),
    SR_FIELD(SrCompareHandler, shares_memory),
    SR_FIELD(SrCompareHandler, conclude),
    SR_FIELD(SrCompareHandler, failed),
    SR_FIELD(SrCompareHandler, unrecorded),
    SR_FIELD(SrCompareHandler, waited_for),
    SR_FIELD(SrCompareHandler, too_large),
    SR_FIELD(SrCompareHandler, bounds),
    SR_FIELD(SrCompareHandler, diff_rows),
    SR_FIELD(SrCompareHandler, verdict_numbers),
    SR_FIELD(SrCompareHandler, tensor_numbers),
    {NULL, 0},
};

static int handler_start(SrCompareHandler *self, PyObject *kwargs) {
    self->head.handle = handler_handle;
    if (sr_start_handler(&self->head, kwargs, handler_fields)) {
        return -1;
    }
    return sr_is_row_buffer(self->rows) && PyAnySet_Check(self->watched) && PyDict_Check(self->buffers) && PyDict_Check(self->bounds) &&
                   PyList_Check(self->diff_rows) && PyDict_Check(self->verdict_numbers) && PyDict_Check(self->tensor_numbers)
               ? 0
               : sr_wrong_type((PyObject *)self);
}

static PyObject *handler_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    SrCompareHandler *self = (SrCompareHandler *)sr_new_by_name(type, args);
    if (self != NULL && handler_start(self, kwargs)) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int handler_traverse(SrCompareHandler *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return sr_visit_handler(&self->head, handler_fields, visit, arg);
}

static int handler_clear(SrCompareHandler *self) {
    self->state = SR_OFF;
    sr_clear_handler(&self->head, handler_fields);
    return 0;
}

static PyMethodDef handler_methods[] = {
    {"bind", sr_bind_handler, METH_O, NULL},
    {"add_operator", (PyCFunction)handler_add_operator, METH_VARARGS, NULL},
    {"guard", (PyCFunction)handler_guard, METH_VARARGS, NULL},
    {"collect", (PyCFunction)handler_collect, METH_O, NULL},
    {"clocks", (PyCFunction)handler_clocks, METH_O, NULL},
    {"collide", (PyCFunction)handler_collide, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef handler_members[] = {
    {"state", T_INT, offsetof(SrCompareHandler, state), 0, NULL},
    {"keeps_drift", T_INT, offsetof(SrCompareHandler, keeps_drift), 0, NULL},
    {"has_twins", T_INT, offsetof(SrCompareHandler, has_twins), 0, NULL},
    {"on_target", T_INT, offsetof(SrCompareHandler, on_target), 0, NULL},
    {"slow_ratio", T_DOUBLE, offsetof(SrCompareHandler, slow_ratio), 0, NULL},
    {"max_bytes", T_DOUBLE, offsetof(SrCompareHandler, max_bytes), 0, NULL},
    {"own_ns", T_LONGLONG, offsetof(SrCompareHandler, own_ns), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot handler_slots[] = {
    {Py_tp_new, handler_new},         {Py_tp_dealloc, sr_dealloc}, {Py_tp_traverse, handler_traverse},
    {Py_tp_clear, handler_clear},     {Py_tp_methods, handler_methods}, {Py_tp_members, handler_members},
    {0, NULL},
};

static PyType_Spec handler_spec = {
    .name = "shadowrun.native._core.CompareHandler",
    .basicsize = sizeof(SrCompareHandler),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = handler_slots,
};

int sr_add_compare_handler_type(PyObject *module) {
    static PyTypeObject *type;
    int failed = sr_add_type(module, &handler_spec, &type);
#define HANDLER_ADD(name) failed = failed || PyModule_AddIntConstant(module, #name, SR_##name);
    HANDLER_ADD(OFF) HANDLER_ADD(COMPARING) HANDLER_ADD(RECORDING) HANDLER_ADD(FRESH) HANDLER_ADD(IN_PLACE)
    HANDLER_ADD(SEVERAL) HANDLER_ADD(SILENT) HANDLER_ADD(PASSING) HANDLER_ADD(LONG) HANDLER_ADD(MAX_COPIED)
    return failed ? -1 : 0;
}
