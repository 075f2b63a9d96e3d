/* The handler of a search for NaN: runs a call, and leaves it to Python if a result has NaN or infinities.
 *
 * recording/nonfinite.py is the specification; tests/recording/test_nonfinite.py runs both.
 */

#include "dispatch.h"

#include <string.h>
#include <structmember.h>

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
