/* What the files of the C extension share. Shared names begin with `sr_`; static ones with the name of their part. */

#ifndef SHADOWRUN_CORE_H
#define SHADOWRUN_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>

/* Bytes that take some microseconds: for fewer, releasing the GIL and taking it back takes longer. */
enum { SR_FEW_BYTES = 64 << 10 };

/* Sets of instructions, which a build has if the compiler knows them: it runs on every processor of its kind, so its loops
 * are there for older and newer ones. */
#if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__) && (defined(__linux__) || defined(__APPLE__))
#define SR_HAS_X86_SETS 1
#if defined(__clang__)
#define SR_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else /* GCC would take half of a vector */
#define SR_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#endif
typedef enum { SR_PLAIN, SR_AVX2, SR_AVX512 } sr_instructions;

/* module.c. The best that the processor has; AVX-512 of `with_gfni` is that with VBMI, IFMA and GFNI. */
sr_instructions sr_best_instructions(int with_gfni);
/* By name, of those up to the best; None: the best. -1 with an exception. */
int sr_read_instructions(PyObject *name, sr_instructions best, sr_instructions *found);

/* What a step of the fast path came to. */
typedef enum {
    SR_ERROR = -1,   /* an exception is set that must reach the program: an interrupt, say */
    SR_FALLBACK = 0, /* nothing was done, and no exception is set: Python does it */
    SR_DONE = 1
} sr_result;

/* A tensor as DLPack describes it: https://dmlc.github.io/dlpack/latest/c_api.html, major version 1. */
typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* of ndim elements; strides may be NULL: C order */
    uint64_t byte_offset;
} SrTensor;

enum { SR_DLPACK_CPU = 1, SR_DLPACK_FLOAT = 2, SR_DLPACK_COMPLEX = 5 };

/* tensor.c. Answers are 1 or 0; -1 with an exception where that is said. */
int sr_is_tensor(PyObject *value);      /* torch.Tensor or Parameter, no subclass */
int sr_is_tensor_type(PyObject *type);
int sr_is_tensor_or_subclass(PyObject *value); /* or -1 */
int sr_is_exact(PyObject *value);       /* a value of a type with few values: a dtype, a device, a string; or -1 */
typedef int32_t (*SrShimAsk)(void *tensor, void *answer); /* of torch's stable C shim, with an at::Tensor: 0, or an error */
void *sr_plain_tensor(PyObject *tensor); /* the at::Tensor of an ordinary dense tensor; NULL for others, and without the shim */
PyObject *sr_shape(PyObject *tensor);
PyObject *sr_dtype(PyObject *tensor);
int sr_shape_and_dtype(PyObject *tensor, int64_t *n_dims, const int64_t **sizes, PyObject **dtype); /* borrowed */
int sr_read_tensor(PyObject *value, SrTensor *found); /* 0 where DLPack cannot describe it, without an exception */
int sr_is_on_cpu(const SrTensor *t);
int sr_is_contiguous(const SrTensor *t);
int sr_is_cpu_tensor(PyObject *tensor); /* of torch.Tensor or Parameter */
int sr_is_negated(PyObject *tensor);    /* the lazy negation bit, which DLPack does not carry; or -1 */
int sr_bytes_differ(const void *actual, const void *expected, size_t n);
PyObject *sr_setup_tensors(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *sr_setup_shim(PyObject *module, PyObject *const *args, Py_ssize_t n);
size_t sr_n_elements(const SrTensor *t);
size_t sr_n_bytes(const SrTensor *t); /* of its elements */
PyObject *sr_plainly_equal(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* tensor.c: where a tensor lies. What is borrowed stays as long as nothing changes the tensor. */
typedef struct {
    void *storage;    /* its identity while it lives */
    int64_t offset;   /* in it, in elements */
    int64_t n_dims;
    const int64_t *sizes, *strides;
    PyObject *dtype;
    int32_t device; /* torch's number of the type; SR_TORCH_CPU */
} SrPlace;
enum { SR_TORCH_CPU = 0, SR_MAX_DEVICE_TYPES = 32 };

/* Of an ordinary dense tensor on the CPU or on an accelerator with memory of its own: 1; 0 where Python has to be asked. */
int sr_read_place(PyObject *tensor, SrPlace *place);
int sr_read_tensor_anywhere(PyObject *tensor, SrTensor *found); /* as `sr_read_tensor`, likewise */

int sr_read_storage_size(PyObject *tensor, int64_t *n_bytes); /* likewise */

/* Number of writes to its memory, as torch counts them, or SR_UNCOUNTED; -1 with an exception. */
enum { SR_UNCOUNTED = -1 };
int sr_read_version(PyObject *tensor, long long *version);

PyObject *sr_setup_places(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *sr_place(PyObject *module, PyObject *tensor);

/* stats.c */
PyObject *sr_setup_diff(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *sr_diff(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *sr_differing(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *sr_add_rounded_product(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *sr_product_sketch(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *sr_nearness(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *sr_statistics(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* Counts of elements, in the order of `Totals` in numerics/diff.py, for all that list them: structs, a tuple, TensorDiff.
 * The loops that count are in stats_float.h and stats_integer.h. */
#define SR_COUNTS(X) X(n_nan) X(n_inf) X(n_zero_sign) X(n_subnormal) X(n_from_zero)
#define SR_COUNT_MEMBER(name) uint64_t name;

/* stats.c: what `diff` measures, without an object for each figure. */
typedef struct {
    SrTensor form; /* of both; valid as long as the target's tensor is */
    const void *actual, *expected;
    uint64_t n_elements, n_different, max_ulp;
    SR_COUNTS(SR_COUNT_MEMBER)
    double max_abs, max_rel, rmse, worst_actual, worst_expected;
    long remaining_bits;
    int64_t worst; /* in row-major order */
} SrFigures;

/* 1; 0 where `diff` returns None; -1 with an exception. */
int sr_read_forms(PyObject *actual, PyObject *expected, SrFigures *found);
/* Then: the pass over memory. Releases the GIL if there is much of it. */
void sr_measure(SrFigures *found);
/* Of what was measured, a row of the table of differences: `encode_diff` of store/codec.py. NULL with an exception. */
PyObject *sr_diff_row(long long seq, Py_ssize_t position, PyObject *tensor, const SrFigures *d);
/* Strides of two contiguous tensors of one shape: a tuple, None if they differ, NULL with an exception. */
PyObject *sr_common_strides(PyObject *actual, PyObject *expected, const SrTensor *t);

/* contexts.c: module, phase and source line of a call. `depth` frames above the one that is executed are left out. */
typedef struct SrOrigins SrOrigins;
typedef struct {
    PyObject *module, *phase, *site; /* owned */
} SrOrigin;
int sr_add_origins_type(PyObject *module);
int sr_is_origins(PyObject *value);
sr_result sr_find_origin(SrOrigins *self, int depth, SrOrigin *origin); /* done, or an error */
void sr_drop_origin(SrOrigin *origin);
sr_result sr_note_origin(SrOrigins *self, int depth); /* for the call's backward; done, or an error */

/* What makes a context, but for the operator and the origin: bytes, and objects that have none. */
typedef struct {
    char *bytes, first[512];
    size_t length, room;
    PyObject **objects, *first_objects[16]; /* owned */
    Py_ssize_t n_objects, objects_room;
    int exact; /* each value counts, and of a tensor only that it is one: the key of a recording's context */
} SrKey;

/* 0, or -1 with an exception. */
void sr_key_begin(SrKey *key, int exact);
void sr_key_drop(SrKey *key);
int sr_key_put(SrKey *key, const void *bytes, size_t n);
int sr_key_put_call(SrKey *key, PyObject *args, PyObject *kwargs);

/* Contexts by the identity of what their keys hold. A hit makes no object; a miss may still be in the dict
 * of all contexts. */
typedef struct SrContextCache SrContextCache;
uint64_t sr_key_hash(const char *bytes, size_t n);
SrContextCache *sr_new_context_cache(void); /* NULL without memory */
void sr_drop_context_cache(SrContextCache *cache);
int sr_visit_context_cache(const SrContextCache *cache, visitproc visit, void *arg);
void sr_collide_context_cache(SrContextCache *cache); /* one hash for all keys from here on: for tests */

/* The number of a call's context in `contexts`: 1; 0, perhaps with an exception, where it is new or has no key. */
int sr_context_number(SrContextCache *cache, PyObject *contexts, PyObject *index, PyObject *device,
                      const SrOrigin *origin, PyObject *args, PyObject *kwargs, int exact, long long *number);
PyObject *sr_context_key(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* call_rows.c */
PyObject *sr_call_rows(PyObject *module, PyObject *args);
typedef struct SrRowBuffer SrRowBuffer;
int sr_add_row_buffer_type(PyObject *module);
int sr_is_row_buffer(PyObject *value);
long long sr_next_seq(SrRowBuffer *self);
/* Add a row of the current step; -1 with an exception. `drift` is both of its figures. */
int sr_write_row(
    SrRowBuffer *self, long long seq, long long context, long long verdict, double ref_us, double target_us, double drift);

/* compare_call.c, compare_handler.c, dispatch.c */
int sr_add_close_bounds_type(PyObject *module);
int sr_add_compare_handler_type(PyObject *module);
int sr_add_finite_handler_type(PyObject *module);
int sr_add_method_type(PyObject *module);
PyObject *sr_install_dispatch_slot(PyObject *module, PyObject *type);

/* module.c: an attribute that its type computes, straight from the type's descriptor if that is one, without a search. */
PyObject *sr_get_computed(PyObject *object, PyObject *descriptor, PyObject *name);

/* Add so many to a number in a dict: what it was; -1 with an exception. */
long long sr_add_count(PyObject *counts, PyObject *key, long long n);

PyObject *sr_tuple_of_numbers(const int64_t *numbers, Py_ssize_t n);

/* Types: of those whose objects are made with arguments by name, each of which is an owned reference in the object. */
typedef struct {
    const char *name; /* NULL: the table ends */
    size_t at;
} SrField;
#define SR_FIELD(type, name) {#name, offsetof(type, name)}
int sr_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type); /* held by the module, which is never unloaded */
PyObject *sr_new_by_name(PyTypeObject *type, PyObject *args);             /* an object with all fields NULL */
int sr_take_fields(PyObject *self, PyObject *kwargs, const SrField *fields); /* -1 with an exception */
int sr_wrong_type(PyObject *self);                                         /* -1 with an exception */
int sr_visit_fields(PyObject *self, const SrField *fields, visitproc visit, void *arg);
void sr_clear_fields(PyObject *self, const SrField *fields);
void sr_dealloc(PyObject *self); /* by `tp_clear`, which leaves nothing that is owned */

/* Offset of a slot (`__slots__`) in the objects of a type; -1 with an exception. */
Py_ssize_t sr_slot_offset(PyTypeObject *type, const char *name);

/* Content of a slot: borrowed; NULL where it was deleted. */
static inline PyObject *sr_slot(const PyObject *object, Py_ssize_t offset) {
    return *(PyObject *const *)((const char *)object + offset);
}

/* A name that is interned once, which PyObject_GetAttr finds fastest; the statement after it runs where that fails. */
#define SR_NAME(variable, text)                                                                                        \
    static PyObject *variable;                                                                                         \
    if (variable == NULL && (variable = PyUnicode_InternFromString(text)) == NULL)

/* Whether the exception that is set must reach the program, as an interrupt must. Any other is cleared: Python runs the
 * same step again, and raises it again. */
static inline int sr_interrupted(void) {
    if (PyErr_Occurred() == NULL) {
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return 1;
    }
    PyErr_Clear();
    return 0;
}

/* After a step that failed: an interrupt, or else a reason to leave the call to Python. */
static inline sr_result sr_failed(void) { return sr_interrupted() ? SR_ERROR : SR_FALLBACK; }

static inline PyObject *sr_wrong_count(const char *function) {
    PyErr_Format(PyExc_TypeError, "%s: wrong number of arguments", function);
    return NULL;
}

#endif
