/* Storage, offset, strides and version of a tensor, without an object for each.
 *
 * The identity of the storage is the only one for which torch's C shim has no function. It is read where a tensor of C++
 * keeps it: at an offset that `setup_places` finds by the storages of some tensors.
 */

#include "places.h"

#include <string.h>

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
