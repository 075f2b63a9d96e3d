/* What the files of the compiled part share. */

#ifndef SHADOWRUN_CORE_H
#define SHADOWRUN_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* Bytes that take some microseconds: to let go of the interpreter's lock for fewer and to take it back takes longer. */
enum { FEW_BYTES = 64 << 10 };

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
    int64_t *shape, *strides; /* of ndim elements; strides may be NULL: rows after rows */
    uint64_t byte_offset;
} Tensor;

/* tensors.c */
int is_tensor(PyObject *value);                 /* exactly of torch's own two types */
int is_tensor_type(PyObject *type);
int is_any_tensor(PyObject *value);             /* of a subclass, too; -1 with an exception */
int is_exact(PyObject *value);                  /* its value says all, and few values come: a dtype, a device, a string */
PyObject *shape_of(PyObject *tensor);
PyObject *dtype_of(PyObject *tensor);
int shape_and_dtype(PyObject *tensor, int64_t *n_dims, const int64_t **sizes, PyObject **dtype); /* borrowed; or 0 */
int read_tensor(PyObject *value, Tensor *found); /* 1; 0 where it cannot be described so, without an exception */
int is_on_cpu(const Tensor *t);
int is_contiguous(const Tensor *t);
int has_cpu(PyObject *tensor); /* of one of torch's own two types */
int is_negated(PyObject *tensor); /* has the lazy negation bit, which DLPack does not tell; -1 with an exception */
int bytes_differ(const void *left, const void *right, size_t n);
PyObject *setup(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *setup_shim(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *plainly_equal(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* contexts.c */
PyObject *context_key(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* diff.c */
PyObject *setup_diff(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *diff(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* differing.c */
PyObject *differing(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* stats.c */
PyObject *statistics(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* places.c: where a call comes from. `depth` frames above the one that is executed are left out. */
typedef struct Places Places;
typedef struct {
    PyObject *module, *phase, *site; /* owned */
} Place;
int find_place(Places *self, int depth, Place *place); /* 1; -1 with an exception */
void drop_place(Place *place);
int note_place(Places *self, int depth); /* for its backward; 1; -1 with an exception */

/* places_type.c */
int add_places(PyObject *module);
int is_places(PyObject *value);

/* waiting.c */
typedef struct Rows Rows;
int add_rows(PyObject *module);
int is_rows(PyObject *value);
/* Add a row with the next number, which comes back, and the current step; -1 with an exception. */
long long write_row(Rows *self, long long context, long long verdict, double ref_us, double target_us);

/* heap.c */
PyObject *steady_heap(PyObject *module, PyObject *none);

/* handler_type.c */
int add_handler(PyObject *module);

/* bound.c */
int add_bound(PyObject *module);
PyObject *quicken(PyObject *module, PyObject *type);

/* core.c: a function's address among arguments; NULL where it is not given or 0, or with an exception. */
void *address_in(PyObject *given, const char *name);

/* An attribute that its type computes: straight from the type's descriptor, if that is one, without a search. */
PyObject *get_computed(PyObject *object, PyObject *descriptor, PyObject *name);

/* Where a slot (`__slots__`) lies in the objects of a type; -1 with an exception. */
Py_ssize_t slot_in(PyTypeObject *type, const char *name);

/* What lies in a slot: borrowed; NULL where it was taken away. */
static inline PyObject *in_slot(const PyObject *object, Py_ssize_t offset) {
    return *(PyObject *const *)((const char *)object + offset);
}

/* Name interned once: what PyObject_GetAttr finds fastest. */
#define NAME(variable, text)                                                                                           \
    static PyObject *variable;                                                                                         \
    if (variable == NULL && (variable = PyUnicode_InternFromString(text)) == NULL)

/* Whether what was raised must reach the program: an interrupt, say. All else is forgotten; Python code says it again. */
static inline int interrupted(void) {
    if (PyErr_Occurred() == NULL) {
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return 1;
    }
    PyErr_Clear();
    return 0;
}

static inline PyObject *wrong_count(const char *function) {
    PyErr_Format(PyExc_TypeError, "%s: wrong number of arguments", function);
    return NULL;
}

#endif
