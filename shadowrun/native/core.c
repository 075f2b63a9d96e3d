/* The module: its functions lie in the files beside it. */

#include "core.h"

#include <structmember.h>

#define VERSION 16

#ifndef SOURCES
#define SOURCES 0 /* checksum of the C files, which building.py hands over */
#endif

Py_ssize_t slot_in(PyTypeObject *type, const char *name) {
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

PyObject *get_computed(PyObject *object, PyObject *descriptor, PyObject *name) {
    if (descriptor != NULL && Py_IS_TYPE(descriptor, &PyGetSetDescr_Type)) {
        PyGetSetDef *definition = ((PyGetSetDescrObject *)descriptor)->d_getset;
        return definition->get(object, definition->closure);
    }
    return PyObject_GetAttr(object, name);
}

void *address_in(PyObject *given, const char *name) {
    PyObject *address = PyDict_GetItemString(given, name);
    return address == NULL ? NULL : PyLong_AsVoidPtr(address);
}

static PyMethodDef functions[] = {
    {"setup", (PyCFunction)(void (*)(void))setup, METH_FASTCALL, NULL},
    {"setup_shim", (PyCFunction)(void (*)(void))setup_shim, METH_FASTCALL, NULL},
    {"plainly_equal", (PyCFunction)(void (*)(void))plainly_equal, METH_FASTCALL, NULL},
    {"statistics", (PyCFunction)(void (*)(void))statistics, METH_FASTCALL, NULL},
    {"setup_diff", (PyCFunction)(void (*)(void))setup_diff, METH_FASTCALL, NULL},
    {"diff", (PyCFunction)(void (*)(void))diff, METH_FASTCALL, NULL},
    {"differing", (PyCFunction)(void (*)(void))differing, METH_FASTCALL, NULL},
    {"context_key", (PyCFunction)(void (*)(void))context_key, METH_FASTCALL, NULL},
    {"quicken", quicken, METH_O, NULL},
    {"steady_heap", (PyCFunction)steady_heap, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int exec_module(PyObject *module) {
    int failed = add_places(module) || add_rows(module) || add_handler(module) || add_bound(module);
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
    .m_doc = "Hot parts of shadowrun in C; see shadowrun/native/__init__.py.",
    .m_size = 0,
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
