/* Data pointer, dtype, shape and strides of a tensor, without its Python attributes.
 *
 * One call of DLPack's exchange API gives them all: a C structure that torch.Tensor carries since torch 2.11
 * (`__dlpack_c_exchange_api__`). It knows strided tensors of the usual dtypes. For any other it raises a C++ exception with
 * a backtrace, which takes a millisecond, so those are left to Python.
 */

#include "core.h"

#include <string.h>

enum { MAX_FAILURES = 100, REST = 10000 };

typedef int (*DlpackFromObject)(void *object, SrTensor *out);

typedef struct {
    struct {
        uint32_t major, minor;
    } version;
    void *earlier;
    void *allocate, *managed_from_object, *managed_to_object;
    DlpackFromObject from_object;
    void *stream;
} DlpackExchangeApi;

static DlpackFromObject dlpack_from_object;
static PyTypeObject *tensor_type, *parameter_type;
static PyObject *exact_types; /* a frozenset */
static PyObject *shape_descriptor, *dtype_descriptor, *cpu_descriptor, *neg_descriptor, *layout_descriptor;
static PyObject *strided;        /* torch.strided */
static int dlpack_failures, dlpack_rests; /* recent refusals of DLPack; calls for which it is not used */

enum { MAX_CODES = 128, MAX_DIMS = 64, FIRST_PAGE = 4096 }; /* torch has at most 64 dimensions */

static struct {
    Py_ssize_t offset; /* of the at::Tensor in its Python object; 0: unknown, the shim is not used */
    const void *kind;  /* address of the virtual table of plain tensors */
    SrShimAsk n_dims, sizes, dtype, device;
    PyObject *dtypes[MAX_CODES]; /* by torch's number; there is one each for the process */
    char refused[MAX_CODES];     /* the dtypes that DLPack does not know */
    char refused_elsewhere;      /* DLPack does not know an accelerator */
} shim;

/* Of others, some have no sizes, and the shim would print that to stderr. */
void *sr_plain_tensor(PyObject *tensor) {
    char *at = (char *)tensor + shim.offset;
    if (shim.offset == 0 || !sr_is_tensor(tensor)) {
        return NULL;
    }
    const void *const *impl = *(const void *const **)at;
    return impl != NULL && *impl == shim.kind ? at : NULL;
}

/* setup_shim(tensor, its _cdata, addresses of n_dims, sizes, dtype, device): whether the shim can be used. */
PyObject *sr_setup_shim(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 6 || !sr_is_tensor(args[0])) {
        return sr_wrong_count("setup_shim");
    }
    void *addresses[5];
    shim.offset = 0;
    for (int i = 0; i < 5; i++) {
        addresses[i] = PyLong_AsVoidPtr(args[1 + i]);
        if (addresses[i] == NULL) {
            PyErr_Clear();
            Py_RETURN_FALSE;
        }
    }
    /* Searched, not known: where a tensor's Python object keeps the C++ one is no part of any interface. */
    Py_ssize_t size = Py_TYPE(args[0])->tp_basicsize, offset = sizeof(PyObject);
    while (offset + (Py_ssize_t)sizeof(void *) <= size && *(void **)((char *)args[0] + offset) != addresses[0]) {
        offset += sizeof(void *);
    }
    if (offset + (Py_ssize_t)sizeof(void *) > size) {
        Py_RETURN_FALSE;
    }
    SrShimAsk *asks[] = {&shim.n_dims, &shim.sizes, &shim.dtype, &shim.device};
    for (int i = 0; i < 4; i++) {
        memcpy(asks[i], &addresses[1 + i], sizeof(void *));
    }
    for (int code = 0; code < MAX_CODES; code++) {
        Py_CLEAR(shim.dtypes[code]);
    }
    shim.kind = *(void **)addresses[0];
    shim.offset = offset;
    Py_RETURN_TRUE;
}

/* A number of 32 or 64 bits: there is room for either, should a torch exchange the functions. 0, or an error. */
static int shim_ask(SrShimAsk function, void *tensor, int64_t *answer) {
    *answer = -1;
    return function(tensor, answer);
}

/* The shape and dtype of a tensor without an object for them: 1; 0 where Python has to be asked. */
int sr_shape_and_dtype(PyObject *tensor, int64_t *n_dims, const int64_t **sizes, PyObject **dtype) {
    void *asked = sr_plain_tensor(tensor);
    int64_t answer;
    *sizes = NULL;
    if (asked == NULL || shim_ask(shim.n_dims, asked, n_dims) || *n_dims < 0 || *n_dims > MAX_DIMS ||
        shim_ask(shim.dtype, asked, &answer) || shim.sizes(asked, (void *)sizes) ||
        (*n_dims > 0 && (uintptr_t)*sizes < FIRST_PAGE)) {
        return 0;
    }
    int32_t code;
    memcpy(&code, &answer, sizeof code);
    if (code < 0 || code >= MAX_CODES) {
        return 0;
    }
    if (shim.dtypes[code] == NULL) {
        shim.dtypes[code] = sr_dtype(tensor); /* kept for the process */
        PyErr_Clear();
    }
    *dtype = shim.dtypes[code];
    return *dtype != NULL;
}

/* setup_tensors(torch.Tensor, torch.nn.Parameter, exact types, torch.strided): whether this torch has what is needed. */
PyObject *sr_setup_tensors(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 4 || !PyType_Check(args[0]) || !PyType_Check(args[1]) || !PyFrozenSet_Check(args[2])) {
        return sr_wrong_count("setup_tensors");
    }
    PyObject *capsule = PyObject_GetAttrString(args[0], "__dlpack_c_exchange_api__");
    DlpackExchangeApi *api = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule); /* the structure lives as long as the process */
    if (api == NULL) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    if (api->version.major != 1 || api->from_object == NULL) {
        Py_RETURN_FALSE;
    }
    dlpack_from_object = api->from_object;
    Py_XSETREF(tensor_type, (PyTypeObject *)Py_NewRef(args[0]));
    Py_XSETREF(parameter_type, (PyTypeObject *)Py_NewRef(args[1]));
    Py_XSETREF(exact_types, Py_NewRef(args[2]));
    Py_XSETREF(shape_descriptor, PyObject_GetAttrString(args[0], "shape"));
    Py_XSETREF(dtype_descriptor, PyObject_GetAttrString(args[0], "dtype"));
    Py_XSETREF(cpu_descriptor, PyObject_GetAttrString(args[0], "is_cpu"));
    Py_XSETREF(neg_descriptor, PyObject_GetAttrString(args[0], "is_neg"));
    Py_XSETREF(layout_descriptor, PyObject_GetAttrString(args[0], "layout"));
    Py_XSETREF(strided, Py_NewRef(args[3]));
    PyErr_Clear();
    dlpack_failures = dlpack_rests = 0;
    Py_RETURN_TRUE;
}

int sr_is_tensor(PyObject *value) { return Py_IS_TYPE(value, tensor_type) || Py_IS_TYPE(value, parameter_type); }

int sr_is_tensor_type(PyObject *type) { return type == (PyObject *)tensor_type || type == (PyObject *)parameter_type; }

int sr_is_tensor_or_subclass(PyObject *value) { return PyObject_IsInstance(value, (PyObject *)tensor_type); }

int sr_is_exact(PyObject *value) { return PySet_Contains(exact_types, (PyObject *)Py_TYPE(value)); }

/* An attribute that torch computes; a subclass may override it. */
static PyObject *tensor_attribute(PyObject *tensor, PyObject *descriptor, PyObject *name) {
    return sr_get_computed(tensor, sr_is_tensor(tensor) ? descriptor : NULL, name);
}

PyObject *sr_shape(PyObject *tensor) {
    SR_NAME(shape, "shape") { return NULL; }
    return tensor_attribute(tensor, shape_descriptor, shape);
}

PyObject *sr_dtype(PyObject *tensor) {
    SR_NAME(dtype, "dtype") { return NULL; }
    return tensor_attribute(tensor, dtype_descriptor, dtype);
}

/* The number of a dense CPU tensor's dtype; -1 for others; MAX_CODES where the shim does not know it, and the layout is strided. */
static int32_t tensor_dense_dtype(PyObject *value) {
    int32_t type, code;
    if (shim.offset != 0 && sr_is_tensor(value)) {
        void *asked = sr_plain_tensor(value);
        int known = asked != NULL && shim.device(asked, &type) == 0 && shim.dtype(asked, &code) == 0;
        return known && type == SR_TORCH_CPU && code >= 0 && code < MAX_CODES ? code : -1;
    }
    SR_NAME(layout, "layout") { return -1; }
    PyObject *answer = tensor_attribute(value, layout_descriptor, layout);
    Py_XDECREF(answer); /* there is one object for each layout */
    PyErr_Clear();
    return answer == strided ? MAX_CODES : -1;
}

/* Dense tensors on the CPU only: 1; 0 for others, and where DLPack does not know the dtype. */
int sr_read_tensor(PyObject *value, SrTensor *found) {
    int32_t code = tensor_dense_dtype(value);
    if (code < 0 || (code < MAX_CODES && shim.refused[code])) {
        return 0;
    }
    /* After many refusals in a row DLPack is left alone for a while: each takes a millisecond. */
    if (dlpack_rests > 0) {
        dlpack_rests--;
        return 0;
    }
    if (dlpack_from_object(value, found) != 0) {
        PyErr_Clear();
        if (code < MAX_CODES) {
            shim.refused[code] = 1;
        } else if (++dlpack_failures >= MAX_FAILURES) {
            dlpack_failures = 0, dlpack_rests = REST;
        }
        return 0;
    }
    dlpack_failures -= dlpack_failures > 0; /* a few among many are no reason to stop */
    return 1;
}

/* The type of the device of a plain tensor whose memory is its own: of the CPU, CUDA or ROCm, XPU, and of devices that a
 * package brings. Others, as meta and XLA, have values elsewhere or none: -1. */
static int32_t tensor_device(void *asked) {
    static const int32_t with_memory[] = {SR_TORCH_CPU, 1, 12, 20};
    int64_t number;
    int32_t type;
    if (asked == NULL || shim_ask(shim.device, asked, &number)) {
        return -1;
    }
    memcpy(&type, &number, sizeof type);
    for (size_t i = 0; i < sizeof with_memory / sizeof *with_memory; i++) {
        if (type == with_memory[i]) {
            return type;
        }
    }
    return -1;
}

int sr_read_tensor_anywhere(PyObject *tensor, SrTensor *found) {
    int32_t device = tensor_device(sr_plain_tensor(tensor));
    if (device == SR_TORCH_CPU) {
        return sr_read_tensor(tensor, found);
    }
    if (device < 0 || shim.refused_elsewhere) {
        return 0;
    }
    if (dlpack_from_object(tensor, found) != 0) {
        PyErr_Clear();
        shim.refused_elsewhere = 1;
        return 0;
    }
    return 1;
}

int sr_is_contiguous(const SrTensor *t) {
    int64_t stride = 1;
    for (int32_t d = t->ndim - 1; d >= 0 && t->strides != NULL; d--) {
        if (t->shape[d] != 1) {
            if (t->strides[d] != stride) {
                return 0;
            }
            stride *= t->shape[d];
        }
    }
    return 1;
}

size_t sr_n_elements(const SrTensor *t) {
    size_t n = 1;
    for (int32_t d = 0; d < t->ndim; d++) {
        n *= (size_t)t->shape[d];
    }
    return n;
}

size_t sr_n_bytes(const SrTensor *t) { return (size_t)t->dtype.bits * t->dtype.lanes / 8 * sr_n_elements(t); }

int sr_is_on_cpu(const SrTensor *t) { return t->device.type == SR_DLPACK_CPU; }

int sr_is_cpu_tensor(PyObject *tensor) {
    SR_NAME(is_cpu, "is_cpu") { return 0; }
    void *asked = sr_plain_tensor(tensor);
    int64_t number;
    if (asked != NULL && shim_ask(shim.device, asked, &number) == 0) {
        int32_t type;
        memcpy(&type, &number, sizeof type);
        return type == SR_TORCH_CPU;
    }
    PyObject *answer = tensor_attribute(tensor, cpu_descriptor, is_cpu);
    int is_there = answer == Py_True;
    Py_XDECREF(answer);
    return is_there;
}

int sr_is_negated(PyObject *t) {
    SR_NAME(is_neg, "is_neg") { return -1; }
    PyObject *answer;
    if (sr_is_tensor(t) && neg_descriptor != NULL && Py_IS_TYPE(neg_descriptor, &PyMethodDescr_Type) &&
        ((PyMethodDescrObject *)neg_descriptor)->d_method->ml_flags == METH_NOARGS) {
        answer = ((PyMethodDescrObject *)neg_descriptor)->d_method->ml_meth(t, NULL);
    } else {
        answer = PyObject_CallMethodNoArgs(t, is_neg);
    }
    int negated = answer == NULL ? -1 : answer == Py_True;
    Py_XDECREF(answer);
    return negated;
}

int sr_bytes_differ(const void *actual, const void *expected, size_t n) {
    int found;
    if (n <= SR_FEW_BYTES) {
        return memcmp(actual, expected, n) != 0;
    }
    Py_BEGIN_ALLOW_THREADS
    found = memcmp(actual, expected, n) != 0;
    Py_END_ALLOW_THREADS
    return found;
}

/* plainly_equal(actual, expected): see numerics/bits.py. False also for what is no plain tensor. */
PyObject *sr_plainly_equal(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 2) {
        return sr_wrong_count("plainly_equal");
    }
    SrTensor a, e;
    if (!sr_is_tensor(args[0]) || !sr_is_tensor(args[1]) || !sr_read_tensor(args[0], &a) || !sr_read_tensor(args[1], &e)) {
        Py_RETURN_FALSE;
    }
    /* No address: an empty tensor, or a ZeroTensor, which has no memory. */
    if (a.device.type != SR_DLPACK_CPU || e.device.type != SR_DLPACK_CPU || a.data == NULL || e.data == NULL ||
        a.dtype.code == SR_DLPACK_COMPLEX || a.dtype.code != e.dtype.code || a.dtype.bits != e.dtype.bits || a.dtype.lanes != 1 ||
        e.dtype.lanes != 1 || a.dtype.bits % 8 != 0 || a.ndim != e.ndim) {
        Py_RETURN_FALSE;
    }
    for (int32_t d = 0; d < a.ndim; d++) {
        if (a.shape[d] != e.shape[d]) {
            Py_RETURN_FALSE;
        }
    }
    if (!sr_is_contiguous(&a) || !sr_is_contiguous(&e)) {
        Py_RETURN_FALSE;
    }
    int negated_a = sr_is_negated(args[0]), negated_e = sr_is_negated(args[1]);
    if (negated_a < 0 || negated_e < 0) {
        return NULL;
    }
    if (negated_a != negated_e) {
        Py_RETURN_FALSE;
    }
    const char *actual = (char *)a.data + a.byte_offset, *expected = (char *)e.data + e.byte_offset;
    return PyBool_FromLong(!sr_bytes_differ(actual, expected, sr_n_bytes(&a)));
}

/* ---- storage, offset, strides and version, without an object for each --------------------------------------------------
 *
 * The identity of the storage is the only one for which torch's C shim has no function. It is read where a tensor of C++
 * keeps it: at an offset that `setup_places` finds by the storages of some tensors.
 */

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
    /* Two places with the address of the storage: which of them torch keeps up to date is not known. */
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
        (place->device = tensor_device(asked)) < 0 || places.strides(asked, (void *)&place->strides) || places.offset(asked, &place->offset)) {
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
    PyObject *sizes = sr_tuple_of_numbers(place.sizes, (Py_ssize_t)place.n_dims), *strides = sr_tuple_of_numbers(place.strides, (Py_ssize_t)place.n_dims);
    PyObject *found = sizes == NULL || strides == NULL
                          ? NULL
                          : Py_BuildValue("NLLLOOO", PyLong_FromVoidPtr(place.storage), (long long)n_bytes, version, (long long)place.offset, sizes,
                                          strides, place.dtype);
    Py_XDECREF(sizes);
    Py_XDECREF(strides);
    return found;
}
