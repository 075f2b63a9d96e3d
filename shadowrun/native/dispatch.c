/* The mode's `__torch_dispatch__` in C: how torch finds it, which calls go to a handler, what all handlers share, and the
 * smallest handler.
 *
 * A handler does what Python does, and leaves every call that it does not know to Python before anything is done. Python
 * remains the specification: tests/native/both_ways.py and tests/recording/test_native_rows.py run both and compare.
 */

#include "dispatch.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

/* ---- operators: a hash table, since a dict would need an object for each address ------------------------------------- */

/* The slot of an operator, or the free one that it would get. */
static SrOperator **dispatch_slot(SrOperator **operators, size_t room, const PyObject *func) {
    size_t i = ((uintptr_t)func >> 4) & (room - 1); /* objects lie at multiples of 16 bytes */
    while (operators[i] != NULL && operators[i]->func != func) {
        i = (i + 1) & (room - 1);
    }
    return &operators[i];
}

SrOperator *sr_find_operator(const SrHandler *self, PyObject *func) {
    return self->room ? *dispatch_slot(self->operators, self->room, func) : NULL;
}

/* Room for one more; -1 with an exception. */
static int dispatch_grow_table(SrHandler *self) {
    if (2 * (self->n_operators + 1) <= self->room) {
        return 0;
    }
    size_t room = self->room ? 2 * self->room : 256;
    SrOperator **operators = PyMem_Calloc(room, sizeof *operators);
    if (operators == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < self->room; i++) {
        if (self->operators[i] != NULL) {
            *dispatch_slot(operators, room, self->operators[i]->func) = self->operators[i];
        }
    }
    PyMem_Free(self->operators);
    self->operators = operators;
    self->room = room;
    return 0;
}

SrOperator *sr_add_operator(SrHandler *self, PyObject *func, PyObject *plan, PyObject *run, PyObject *index) {
    if (dispatch_grow_table(self)) {
        return NULL;
    }
    SrOperator **slot = dispatch_slot(self->operators, self->room, func);
    if (*slot == NULL) {
        SrOperator *operator = PyMem_Calloc(1, sizeof *operator);
        if (operator == NULL) {
            return (SrOperator *)PyErr_NoMemory();
        }
        operator->func = Py_NewRef(func), operator->plan = Py_NewRef(plan);
        operator->run = Py_NewRef(run), operator->index = Py_NewRef(index);
        *slot = operator;
        self->n_operators++;
    }
    return *slot;
}

int sr_read_written(PyObject *positions, int most, int *written) {
    Py_ssize_t n = PyTuple_GET_SIZE(positions);
    for (Py_ssize_t k = 0; k < n && n <= most; k++) {
        long position = PyLong_AsLong(PyTuple_GET_ITEM(positions, k));
        if (PyErr_Occurred()) {
            return -1;
        }
        if (position < 0 || position > INT_MAX) {
            n = most + 1;
        } else {
            written[k] = (int)position;
        }
    }
    if (n > most) {
        PyErr_SetString(PyExc_ValueError, "add_operator: no such positions");
        return -1;
    }
    return (int)n;
}

/* ---- what both types do ------------------------------------------------------------------------------------------------ */

int sr_start_handler(SrHandler *self, PyObject *kwargs, const SrField *fields) {
    self->cache = sr_new_context_cache();
    if (self->cache == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (sr_take_fields((PyObject *)self, kwargs, fields)) {
        return -1;
    }
    if (!sr_is_origins(self->origins) || !PyDict_Check(self->contexts)) {
        return sr_wrong_type((PyObject *)self);
    }
    self->everything = sr_slot_offset(Py_TYPE(self->selection), "everything");
    return self->everything < 0 ? -1 : 0;
}

int sr_visit_handler(SrHandler *self, const SrField *fields, visitproc visit, void *arg) {
    for (size_t i = 0; i < self->room; i++) {
        if (self->operators[i] != NULL) {
            Py_VISIT(self->operators[i]->func);
            Py_VISIT(self->operators[i]->plan);
            Py_VISIT(self->operators[i]->run);
        }
    }
    int stopped = sr_visit_fields((PyObject *)self, fields, visit, arg);
    return stopped ? stopped : sr_visit_context_cache(self->cache, visit, arg);
}

void sr_clear_handler(SrHandler *self, const SrField *fields) {
    SrOperator **operators = self->operators;
    SrContextCache *cache = self->cache;
    size_t room = self->room;
    /* First: what is released below may run Python code, whose calls must find no operator here. */
    self->operators = NULL;
    self->room = self->n_operators = 0;
    self->cache = NULL;
    sr_clear_fields((PyObject *)self, fields);
    for (size_t i = 0; i < room; i++) {
        if (operators[i] != NULL) {
            Py_DECREF(operators[i]->func);
            Py_DECREF(operators[i]->plan);
            Py_DECREF(operators[i]->run);
            Py_DECREF(operators[i]->index);
            Py_XDECREF(operators[i]->skipped);
            PyMem_Free(operators[i]);
        }
    }
    PyMem_Free(operators);
    sr_drop_context_cache(cache);
}

/* The program's own call. No Python code runs between its line and the operator, so warnings come at that line. */
PyObject *sr_run_operator(const SrCall *call) {
    return PyObject_Call(call->operator->run, call->args, PyDict_GET_SIZE(call->kwargs) ? call->kwargs : NULL);
}

PyObject *sr_pack_origin(const SrCall *call) {
    return PyTuple_Pack(3, call->origin.module, call->origin.phase, call->origin.site);
}

int sr_has_modes_below(const SrHandler *self) {
    PyObject *below = PyObject_CallNoArgs(self->n_modes_below);
    int none = below != NULL && PyLong_AsLong(below) == 0;
    Py_XDECREF(below);
    return !none;
}

void sr_release(PyObject *release) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallNoArgs(release));
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
}

/* ---- a call ------------------------------------------------------------------------------------------------------------ */

/* torch.Tensor and Parameter only. */
static int dispatch_are_plain_types(PyObject *types) {
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

/* A call as torch passes it. */
static sr_result dispatch_try(SrHandler *self, PyObject *const *args, Py_ssize_t n, PyObject **out) {
    SrOperator *operator = sr_find_operator(self, args[0]); /* none after the garbage collector cleared the handler */
    if (operator == NULL || !dispatch_are_plain_types(args[1]) ||
        !sr_answers(self->function_mode_on, Py_False)) { /* Python hides shadowrun's own calls from such a mode */
        return SR_FALLBACK;
    }
    SrCall call = {.operator = operator};
    call.args = n > 2 ? Py_NewRef(args[2]) : PyTuple_New(0);
    call.kwargs = n > 3 && args[3] != Py_None ? Py_NewRef(args[3]) : PyDict_New();
    sr_result done = SR_FALLBACK;
    if (call.args != NULL && call.kwargs != NULL && PyTuple_CheckExact(call.args) && PyDict_CheckExact(call.kwargs)) {
        done = self->handle(self, &call, out);
    }
    Py_XDECREF(call.args);
    Py_XDECREF(call.kwargs);
    return done;
}

/* Whether an entry of a traceback is a frame of shadowrun. */
static int dispatch_is_own_frame(PyObject *entry) {
    int ours = 0;
    PyObject *frame = PyObject_GetAttrString(entry, "tb_frame");
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

/* mode.__torch_dispatch__(func, types, args=(), kwargs=None). No handler: the mode has ended. */
static PyObject *dispatch_call(PyObject *mode, PyObject *handler, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    PyObject *out = NULL;
    sr_result done = SR_FALLBACK;
    if (handler != NULL && names == NULL && n >= 2 && n <= 4) {
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

/* ---- the method --------------------------------------------------------------------------------------------------------
 *
 * For each operator call torch looks up `__torch_dispatch__` twice and then `__self__` of the result, each by a C string:
 * a new Python string, its hash, and a search through the types of the mode. A type may answer C strings itself
 * (`tp_getattr`), and this one does: the method is in a slot of the mode, and is an object that knows mode and handler.
 *
 * Instructions that a step of the tiny MLP of benchmarks/workloads.py takes more without it, by callgrind: 6 % record only,
 * 3.6 % isolated (torch 2.13). If a torch looks the method up in another way, it finds the one in Python.
 */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *mode, *handler; /* no handler: Python handles all calls */
} DispatchMethod;

static PyTypeObject *method_type;
static Py_ssize_t slot_offset; /* where in a mode the method lies */

/* The look-up of a type that does not answer C strings. */
static PyObject *slot_generic_getattr(PyObject *object, const char *name) {
    PyObject *text = PyUnicode_FromString(name);
    PyObject *found = text == NULL ? NULL : Py_TYPE(object)->tp_getattro(object, text);
    Py_XDECREF(text);
    return found;
}

static PyObject *slot_mode_getattr(PyObject *mode, char *name) {
    PyObject *method = sr_slot(mode, slot_offset);
    if (method != NULL && Py_IS_TYPE(method, method_type) && strcmp(name, "__torch_dispatch__") == 0) {
        return Py_NewRef(method);
    }
    return slot_generic_getattr(mode, name);
}

static PyObject *slot_method_getattr(PyObject *self, char *name) {
    PyObject *mode = ((DispatchMethod *)self)->mode;
    return mode != NULL && strcmp(name, "__self__") == 0 ? Py_NewRef(mode) : slot_generic_getattr(self, name);
}

/* install_dispatch_slot(type): modes of this type, which has a slot `_method`, answer with its content. */
PyObject *sr_install_dispatch_slot(PyObject *module, PyObject *type) {
    (void)module;
    PyTypeObject *modes = (PyTypeObject *)type;
    if (!PyType_Check(type) || !PyType_HasFeature(modes, Py_TPFLAGS_HEAPTYPE) || modes->tp_getattr != NULL ||
        modes->tp_getattro == NULL) {
        PyErr_SetString(PyExc_TypeError, "install_dispatch_slot: not a type of modes");
        return NULL;
    }
    Py_ssize_t offset = sr_slot_offset(modes, "_method");
    if (offset < 0) {
        return NULL;
    }
    slot_offset = offset;
    modes->tp_getattr = slot_mode_getattr;
    PyType_Modified(modes);
    Py_RETURN_NONE;
}

static PyObject *method_call(PyObject *self, PyObject *const *args, size_t n, PyObject *names) {
    DispatchMethod *method = (DispatchMethod *)self;
    if (method->mode == NULL) { /* cleared by the garbage collector */
        PyErr_SetString(PyExc_RuntimeError, "a method without its mode");
        return NULL;
    }
    PyObject *mode = Py_NewRef(method->mode), *handler = Py_XNewRef(method->handler);
    PyObject *out = dispatch_call(mode, handler, args, PyVectorcall_NARGS(n), names);
    Py_DECREF(mode);
    Py_XDECREF(handler);
    return out;
}

PyObject *sr_bind_handler(PyObject *handler, PyObject *mode) {
    DispatchMethod *method = PyObject_GC_New(DispatchMethod, method_type);
    if (method != NULL) {
        method->call = method_call;
        method->mode = Py_NewRef(mode);
        method->handler = Py_NewRef(handler);
        PyObject_GC_Track(method);
    }
    return (PyObject *)method;
}

/* leave(): from here on, Python handles all calls. */
static PyObject *method_leave(PyObject *self, PyObject *none) {
    (void)none;
    Py_CLEAR(((DispatchMethod *)self)->handler);
    Py_RETURN_NONE;
}

static int method_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((DispatchMethod *)self)->mode);
    Py_VISIT(((DispatchMethod *)self)->handler);
    return 0;
}

static int method_clear(PyObject *self) {
    Py_CLEAR(((DispatchMethod *)self)->mode);
    Py_CLEAR(((DispatchMethod *)self)->handler);
    return 0;
}

static PyMethodDef method_methods[] = {
    {"leave", method_leave, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef method_members[] = {
    {"__self__", T_OBJECT_EX, offsetof(DispatchMethod, mode), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(DispatchMethod, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot method_slots[] = {
    {Py_tp_dealloc, sr_dealloc}, {Py_tp_traverse, method_traverse}, {Py_tp_clear, method_clear},
    {Py_tp_methods, method_methods}, {Py_tp_members, method_members},   {Py_tp_call, PyVectorcall_Call},
    {Py_tp_getattr, slot_method_getattr}, {Py_tp_getattro, PyObject_GenericGetAttr}, {0, NULL},
};

static PyType_Spec method_spec = {
    .name = "shadowrun.native._core.DispatchMethod",
    .basicsize = sizeof(DispatchMethod),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = method_slots,
};

int sr_add_method_type(PyObject *module) { return sr_add_type(module, &method_spec, &method_type); }

/* ---- a search for NaN ----------------------------------------------------------------------------------------------- */

/* Runs a call, and leaves it to Python if a result has NaN or infinities. recording/nonfinite.py is the specification;
 * tests/recording/test_nonfinite.py runs both. */

enum { IS_RUNNING, HAS_RECORDED, HAS_BAD, N_SLOTS };
enum { FLOAT = 2, BFLOAT = 4, COMPLEX = 5 }; /* codes of DLPack */

typedef struct {
    SrHandler head;
    PyObject *state;    /* `State` of recording/nonfinite.py */
    PyObject *conclude; /* callable(plan, args, kwargs, out): results may have some; what it raises is meant for the program */
    Py_ssize_t slots[N_SLOTS];
    long long n_calls;
} FiniteHandler;

/* ---- whether all elements are finite: those of exponents that are all ones are not ---------------------------------------- */

/* An OR over a chunk, and no early exit inside of it, so that the loop becomes vectors. */
#define FINITE_BODY(uint, exponent)                                                                                    \
    const uint *bits = at;                                                                                             \
    for (size_t first = 0; first < n; first += 4096) {                                                                 \
        size_t stop = n - first < 4096 ? n : first + 4096;                                                             \
        uint any = 0;                                                                                                  \
        for (size_t i = first; i < stop; i++) {                                                                        \
            any |= (uint)((bits[i] & (exponent)) == (exponent));                                                       \
        }                                                                                                              \
        if (any) {                                                                                                     \
            return 0;                                                                                                  \
        }                                                                                                              \
    }                                                                                                                  \
    return 1;

#define FINITE_SET(set, target)                                                                                        \
    target static int finite_##set##_16(const void *at, size_t n) { FINITE_BODY(uint16_t, 0x7C00u) }                   \
    target static int finite_##set##_b16(const void *at, size_t n) { FINITE_BODY(uint16_t, 0x7F80u) }                  \
    target static int finite_##set##_32(const void *at, size_t n) { FINITE_BODY(uint32_t, 0x7F800000u) }               \
    target static int finite_##set##_64(const void *at, size_t n) { FINITE_BODY(uint64_t, 0x7FF0000000000000u) }

typedef int (*finite_check)(const void *at, size_t n);

FINITE_SET(plain, )
#ifdef SR_HAS_X86_SETS
FINITE_SET(avx2, __attribute__((target("avx2"))))
#endif

#define FINITE_CHECKS(set) {finite_##set##_16, finite_##set##_b16, finite_##set##_32, finite_##set##_64}

static finite_check finite_function(int is_bfloat, int bits) {
    static const finite_check plain[] = FINITE_CHECKS(plain);
    int which = bits == 16 ? is_bfloat : bits == 32 ? 2 : 3;
#ifdef SR_HAS_X86_SETS
    static const finite_check avx2[] = FINITE_CHECKS(avx2);
    if (__builtin_cpu_supports("avx2")) {
        return avx2[which];
    }
#endif
    return plain[which];
}

/* Elements from the first of a tensor to its last, all of them included; 0 where Python has to look. In a permuted tensor,
 * such as the result of attention, they are the tensor's own. Gaps may have anything: what is not finite there is left to
 * Python too. */
static size_t finite_extent(const SrTensor *t, size_t n) {
    if (t->strides == NULL || n == 0) {
        return n;
    }
    size_t extent = 1;
    for (int32_t d = 0; d < t->ndim; d++) {
        if (t->shape[d] != 1) {
            if (t->strides[d] < 0) {
                return 0;
            }
            extent += (size_t)(t->shape[d] - 1) * (size_t)t->strides[d];
        }
    }
    return extent <= 2 * n ? extent : 0;
}

/* Whether a value has no NaN and no infinity; 0 also where Python has to look. */
static int finite_value(PyObject *value) {
    if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
        int all = 1;
        for (Py_ssize_t i = 0; all && i < PySequence_Fast_GET_SIZE(value); i++) {
            all = finite_value(PySequence_Fast_GET_ITEM(value, i));
        }
        return all;
    }
    SrTensor t;
    if (!sr_is_tensor(value)) {
        return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value);
    }
    if (!sr_read_tensor(value, &t) || !sr_is_on_cpu(&t)) {
        return 0;
    }
    int bits = t.dtype.bits;
    if (t.dtype.code != FLOAT && t.dtype.code != COMPLEX && t.dtype.code != BFLOAT) {
        return 1; /* integers and bool; floats of 8 bits saturate or have NaN alone */
    }
    size_t n_elements = sr_n_elements(&t), n = finite_extent(&t, n_elements);
    if (t.dtype.code == COMPLEX) {
        bits /= 2, n *= 2;
    }
    if (t.data == NULL || n == 0 || (bits != 16 && bits != 32 && bits != 64)) {
        return n_elements == 0;
    }
    finite_check check = finite_function(t.dtype.code == BFLOAT, bits);
    const char *at = (const char *)t.data + t.byte_offset;
    if ((uintptr_t)at % (size_t)(bits / 8)) {
        return 0;
    }
    int finite;
    if (n * (size_t)(bits / 8) <= SR_FEW_BYTES) {
        return check(at, n);
    }
    Py_BEGIN_ALLOW_THREADS
    finite = check(at, n);
    Py_END_ALLOW_THREADS
    return finite;
}

/* ---- a call ------------------------------------------------------------------------------------------------------------ */

static PyObject *finite_state(const FiniteHandler *self, int which) { return sr_slot(self->state, self->slots[which]); }

static int finite_results(const SrCall *call, PyObject *out) {
    const SrOperator *operator = call->operator;
    if (!operator->has_values) {
        return 1;
    }
    int all = finite_value(out);
    for (int k = 0; all && k < operator->n_written; k++) {
        if (operator->written[k] >= PyTuple_GET_SIZE(call->args)) {
            return 0;
        }
        PyObject *written = PyTuple_GET_ITEM(call->args, operator->written[k]);
        all = written == out || finite_value(written); /* calls in place return what they wrote to */
    }
    return all;
}

static sr_result finite_handle(SrHandler *head, SrCall *call, PyObject **out) {
    FiniteHandler *self = (FiniteHandler *)head;
    /* Once a storage has some, Python notes where it is overwritten. */
    if (finite_state(self, IS_RUNNING) != Py_True || (call->operator->n_written && finite_state(self, HAS_BAD) != Py_False)) {
        return SR_FALLBACK;
    }
    if (!sr_answers(head->profiler_on, Py_False) || sr_has_modes_below(head)) {
        return sr_failed();
    }
    *out = sr_run_operator(call);
    if (*out == NULL) {
        return SR_DONE;
    }
    if (finite_results(call, *out)) {
        PyObject **slot = (PyObject **)((char *)self->state + self->slots[HAS_RECORDED]);
        Py_XSETREF(*slot, Py_NewRef(Py_True));
        self->n_calls++;
        if (sr_note_origin((SrOrigins *)head->origins, 0) != SR_DONE && sr_interrupted()) {
            Py_CLEAR(*out);
        }
        return SR_DONE;
    }
    PyObject *given[] = {call->operator->plan, call->args, call->kwargs, *out};
    PyObject *concluded = PyObject_Vectorcall(self->conclude, given, 4, NULL);
    if (concluded == NULL) {
        Py_CLEAR(*out);
    }
    Py_XDECREF(concluded);
    return SR_DONE;
}

/* ---- the type ---------------------------------------------------------------------------------------------------------- */

/* add_operator(operator, plan, run, index, has values, positions of the arguments that are written to): its calls may come
 * here. */
static PyObject *finite_add_operator(FiniteHandler *self, PyObject *args) {
    PyObject *func, *plan, *run, *index, *written;
    int has_values;
    if (!PyArg_ParseTuple(args, "OOOO!pO!:add_operator", &func, &plan, &run, &PyLong_Type, &index, &has_values, &PyTuple_Type, &written)) {
        return NULL;
    }
    int positions[SR_MAX_WRITTEN] = {0}, n_written = sr_read_written(written, SR_MAX_WRITTEN, positions);
    SrOperator *operator = n_written < 0 ? NULL : sr_add_operator(&self->head, func, plan, run, index);
    if (operator == NULL) {
        return NULL;
    }
    operator->n_written = n_written;
    memcpy(operator->written, positions, sizeof positions);
    operator->has_values = (char)has_values;
    Py_RETURN_NONE;
}

static const SrField finite_fields[] = {
    SR_HANDLER_FIELDS,
    SR_FIELD(FiniteHandler, state),
    SR_FIELD(FiniteHandler, conclude),
    {NULL, 0},
};

static PyObject *finite_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static const char *const names[N_SLOTS] = {"running", "has_recorded", "has_bad"};
    FiniteHandler *self = (FiniteHandler *)sr_new_by_name(type, args);
    if (self == NULL) {
        return NULL;
    }
    self->head.handle = finite_handle;
    if (sr_start_handler(&self->head, kwargs, finite_fields)) {
        Py_CLEAR(self);
    }
    for (int i = 0; self != NULL && i < N_SLOTS; i++) {
        if ((self->slots[i] = sr_slot_offset(Py_TYPE(self->state), names[i])) < 0) {
            Py_CLEAR(self);
        }
    }
    return (PyObject *)self;
}

static int finite_traverse(FiniteHandler *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return sr_visit_handler(&self->head, finite_fields, visit, arg);
}

static int finite_clear(FiniteHandler *self) {
    sr_clear_handler(&self->head, finite_fields);
    return 0;
}

static PyMethodDef finite_methods[] = {
    {"bind", sr_bind_handler, METH_O, NULL},
    {"add_operator", (PyCFunction)finite_add_operator, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef finite_members[] = {
    {"n_calls", T_LONGLONG, offsetof(FiniteHandler, n_calls), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot finite_slots[] = {
    {Py_tp_new, finite_new},     {Py_tp_dealloc, sr_dealloc},     {Py_tp_traverse, finite_traverse},
    {Py_tp_clear, finite_clear}, {Py_tp_methods, finite_methods}, {Py_tp_members, finite_members},
    {0, NULL},
};

static PyType_Spec finite_spec = {
    .name = "shadowrun.native._core.FiniteHandler",
    .basicsize = sizeof(FiniteHandler),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = finite_slots,
};

int sr_add_finite_handler_type(PyObject *module) {
    static PyTypeObject *type;
    return sr_add_type(module, &finite_spec, &type);
}
