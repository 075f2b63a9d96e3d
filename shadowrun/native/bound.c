/* The mode's method as torch finds and calls it, for each operator call.
 *
 * Torch looks for `__torch_dispatch__` twice and for the `__self__` of what it found, each time by a C string: as a rule a
 * new Python string, its hash, and a search through the types of the mode, a tenth of what handing a call over takes. A
 * type may answer C strings itself (`tp_getattr`). Ours does: the method lies in a slot of the mode, and is an object of
 * our own that knows mode and handler.
 */

#include "handler.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *mode, *handler; /* no handler: all calls go to Python */
} Bound;

static PyTypeObject *bound_type;
static Py_ssize_t slot; /* where in a mode the method lies */

/* As if the type did not answer C strings. */
static PyObject *usual(PyObject *object, const char *name) {
    PyObject *text = PyUnicode_FromString(name);
    PyObject *found = text == NULL ? NULL : Py_TYPE(object)->tp_getattro(object, text);
    Py_XDECREF(text);
    return found;
}

static PyObject *of_mode(PyObject *mode, char *name) {
    PyObject *method = in_slot(mode, slot);
    if (method != NULL && Py_IS_TYPE(method, bound_type) && strcmp(name, "__torch_dispatch__") == 0) {
        return Py_NewRef(method);
    }
    return usual(mode, name);
}

static PyObject *of_bound(PyObject *self, char *name) {
    PyObject *mode = ((Bound *)self)->mode;
    return mode != NULL && strcmp(name, "__self__") == 0 ? Py_NewRef(mode) : usual(self, name);
}

/* quicken(type): have modes of this type, which have a slot `_method`, find it there. */
PyObject *quicken(PyObject *module, PyObject *type) {
    (void)module;
    PyTypeObject *modes = (PyTypeObject *)type;
    if (!PyType_Check(type) || !PyType_HasFeature(modes, Py_TPFLAGS_HEAPTYPE) || modes->tp_getattr != NULL ||
        modes->tp_getattro == NULL) {
        PyErr_SetString(PyExc_TypeError, "quicken: not a type of modes");
        return NULL;
    }
    Py_ssize_t offset = slot_in(modes, "_method");
    if (offset < 0) {
        return NULL;
    }
    slot = offset;
    modes->tp_getattr = of_mode;
    PyType_Modified(modes);
    Py_RETURN_NONE;
}

static PyObject *call(PyObject *self, PyObject *const *args, size_t n, PyObject *names) {
    Bound *bound = (Bound *)self;
    if (bound->mode == NULL) { /* the garbage collector has been here */
        PyErr_SetString(PyExc_RuntimeError, "a method without its mode");
        return NULL;
    }
    PyObject *mode = Py_NewRef(bound->mode), *handler = Py_XNewRef(bound->handler);
    PyObject *out = dispatch_call(mode, (Handler *)handler, args, PyVectorcall_NARGS(n), names);
    Py_DECREF(mode);
    Py_XDECREF(handler);
    return out;
}

PyObject *bind(Handler *self, PyObject *mode) {
    Bound *bound = PyObject_GC_New(Bound, bound_type);
    if (bound != NULL) {
        bound->call = call;
        bound->mode = Py_NewRef(mode);
        bound->handler = Py_NewRef((PyObject *)self);
        PyObject_GC_Track(bound);
    }
    return (PyObject *)bound;
}

/* leave(): have all calls go to Python from here on. */
static PyObject *leave(PyObject *self, PyObject *none) {
    (void)none;
    Py_CLEAR(((Bound *)self)->handler);
    Py_RETURN_NONE;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Bound *)self)->mode);
    Py_VISIT(((Bound *)self)->handler);
    return 0;
}

static int clear(PyObject *self) {
    Py_CLEAR(((Bound *)self)->mode);
    Py_CLEAR(((Bound *)self)->handler);
    return 0;
}

static void dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"leave", leave, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__self__", T_OBJECT_EX, offsetof(Bound, mode), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Bound, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, dealloc}, {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_methods, methods}, {Py_tp_members, members},   {Py_tp_call, PyVectorcall_Call},
    {Py_tp_getattr, of_bound}, {Py_tp_getattro, PyObject_GenericGetAttr}, {0, NULL},
};

static PyType_Spec spec = {
    .name = "shadowrun.native._core.Bound",
    .basicsize = sizeof(Bound),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

int add_bound(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    bound_type = (PyTypeObject *)type; /* held by the module, which is never unloaded */
    return type == NULL || PyModule_AddObjectRef(module, "Bound", type) ? -1 : 0;
}
