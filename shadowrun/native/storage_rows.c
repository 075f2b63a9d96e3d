/* What a recording knows of a storage: `_StorageRows` of recording/data_flow.py is the specification. */

#include "tensor_rows.h"

#include <stddef.h>
#include <structmember.h>

static PyTypeObject *storage_rows_type;
enum { STORAGE_OF, REFERENCE_OF, FREE, EXPIRED, N_FUNCTIONS };
static PyObject *storage_rows_of_torch[N_FUNCTIONS];

/* setup_storage_rows((storage of a tensor, weak reference of a storage, what frees such a reference, whether its storage was
 * freed)): functions of torch. */
PyObject *sr_setup_storage_rows(PyObject *module, PyObject *functions) {
    (void)module;
    if (!PyTuple_Check(functions) || PyTuple_GET_SIZE(functions) != N_FUNCTIONS) {
        return sr_wrong_count("setup_storage_rows");
    }
    for (int i = 0; i < N_FUNCTIONS; i++) {
        Py_XSETREF(storage_rows_of_torch[i], Py_NewRef(PyTuple_GET_ITEM(functions, i)));
    }
    Py_RETURN_NONE;
}

SrStorageRows *sr_new_storage_rows(PyObject *tensor, long long version) {
    SrStorageRows *self = PyObject_New(SrStorageRows, storage_rows_type);
    if (self == NULL) {
        return NULL;
    }
    self->reference = self->last = self->rows = NULL;
    PyObject *storage = PyObject_CallOneArg(storage_rows_of_torch[STORAGE_OF], tensor);
    self->reference = storage == NULL ? NULL : PyObject_CallOneArg(storage_rows_of_torch[REFERENCE_OF], storage);
    Py_XDECREF(storage);
    self->rows = self->reference == NULL ? NULL : PyDict_New();
    if (self->rows == NULL) {
        Py_CLEAR(self);
        return NULL;
    }
    self->last = Py_NewRef(Py_None);
    self->version = version;
    self->counts = 0;
    return self;
}

int sr_renew_storage_rows(SrStorageRows *self, long long version) {
    PyObject *rows = PyDict_New(); /* which takes no memory while it is empty */
    if (rows == NULL) {
        return -1;
    }
    self->version = version;
    self->counts = 0;
    Py_XSETREF(self->rows, rows);
    Py_XSETREF(self->last, Py_NewRef(Py_None));
    return 0;
}

int sr_is_current(SrStorageRows *self, long long version) {
    if (self->counts && version == self->version + 1) {
        self->version = version;
        self->counts = 0;
    }
    return version == self->version;
}

int sr_is_storage_rows(PyObject *value) { return Py_IS_TYPE(value, storage_rows_type); }

static PyObject *storage_rows_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *tensor;
    long long version;
    (void)type;
    if ((kwargs != NULL && PyDict_GET_SIZE(kwargs)) || !PyArg_ParseTuple(args, "OL:StorageRows", &tensor, &version)) {
        return PyErr_Occurred() ? NULL : sr_wrong_count("StorageRows");
    }
    return (PyObject *)sr_new_storage_rows(tensor, version);
}

static void storage_rows_dealloc(SrStorageRows *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->reference != NULL) {
        PyObject *error_type, *error, *trace;
        PyErr_Fetch(&error_type, &error, &trace);
        Py_XDECREF(PyObject_CallOneArg(storage_rows_of_torch[FREE], self->reference));
        PyErr_Restore(error_type, error, trace);
    }
    Py_XDECREF(self->reference);
    Py_XDECREF(self->last);
    Py_XDECREF(self->rows);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *storage_rows_renew(SrStorageRows *self, PyObject *given) {
    long long version = PyLong_AsLongLong(given);
    if ((version == -1 && PyErr_Occurred()) || sr_renew_storage_rows(self, version)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *storage_rows_get_freed(SrStorageRows *self, void *closure) {
    (void)closure;
    return PyObject_CallOneArg(storage_rows_of_torch[EXPIRED], self->reference);
}

static PyMethodDef storage_rows_methods[] = {
    {"renew", (PyCFunction)storage_rows_renew, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef storage_rows_getset[] = {
    {"freed", (getter)storage_rows_get_freed, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef storage_rows_members[] = {
    {"version", T_LONGLONG, offsetof(SrStorageRows, version), 0, NULL},
    {"counts", T_BOOL, offsetof(SrStorageRows, counts), 0, NULL},
    {"last", T_OBJECT_EX, offsetof(SrStorageRows, last), 0, NULL},
    {"rows", T_OBJECT_EX, offsetof(SrStorageRows, rows), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot storage_rows_slots[] = {
    {Py_tp_new, storage_rows_new},         {Py_tp_dealloc, storage_rows_dealloc},
    {Py_tp_methods, storage_rows_methods}, {Py_tp_members, storage_rows_members},
    {Py_tp_getset, storage_rows_getset},   {0, NULL},
};

static PyType_Spec storage_rows_spec = {
    .name = "shadowrun.native._core.StorageRows",
    .basicsize = sizeof(SrStorageRows),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = storage_rows_slots,
};

int sr_add_storage_rows_type(PyObject *module) {
    PyObject *type = PyType_FromSpec(&storage_rows_spec);
    storage_rows_type = (PyTypeObject *)type; /* held by the module, which is never unloaded */
    return type == NULL || PyModule_AddObjectRef(module, "StorageRows", type) ? -1 : 0;
}
