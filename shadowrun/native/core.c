/* The module: its functions lie in the files beside it. */

#include "core.h"

#define VERSION 1

static PyMethodDef functions[] = {
    {NULL, NULL, 0, NULL},
};

static int exec_module(PyObject *module) {
    return PyModule_AddIntConstant(module, "VERSION", VERSION);
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
