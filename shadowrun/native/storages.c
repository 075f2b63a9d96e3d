/* Storage, offset, strides and version of a tensor, without an object for each.
 *
 * The identity of the storage is the only one for which torch's C shim has no function. It is read where a tensor of C++
 * keeps it: at an offset that `setup_places` finds by the storages of some tensors.
 */

#include "storages.h"
#include "tensor_rows.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

enum { PLACES_WORDS = 8 }; /* of a tensor of C++ that are searched; it has more than twenty */

static struct {
    size_t storage_at; /* in bytes; 0: unknown, and Python is asked */
    SrShimAsk strides, offset, n_bytes;
    PyObject *version, *is_inference; /* descriptors */
} places;

/* The offset at which each of the tensors has the address of its storage; 0 where there is none, or several. */
static size_t places_find_storage(PyObject *samples) {
    size_t found = 0;
    int n_found = 0;
    for (size_t at = sizeof(void *); at < PLACES_WORDS * sizeof(void *); at += sizeof(void *)) {
        int fits = 1;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(samples) && fits; i++) {
            PyObject *pair = PyTuple_GET_ITEM(samples, i);
            void **tensor = sr_plain_tensor(PyTuple_GET_ITEM(pair, 0)), *storage = PyLong_AsVoidPtr(PyTuple_GET_ITEM(pair, 1));
            fits = tensor != NULL && storage != NULL && *(void **)((char *)*tensor + at) == storage;
        }
        if (fits) {
            found = at;
            n_found++;
        }
    }
    PyErr_Clear();
    return n_found == 1 ? found : 0;
}

/* setup_places(((tensor, address of its storage), …), addresses of aoti_torch_get_strides, …_get_storage_offset and
 * …_get_storage_size): whether `place` answers. */
PyObject *sr_setup_places(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 4 || !PyTuple_Check(args[0])) {
        return sr_wrong_count("setup_places");
    }
    places.storage_at = 0;
    void *addresses[] = {PyLong_AsVoidPtr(args[1]), PyLong_AsVoidPtr(args[2]), PyLong_AsVoidPtr(args[3])};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[0]); i++) {
        PyObject *pair = PyTuple_GET_ITEM(args[0], i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 || !sr_is_tensor(PyTuple_GET_ITEM(pair, 0))) {
            return sr_wrong_count("setup_places");
        }
    }
    PyObject *first = PyTuple_GET_SIZE(args[0]) ? PyTuple_GET_ITEM(PyTuple_GET_ITEM(args[0], 0), 0) : NULL;
    if (PyErr_Occurred() || first == NULL || addresses[0] == NULL || addresses[1] == NULL || addresses[2] == NULL) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    memcpy(&places.strides, &addresses[0], sizeof(void *));
    memcpy(&places.offset, &addresses[1], sizeof(void *));
    memcpy(&places.n_bytes, &addresses[2], sizeof(void *));
    Py_XSETREF(places.version, PyObject_GetAttrString((PyObject *)Py_TYPE(first), "_version"));
    Py_XSETREF(places.is_inference, PyObject_GetAttrString((PyObject *)Py_TYPE(first), "is_inference"));
    PyErr_Clear();
    if (places.version != NULL && places.is_inference != NULL && Py_IS_TYPE(places.is_inference, &PyMethodDescr_Type) &&
        ((PyMethodDescrObject *)places.is_inference)->d_method->ml_flags == METH_NOARGS) {
        places.storage_at = places_find_storage(args[0]);
    }
    return PyBool_FromLong(places.storage_at != 0);
}

int sr_read_place(PyObject *tensor, SrPlace *place) {
    void **asked = places.storage_at ? sr_plain_tensor(tensor) : NULL;
    if (asked == NULL || !sr_shape_and_dtype(tensor, &place->n_dims, &place->sizes, &place->dtype) ||
        !sr_is_cpu_tensor(tensor) || places.strides(asked, (void *)&place->strides) || places.offset(asked, &place->offset)) {
        return 0;
    }
    memcpy(&place->storage, (char *)*asked + places.storage_at, sizeof place->storage);
    return place->storage != NULL;
}

int sr_read_storage_size(PyObject *tensor, int64_t *n_bytes) {
    void *asked = sr_plain_tensor(tensor);
    return asked != NULL && places.n_bytes(asked, n_bytes) == 0;
}

int sr_read_version(PyObject *tensor, long long *version) {
    SR_NAME(version_name, "_version") { return -1; }
    PyObject *inference = ((PyMethodDescrObject *)places.is_inference)->d_method->ml_meth(tensor, NULL);
    if (inference == NULL) {
        return -1;
    }
    int is_inference = inference == Py_True;
    Py_DECREF(inference);
    *version = SR_UNCOUNTED;
    if (is_inference) { /* torch would raise */
        return 0;
    }
    PyObject *number = sr_get_computed(tensor, places.version, version_name);
    if (number == NULL) {
        return -1;
    }
    *version = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return *version == -1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *places_tuple(const int64_t *numbers, int64_t n) {
    PyObject *found = PyTuple_New((Py_ssize_t)n);
    for (int64_t i = 0; i < n && found != NULL; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (number == NULL) {
            Py_CLEAR(found);
        } else {
            PyTuple_SET_ITEM(found, (Py_ssize_t)i, number);
        }
    }
    return found;
}

/* place(tensor): (storage, its bytes, version, offset, sizes, strides, dtype), to hold against what Python knows; None where Python has
 * to be asked. */
PyObject *sr_place(PyObject *module, PyObject *tensor) {
    (void)module;
    SrPlace place;
    long long version;
    int64_t n_bytes;
    if (!sr_read_place(tensor, &place) || !sr_read_storage_size(tensor, &n_bytes)) {
        Py_RETURN_NONE;
    }
    if (sr_read_version(tensor, &version)) {
        return NULL;
    }
    PyObject *sizes = places_tuple(place.sizes, place.n_dims), *strides = places_tuple(place.strides, place.n_dims);
    PyObject *found = sizes == NULL || strides == NULL
                          ? NULL
                          : Py_BuildValue("NLLLOOO", PyLong_FromVoidPtr(place.storage), (long long)n_bytes, version, (long long)place.offset, sizes,
                                          strides, place.dtype);
    Py_XDECREF(sizes);
    Py_XDECREF(strides);
    return found;
}

/* ---- what a recording knows of a storage: `_StorageRows` of recording/data_flow.py is the specification --------------- */

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
