/* The module `shadowrun.native._core`. */

#include "core.h"
#include "digest.h"
#include "dispatch.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

#define VERSION 34

#ifndef SOURCES
#define SOURCES 0 /* checksum of the C files, set by building.py */
#endif

Py_ssize_t sr_slot_offset(PyTypeObject *type, const char *name) {
    PyObject *found = PyObject_GetAttrString((PyObject *)type, name);
    Py_ssize_t offset = -1;
    if (found != NULL && Py_IS_TYPE(found, &PyMemberDescr_Type) &&
        ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX) {
        offset = ((PyMemberDescrObject *)found)->d_member->offset;
    } else {
        PyErr_Format(PyExc_TypeError, "%s has no slot %s", type->tp_name, name);
    }
    Py_XDECREF(found);
    return offset;
}

PyObject *sr_get_computed(PyObject *object, PyObject *descriptor, PyObject *name) {
    if (descriptor != NULL && Py_IS_TYPE(descriptor, &PyGetSetDescr_Type)) {
        PyGetSetDef *definition = ((PyGetSetDescrObject *)descriptor)->d_getset;
        return definition->get(object, definition->closure);
    }
    return PyObject_GetAttr(object, name);
}

long long sr_add_count(PyObject *counts, PyObject *key, long long n) {
    PyObject *known = PyDict_GetItemWithError(counts, key);
    long long before = known == NULL ? 0 : PyLong_AsLongLong(known);
    PyObject *after = PyErr_Occurred() ? NULL : PyLong_FromLongLong(before + n);
    int failed = after == NULL || PyDict_SetItem(counts, key, after);
    Py_XDECREF(after);
    return failed ? -1 : before;
}

PyObject *sr_tuple_of_numbers(const int64_t *numbers, Py_ssize_t n) {
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple != NULL && i < n; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (number == NULL) {
            Py_CLEAR(tuple);
        } else {
            PyTuple_SET_ITEM(tuple, i, number);
        }
    }
    return tuple;
}

sr_instructions sr_best_instructions(int with_gfni) {
    (void)with_gfni;
#ifdef SR_HAS_X86_SETS
    int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    int gfni = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512ifma") && __builtin_cpu_supports("gfni");
    if (avx512 && (gfni || !with_gfni)) {
        return SR_AVX512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) { /* every processor with AVX2 converts float16 too */
        return SR_AVX2;
    }
#endif
    return SR_PLAIN;
}

int sr_read_instructions(PyObject *name, sr_instructions best, sr_instructions *found) {
    static const char *const names[] = {"plain", "avx2", "avx512"};
    *found = best;
    const char *wanted = name == Py_None ? names[best] : PyUnicode_AsUTF8(name);
    for (int i = 0; wanted != NULL && i <= (int)best; i++) {
        if (!strcmp(wanted, names[i])) {
            *found = (sr_instructions)i;
            return 0;
        }
    }
    if (wanted != NULL) {
        PyErr_Format(PyExc_ValueError, "this processor, or this build, has no instructions \"%s\"", wanted);
    }
    return -1;
}

/* ---- types --------------------------------------------------------------------------------------------------------------- */

int sr_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type) {
    *type = (PyTypeObject *)PyType_FromSpec(spec);
    return *type == NULL || PyModule_AddObjectRef(module, strrchr(spec->name, '.') + 1, (PyObject *)*type) ? -1 : 0;
}

/* Without the module: `tp_name` of a type made from a spec has it. */
static const char *module_type_name(PyTypeObject *type) {
    const char *dot = strrchr(type->tp_name, '.');
    return dot == NULL ? type->tp_name : dot + 1;
}

PyObject *sr_new_by_name(PyTypeObject *type, PyObject *args) {
    if (PyTuple_GET_SIZE(args)) {
        return PyErr_Format(PyExc_TypeError, "%s: arguments by name only", module_type_name(type));
    }
    return type->tp_alloc(type, 0);
}

static PyObject **module_field(PyObject *self, const SrField *field) { return (PyObject **)((char *)self + field->at); }

int sr_take_fields(PyObject *self, PyObject *kwargs, const SrField *fields) {
    for (; fields->name != NULL; fields++) {
        PyObject *value = kwargs == NULL ? NULL : PyDict_GetItemString(kwargs, fields->name);
        if (value == NULL) {
            PyErr_Format(PyExc_TypeError, "%s: %s is missing", module_type_name(Py_TYPE(self)), fields->name);
            return -1;
        }
        *module_field(self, fields) = Py_NewRef(value);
    }
    return 0;
}

int sr_wrong_type(PyObject *self) {
    PyErr_Format(PyExc_TypeError, "%s: an argument is of the wrong type", module_type_name(Py_TYPE(self)));
    return -1;
}

int sr_visit_fields(PyObject *self, const SrField *fields, visitproc visit, void *arg) {
    for (; fields->name != NULL; fields++) {
        Py_VISIT(*module_field(self, fields));
    }
    return 0;
}

void sr_clear_fields(PyObject *self, const SrField *fields) {
    for (; fields->name != NULL; fields++) {
        Py_CLEAR(*module_field(self, fields));
    }
}

void sr_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    type->tp_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* keep_heap(): have glibc keep the free memory at the upper end of the heap, to 64 MiB.
 *
 * The result of a replay is the newest block of the heap, and is freed at once. That end then often passes the size from
 * which glibc returns it to the system, and the next operators take a page fault for each 4 KiB. The size follows the
 * largest block that was freed and had its own mapping: so one of nearly 32 MiB is taken and freed, untouched, as any
 * program does that frees such a tensor. A size that the user has set (mallopt, MALLOC_TRIM_THRESHOLD_) stays.
 *
 * glibc has no call that undoes this, so it outlasts the comparison. Measured on the CNN of benchmarks/workloads.py, without
 * it: 1,300 to 2,500 page faults in an isolated step instead of none, and 14 % more processor time (medians of 4 runs
 * each, alternating: 54.6 ms, 54.1 to 56.0, against 48.0 ms, 41.0 to 51.6). SHADOWRUN_KEEP_HEAP=0 switches it off. */
static PyObject *module_keep_heap(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
#ifdef __GLIBC__
    enum { MAX_MAPPED = 32 << 20, HEADER = 64 << 10 };
    /* Volatile: a compiler may leave out a pair of malloc and free whose block is not used. */
    void *volatile block = malloc(MAX_MAPPED - HEADER);
    free(block);
#endif
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"setup_tensors", (PyCFunction)(void (*)(void))sr_setup_tensors, METH_FASTCALL, NULL},
    {"setup_shim", (PyCFunction)(void (*)(void))sr_setup_shim, METH_FASTCALL, NULL},
    {"plainly_equal", (PyCFunction)(void (*)(void))sr_plainly_equal, METH_FASTCALL, NULL},
    {"statistics", (PyCFunction)(void (*)(void))sr_statistics, METH_FASTCALL, NULL},
    {"setup_diff", (PyCFunction)(void (*)(void))sr_setup_diff, METH_FASTCALL, NULL},
    {"diff", (PyCFunction)(void (*)(void))sr_diff, METH_FASTCALL, NULL},
    {"differing", (PyCFunction)(void (*)(void))sr_differing, METH_FASTCALL, NULL},
    {"add_rounded_product", (PyCFunction)(void (*)(void))sr_add_rounded_product, METH_FASTCALL, NULL},
    {"nearness", (PyCFunction)(void (*)(void))sr_nearness, METH_FASTCALL, NULL},
    {"product_sketch", (PyCFunction)(void (*)(void))sr_product_sketch, METH_FASTCALL, NULL},
    {"context_key", (PyCFunction)(void (*)(void))sr_context_key, METH_FASTCALL, NULL},
    {"install_dispatch_slot", sr_install_dispatch_slot, METH_O, NULL},
    {"setup_digests", sr_setup_digests, METH_O, NULL},
    {"digest", (PyCFunction)(void (*)(void))sr_digest, METH_FASTCALL, NULL},
    {"digest_memory", (PyCFunction)(void (*)(void))sr_digest_memory, METH_FASTCALL, NULL},
    {"split_samples", sr_split_samples, METH_VARARGS, NULL},
    {"setup_places", (PyCFunction)(void (*)(void))sr_setup_places, METH_FASTCALL, NULL},
    {"place", sr_place, METH_O, NULL},
    {"setup_storage_rows", sr_setup_storage_rows, METH_O, NULL},
    {"forget_freed", sr_forget_freed, METH_O, NULL},
    {"call_rows", sr_call_rows, METH_VARARGS, NULL},
    {"keep_heap", (PyCFunction)module_keep_heap, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int exec_module(PyObject *module) {
    int failed = sr_add_origins_type(module) || sr_add_row_buffer_type(module) || sr_add_close_bounds_type(module) || sr_add_compare_handler_type(module) ||
                 sr_add_method_type(module) || sr_add_storage_rows_type(module) || sr_add_tensor_rows_type(module) ||
                 sr_add_record_handler_type(module) || sr_add_watch_schedule_type(module) || sr_add_finite_handler_type(module);
    failed = failed || PyModule_AddIntConstant(module, "SOURCES", SOURCES);
    return failed ? -1 : PyModule_AddIntConstant(module, "VERSION", VERSION);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, exec_module},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "shadowrun.native._core",
    .m_doc = "Hot paths of shadowrun; see shadowrun/native/__init__.py.",
    .m_size = 0,
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
