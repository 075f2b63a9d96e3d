/* The dispatch mode's handler: calls on the CPU that can go a short way, which nearly all do.
 *
 * It does what intercept/dispatch.py, replay/replayer.py and replay/short.py do, for plain tensors on the CPU alone, and
 * hands everything else to them, before it has done anything. Those remain the description of what happens; tests run
 * both and compare.
 */

#include "handler.h"

#ifdef _WIN32
#include <windows.h>
#else
#include <time.h>
#endif

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

/* The user's own call. No code in Python runs between his line and the operator, so what that warns of comes there. */
PyObject *run_operator(const Call *call) {
    return PyObject_Call(call->entry->run, call->args, PyDict_GET_SIZE(call->kwargs) ? call->kwargs : NULL);
}

/* By a function in Python: warnings that it gives must come at a line of ours, where they are told from the user's. */
PyObject *replayed(Handler *self, PyObject *run, PyObject *args, PyObject *kwargs) {
    PyObject *given[] = {NULL, run, args, kwargs};
    return PyObject_Vectorcall(self->again, given + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* 1: the lock is held; 0: somebody else has it, or waits for it. */
static int try_lock(Handler *self) {
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

/* Keeps an exception that is on its way. */
static void unlock(PyObject *release) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallNoArgs(release));
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
}

/* A call that is not compared (a view, memory without values, a step that is left out): its place is noted for the
 * operators of its backward. 1; 0 where that failed; -1 with an interrupt. */
static int pass_silently(Handler *self, Entry *entry, PyObject *reason, long long entered) {
    int noted = note_place((Places *)self->places, 0);
    lap(self, PART_PLACE, entered);
    if (noted != 1) {
        return interrupted() ? -1 : 0;
    }
    if (reason == NULL) {
        entry->n_skipped++;
    } else {
        PyObject *key = PyTuple_Pack(3, PyTuple_GET_ITEM(entry->skipped, 0), PyTuple_GET_ITEM(entry->skipped, 1), reason);
        int failed = key == NULL || count_skipped(self, key);
        Py_XDECREF(key);
        if (failed) {
            return interrupted() ? -1 : 0;
        }
    }
    self->own_ns += now_ns() - entered;
    return 1;
}

/* 1 where the call was recorded, or why it could not be; 0 where Python must; -1 with an exception. */
static int record(Handler *self, Call *call) {
    int done = find_context(self, call);
    if (done == 1) {
        if (add_row(self, call->context, self->seen_verdict, -1, -1) && report(self->unrecorded, call)) {
            done = -1;
        }
        drop_place(&call->place);
    }
    self->own_ns += now_ns() - call->entered;
    return done;
}

/* Why no call of this operator is wanted in this step: 1 with a new reference, 1 with NULL if all are; 0 where Python
 * must look; -1 with an exception. */
static int unwanted(Handler *self, Entry *entry, PyObject **reason) {
    NAME(asked, "unwanted") { return 0; }
    *reason = NULL;
    if (entry->way == SILENT || entry->way == PASSING || in_slot(self->selection, self->everything) == Py_True) {
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

/* Whether a value is no tensor, or one on the CPU, or a list that begins with such a one; `n` counts tensors. */
static int lies_on_cpu(PyObject *value, int *n) {
    if ((PyList_CheckExact(value) || PyTuple_CheckExact(value)) && PySequence_Fast_GET_SIZE(value)) {
        value = PySequence_Fast_GET_ITEM(value, 0);
    }
    if (is_tensor(value)) {
        ++*n;
        return has_cpu(value);
    }
    return value == Py_None || PyLong_Check(value) || PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) ||
           is_exact(value) == 1;
}

/* Whether the call is one of the CPU: as Replayer._role, where that is clear. */
static int is_of_cpu(Handler *self, Call *call) {
    NAME(device_name, "device") { return 0; }
    Py_ssize_t size = PyTuple_GET_SIZE(call->args), position = 0;
    if (size && is_tensor(PyTuple_GET_ITEM(call->args, 0))) {
        return has_cpu(PyTuple_GET_ITEM(call->args, 0));
    }
    int n = 0;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (!lies_on_cpu(PyTuple_GET_ITEM(call->args, i), &n)) {
            return 0;
        }
    }
    PyObject *name, *value;
    while (PyDict_Next(call->kwargs, &position, &name, &value)) {
        if (!lies_on_cpu(value, &n)) {
            return 0;
        }
    }
    PyObject *device = PyDict_GetItemWithError(call->kwargs, device_name);
    return device == NULL || device == Py_None || PyObject_RichCompareBool(device, self->device, Py_EQ) == 1;
}

/* 1 with the result or an exception; 0 where nothing was done, or where the call may yet run; -1 with an
 * interrupt. */
static int go(Handler *self, Call *call, PyObject *reason, PyObject **out) {
    Entry *entry = call->entry;
    int way = self->way; /* it may have been stopped until now */
    if (way == OFF) {
        return 0;
    }
    if (entry->way == PASSING) {
        entry->n_skipped++;
        return 1;
    }
    if (entry->way == SILENT || reason != NULL) {
        return pass_silently(self, entry, reason, call->entered);
    }
    if (way == RECORDING) {
        return record(self, call);
    }
    return entry->way == LONG ? 0 : compare_call(self, call, out);
}

/* 1 with the result or an exception; 0 where nothing was done. */
static int handle(Handler *self, Call *call, PyObject **out) {
    Entry *entry = call->entry;
    PyObject *reason;
    *out = NULL;
    int done = unwanted(self, entry, &reason);
    if (done != 1) {
        return done != 0;
    }
    if (entry->way != PASSING && !is_of_cpu(self, call)) {
        Py_XDECREF(reason);
        return interrupted();
    }
    /* What is only counted or recorded is done before another thread can run, or by Python, which takes the lock. */
    int runs = self->way == RECORDING || entry->way == PASSING, locks = !runs;
    if (locks && try_lock(self) != 1) {
        Py_XDECREF(reason);
        return 0;
    }
    PyObject *release = Py_NewRef(self->release);
    done = go(self, call, reason, out);
    if (done > 0 && (runs || entry->way == SILENT || reason != NULL)) {
        *out = run_operator(call);
    }
    if (locks) {
        unlock(release);
    }
    Py_XDECREF(reason);
    Py_DECREF(release);
    return done != 0;
}

/* Whether other modes lie below. */
static int is_above_others(Handler *self) {
    if (self->n_modes != NULL) {
        return self->n_modes() != 0;
    }
    PyObject *below = PyObject_CallNoArgs(self->n_modes_below);
    int none = below != NULL && PyLong_AsLong(below) == 0;
    Py_XDECREF(below);
    return !none;
}

/* Whether a function mode is on. */
static int asks_functions(Handler *self) {
    if (self->asks != NULL) {
        return self->asks();
    }
    PyObject *answer = PyObject_CallNoArgs(self->asks_functions);
    Py_XDECREF(answer);
    return answer != Py_False;
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
    Entry *entry = find_entry(self, args[0]);
    PyObject *types = args[1];
    if (entry == NULL || !(PyTuple_Check(types) || PyList_Check(types)) || !all_plain(types) ||
        asks_functions(self)) { /* Python sees to it that none sees ours */
        return 0;
    }
    Call call = {.entry = entry, .entered = now_ns()};
    call.args = n > 2 ? Py_NewRef(args[2]) : PyTuple_New(0);
    call.kwargs = n > 3 && args[3] != Py_None ? Py_NewRef(args[3]) : PyDict_New();
    int done = 0;
    if (call.args != NULL && call.kwargs != NULL && PyTuple_CheckExact(call.args) && PyDict_CheckExact(call.kwargs) &&
        (entry->way == PASSING || !is_above_others(self))) {
        done = handle(self, &call, out);
    }
    Py_XDECREF(call.args);
    Py_XDECREF(call.kwargs);
    return done;
}

/* Whether an entry of a traceback is a frame of shadowrun's, the program's own call among them. */
static int is_ours(PyObject *entry) {
    int ours = 0;
    PyObject *frame = PyObject_GetAttrString(entry, "tb_frame");
    PyObject *code = frame == NULL ? NULL : PyObject_GetAttrString(frame, "f_code");
    PyObject *globals = frame == NULL ? NULL : PyObject_GetAttrString(frame, "f_globals");
    PyObject *function = code == NULL ? NULL : PyObject_GetAttrString(code, "co_name");
    PyObject *module = globals != NULL && PyDict_Check(globals) ? PyDict_GetItemString(globals, "__name__") : NULL;
    if (function != NULL && PyUnicode_Check(function)) {
        ours = PyUnicode_CompareWithASCIIString(function, "<operator>") == 0; /* intercept/own_call.py */
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

/* The traceback of an exception that leaves for the program, without our frames, which begin it. */
static void leave_out_ours(void) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    while (trace != NULL && is_ours(trace)) {
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

PyObject *dispatch_call(PyObject *mode, Handler *self, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    PyObject *out = NULL;
    int done = 0;
    /* There is none where the mode went blind, and one that is off where the garbage collector has been here. */
    if (self != NULL && self->way != OFF && names == NULL && n >= 2 && n <= 4) {
        done = try_quickly(self, args, n, &out);
    }
    if (!done && !interrupted()) {
        out = in_python(mode, args, n, names);
    }
    if (out == NULL) {
        leave_out_ours();
    }
    return out;
}
