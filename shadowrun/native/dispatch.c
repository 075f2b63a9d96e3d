/* Fast path of `__torch_dispatch__`: calls on plain CPU tensors, which nearly all calls are.
 *
 * It does what intercept/dispatch.py, replay/replayer.py and replay/same_device.py do, and leaves every other call to them
 * before anything is done. They remain the specification: tests/native/both_ways.py runs both and compares.
 */

#include "dispatch.h"
#include "tensor_rows.h"

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

/* The program's own call. No Python code runs between its line and the operator, so warnings come at that line. */
PyObject *sr_run_operator(const SrCall *call) {
    return PyObject_Call(call->operator->run, call->args, PyDict_GET_SIZE(call->kwargs) ? call->kwargs : NULL);
}

/* By a Python function, so that its warnings come at a line of shadowrun's, which separates them from the program's. */
PyObject *sr_replay(SrHandler *self, PyObject *run, PyObject *args, PyObject *kwargs) {
    PyObject *given[] = {NULL, run, args, kwargs};
    return PyObject_Vectorcall(self->replay, given + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* Whether the lock was taken; not if another thread holds it, or waits for it. */
static int dispatch_try_lock(SrHandler *self) {
    PyObject *waiting = PyObject_CallNoArgs(self->waited_for), *got = NULL;
    if (waiting == Py_False) {
        got = PyObject_CallOneArg(self->acquire, Py_False);
    }
    int held = got == Py_True;
    Py_XDECREF(waiting);
    Py_XDECREF(got);
    PyErr_Clear();
    return held;
}

/* An exception that is set stays set. */
static void dispatch_unlock(PyObject *release) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallNoArgs(release));
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
}

/* Count a call that is not compared, by (operator, device, reason), as Recorder.skip; -1 with an exception. */
static int dispatch_count_skipped(SrHandler *self, PyObject *key) {
    SR_NAME(skipped_name, "_skipped") { return -1; }
    PyObject *counts = PyObject_GetAttr(self->recorder, skipped_name);
    int failed = counts == NULL || !PyDict_Check(counts) || sr_add_count(counts, key, 1);
    Py_XDECREF(counts);
    return failed ? -1 : 0;
}

/* A call that is not compared (a view, memory without values, a step that is left out): its origin is noted for the
 * operators of its backward. */
static sr_result dispatch_note_only(SrHandler *self, SrOperator *operator, PyObject *reason, long long entered) {
    sr_result noted = sr_note_origin((SrOrigins *)self->origins, 0);
    sr_lap(self, SR_PART_ORIGIN, entered);
    if (noted != SR_DONE) {
        return sr_failed();
    }
    if (reason == NULL) {
        operator->n_skipped++;
    } else {
        PyObject *key = PyTuple_Pack(3, PyTuple_GET_ITEM(operator->skipped, 0), PyTuple_GET_ITEM(operator->skipped, 1), reason);
        int failed = key == NULL || dispatch_count_skipped(self, key);
        Py_XDECREF(key);
        if (failed) {
            return sr_failed();
        }
    }
    self->own_ns += sr_now_ns() - entered;
    return SR_DONE;
}

/* Record a call that is not compared, or why it could not be recorded. */
static sr_result dispatch_record(SrHandler *self, SrCall *call) {
    sr_result done = sr_find_context(self, call);
    if (done == SR_DONE) {
        if (sr_add_row(self, call->context, self->seen_verdict, -1, -1) && sr_report(self->unrecorded, call)) {
            done = SR_ERROR;
        }
        sr_drop_origin(&call->origin);
    }
    self->own_ns += sr_now_ns() - call->entered;
    return done;
}

/* Why no call of this operator is selected in this step: done with a new reference, or with NULL if all are. */
static sr_result dispatch_unwanted(SrHandler *self, SrOperator *operator, PyObject **reason) {
    SR_NAME(asked, "unwanted") { return sr_failed(); }
    *reason = NULL;
    if (operator->route == SR_SILENT || operator->route == SR_PASSING || sr_slot(self->selection, self->everything) == Py_True) {
        return SR_DONE;
    }
    *reason = PyObject_CallMethodOneArg(self->selection, asked, operator->plan);
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
static int dispatch_lies_on_cpu(PyObject *value, int *n) {
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
static int dispatch_is_of_cpu(SrHandler *self, SrCall *call) {
    SR_NAME(device_name, "device") { return 0; }
    Py_ssize_t size = PyTuple_GET_SIZE(call->args), position = 0;
    if (size && sr_is_tensor(PyTuple_GET_ITEM(call->args, 0))) {
        return sr_is_cpu_tensor(PyTuple_GET_ITEM(call->args, 0));
    }
    int n = 0;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (!dispatch_lies_on_cpu(PyTuple_GET_ITEM(call->args, i), &n)) {
            return 0;
        }
    }
    PyObject *name, *value;
    while (PyDict_Next(call->kwargs, &position, &name, &value)) {
        if (!dispatch_lies_on_cpu(value, &n)) {
            return 0;
        }
    }
    PyObject *device = PyDict_GetItemWithError(call->kwargs, device_name);
    return device == NULL || device == Py_None || PyObject_RichCompareBool(device, self->device, Py_EQ) == 1;
}

/* Whether the program's own profiler records: then Python replays, so that it does not record replays. */
static int dispatch_is_profiled(SrHandler *self) {
    PyObject *answer = PyObject_CallNoArgs(self->profiler_on);
    Py_XDECREF(answer);
    PyErr_Clear();
    return answer == Py_True;
}

/* Done, with the result or an exception of the operator if this ran it. */
static sr_result dispatch_treat(SrHandler *self, SrCall *call, PyObject *reason, PyObject **out) {
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
        return dispatch_note_only(self, operator, reason, call->entered);
    }
    if (state == SR_RECORDING) {
        return dispatch_record(self, call);
    }
    return operator->route == SR_LONG || dispatch_is_profiled(self) ? SR_FALLBACK : sr_compare_call(self, call, out);
}

/* Done, with the result or an exception in any case; or a fallback, where nothing was done. */
static sr_result dispatch_handle(SrHandler *self, SrCall *call, PyObject **out) {
    SrOperator *operator = call->operator;
    PyObject *reason;
    *out = NULL;
    sr_result done = dispatch_unwanted(self, operator, &reason);
    if (done != SR_DONE) {
        return done;
    }
    if (operator->route != SR_PASSING && !dispatch_is_of_cpu(self, call)) {
        Py_XDECREF(reason);
        return sr_failed();
    }
    /* Counting and recording take no lock: no other thread runs before they are done. */
    int runs = self->state == SR_RECORDING || operator->route == SR_PASSING, locks = !runs;
    if (locks && !dispatch_try_lock(self)) {
        Py_XDECREF(reason);
        return SR_FALLBACK;
    }
    PyObject *release = Py_NewRef(self->release);
    done = dispatch_treat(self, call, reason, out);
    if (done == SR_DONE && (runs || operator->route == SR_SILENT || reason != NULL)) {
        *out = sr_run_operator(call);
    }
    if (locks) {
        dispatch_unlock(release);
    }
    Py_XDECREF(reason);
    Py_DECREF(release);
    return done;
}

/* Whether the program has dispatch modes below shadowrun's. */
static int dispatch_has_modes_below(SrHandler *self) {
    PyObject *below = PyObject_CallNoArgs(self->n_modes_below);
    int none = below != NULL && PyLong_AsLong(below) == 0;
    Py_XDECREF(below);
    return !none;
}

/* Whether a TorchFunctionMode is on. */
static int dispatch_has_function_mode(SrHandler *self) {
    PyObject *answer = PyObject_CallNoArgs(self->function_mode_on);
    Py_XDECREF(answer);
    return answer != Py_False;
}

int sr_are_plain_types(PyObject *types) {
    if (!PyTuple_Check(types) && !PyList_Check(types)) {
        return 0;
    }
    Py_ssize_t n = PySequence_Fast_GET_SIZE(types);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!sr_is_tensor_type(PySequence_Fast_GET_ITEM(types, i))) {
            return 0;
        }
    }
    return 1;
}

/* The mode's method in Python, with the arguments as they came. */
static PyObject *dispatch_in_python(PyObject *mode, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    SR_NAME(method_name, "__torch_dispatch__") { return NULL; }
    PyObject *given[6] = {NULL, mode};
    Py_ssize_t n_all = n + (names == NULL ? 0 : PyTuple_GET_SIZE(names));
    if (n_all > 4) {
        return sr_wrong_count("__torch_dispatch__");
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

/* The same for a call as torch passes it. */
static sr_result dispatch_try(SrHandler *self, PyObject *const *args, Py_ssize_t n, PyObject **out) {
    SrOperator *operator = sr_find_operator(self, args[0]);
    PyObject *types = args[1];
    if (operator == NULL || !sr_are_plain_types(types) ||
        dispatch_has_function_mode(self)) { /* Python hides shadowrun's own calls from it */
        return SR_FALLBACK;
    }
    SrCall call = {.operator = operator, .entered = sr_now_ns()};
    call.args = n > 2 ? Py_NewRef(args[2]) : PyTuple_New(0);
    call.kwargs = n > 3 && args[3] != Py_None ? Py_NewRef(args[3]) : PyDict_New();
    sr_result done = SR_FALLBACK;
    if (call.args != NULL && call.kwargs != NULL && PyTuple_CheckExact(call.args) && PyDict_CheckExact(call.kwargs) &&
        (operator->route == SR_PASSING || !dispatch_has_modes_below(self))) {
        done = dispatch_handle(self, &call, out);
    }
    Py_XDECREF(call.args);
    Py_XDECREF(call.kwargs);
    return done;
}

/* Whether an entry of a traceback is a frame of shadowrun. */
static int dispatch_is_own_frame(PyObject *operator) {
    int ours = 0;
    PyObject *frame = PyObject_GetAttrString(operator, "tb_frame");
    PyObject *code = frame == NULL ? NULL : PyObject_GetAttrString(frame, "f_code");
    PyObject *globals = frame == NULL ? NULL : PyObject_GetAttrString(frame, "f_globals");
    PyObject *function = code == NULL ? NULL : PyObject_GetAttrString(code, "co_name");
    PyObject *module = globals != NULL && PyDict_Check(globals) ? PyDict_GetItemString(globals, "__name__") : NULL;
    if (function != NULL && PyUnicode_Check(function)) {
        ours = PyUnicode_CompareWithASCIIString(function, "<operator>") == 0; /* intercept/user_call.py */
    }
    if (!ours && module != NULL && PyUnicode_Check(module)) {
        PyObject *package = PyUnicode_FromString("shadowrun.");
        ours = package != NULL && PyUnicode_Tailmatch(module, package, 0, PY_SSIZE_T_MAX, -1) == 1;
        Py_XDECREF(package);
    }
    Py_XDECREF(function);
    Py_XDECREF(globals);
    Py_XDECREF(code);
    Py_XDECREF(frame);
    return ours;
}

/* Remove shadowrun's frames from the start of the traceback of an exception that the program gets. */
static void dispatch_trim_traceback(void) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    while (trace != NULL && dispatch_is_own_frame(trace)) {
        PyObject *next = PyObject_GetAttrString(trace, "tb_next");
        Py_SETREF(trace, next == Py_None ? NULL : Py_XNewRef(next));
        Py_XDECREF(next);
    }
    PyErr_Clear();
    if (value != NULL && PyExceptionInstance_Check(value)) {
        PyException_SetTraceback(value, trace == NULL ? Py_None : trace);
    }
    PyErr_Restore(type, value, trace);
}

PyObject *sr_dispatch(PyObject *mode, PyObject *handler, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    PyObject *out = NULL;
    sr_result done = SR_FALLBACK;
    int fits = handler != NULL && names == NULL && n >= 2 && n <= 4; /* no handler: the mode has ended */
    if (fits && sr_is_call_rows(handler)) {
        done = sr_record_call((SrCallRows *)handler, args, n, &out);
    } else if (fits && ((SrHandler *)handler)->state != SR_OFF) { /* off: the garbage collector cleared it */
        done = dispatch_try((SrHandler *)handler, args, n, &out);
    }
    if (done == SR_FALLBACK && !sr_interrupted()) {
        out = dispatch_in_python(mode, args, n, names);
    }
    if (out == NULL) {
        dispatch_trim_traceback();
    }
    return out;
}

/* What a call becomes: recording/recorder.py. */

enum { DISPATCH_SLOW_NS = 1000000 };

sr_result sr_find_context(SrHandler *self, SrCall *call) {
    long long start = sr_clock_start(self);
    if (sr_find_origin((SrOrigins *)self->origins, 0, &call->origin) != SR_DONE) {
        return sr_failed();
    }
    sr_lap(self, SR_PART_ORIGIN, start);
    start = sr_clock_start(self);
    int found = sr_context_number(self->cache, self->contexts, call->operator->index, self->device, &call->origin, call->args,
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
    PyObject *origin = PyTuple_Pack(3, call->origin.module, call->origin.phase, call->origin.site);
    PyObject *given[] = {call->operator->plan, call->args, call->kwargs, origin, value};
    PyObject *done = origin == NULL ? NULL : PyObject_Vectorcall(reporter, given, 5, NULL);
    Py_XDECREF(origin);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static double dispatch_microseconds(long long ns) { return ns < 0 ? -1.0 : (double)ns / 1000; }

int sr_add_row(SrHandler *self, long long context, PyObject *verdict, long long ref_ns, long long target_ns) {
    SR_NAME(flush, "_flush_at_times") { return -1; }
    long long start = sr_clock_start(self);
    long long verdict_number = PyLong_AsLongLong(verdict);
    if (verdict_number == -1 && PyErr_Occurred()) {
        return -1;
    }
    long long seq = sr_write_row((SrRowBuffer *)self->rows, context, verdict_number, dispatch_microseconds(ref_ns), dispatch_microseconds(target_ns));
    int failed = seq < 0;
    if (!failed && !(seq & 63)) {
        PyObject *done = PyObject_CallMethodNoArgs(self->recorder, flush);
        failed = done == NULL;
        Py_XDECREF(done);
    }
    sr_lap(self, SR_PART_RECORD, start);
    return failed ? -1 : 0;
}

/* As Comparator.is_slow. */
static int dispatch_is_slow(SrHandler *self, long long actual_ns, long long expected_ns) {
    double expected = (double)expected_ns, actual = (double)actual_ns;
    return actual >= self->slow_ratio * expected && actual >= expected + DISPATCH_SLOW_NS;
}

int sr_add_match(SrHandler *self, SrCall *call, long long ns, long long other_ns, int *failed) {
    long long actual = self->on_target ? ns : other_ns, expected = self->on_target ? other_ns : ns;
    if (dispatch_is_slow(self, actual, expected) || PySet_Contains(self->watched, call->operator->index) != 0) {
        return 0;
    }
    *failed = sr_add_row(self, call->context, self->matched, expected, actual);
    return 1;
}

int sr_add_count(PyObject *counts, PyObject *key, Py_ssize_t n) {
    PyObject *before = PyDict_GetItemWithError(counts, key);
    if (before != NULL) {
        n += PyLong_AsSsize_t(before);
    }
    PyObject *after = PyErr_Occurred() ? NULL : PyLong_FromSsize_t(n);
    int failed = after == NULL || PyDict_SetItem(counts, key, after);
    Py_XDECREF(after);
    return failed ? -1 : 0;
}
