/* How torch finds and calls the mode's `__torch_dispatch__`.
 *
 * For each operator call torch looks up `__torch_dispatch__` twice and then `__self__` of the result, each by a C string:
 * a new Python string, its hash, and a search through the types of the mode. A type may answer C strings itself
 * (`tp_getattr`), and this one does: the method is in a slot of the mode, and is an object that knows mode and handler.
 *
 * Instructions that a step of the tiny MLP of benchmarks/workloads.py takes more without it, by callgrind: 6 % record only,
 * 3.6 % isolated (torch 2.13). If a torch looks the method up in another way, it finds the one in Python.
 */

#include "dispatch.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

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
    PyObject *out = sr_dispatch(mode, handler, args, PyVectorcall_NARGS(n), names);
    Py_DECREF(mode);
    Py_XDECREF(handler);
    return out;
}

PyObject *sr_bind_method(PyObject *handler, PyObject *mode) {
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

static void method_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    method_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
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
    {Py_tp_dealloc, method_dealloc}, {Py_tp_traverse, method_traverse}, {Py_tp_clear, method_clear},
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

int sr_add_method_type(PyObject *module) {
    PyObject *type = PyType_FromSpec(&method_spec);
    method_type = (PyTypeObject *)type; /* held by the module, which is never unloaded */
    return type == NULL || PyModule_AddObjectRef(module, "DispatchMethod", type) ? -1 : 0;
}
