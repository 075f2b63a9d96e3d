/* The key of a call's context: what calls have in common that get one row in the data file.
 *
 * Forms, small numbers, strings and the like become bytes; what has no bytes of its own (a dtype, a type) lies behind
 * them. Two calls have equal keys where the keys that replay/recorder.py makes in Python are equal, but that True and 1
 * are two values here.
 */

#include "contexts.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_ITEMS = 4, LARGE = 1024 };

int put(Key *key, const void *bytes, size_t n) {
    if (key->length + n > key->room) {
        size_t room = 2 * (key->length + n);
        char *more = malloc(room);
        if (more == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(more, key->bytes, key->length);
        if (key->bytes != key->first) {
            free(key->bytes);
        }
        key->bytes = more;
        key->room = room;
    }
    memcpy(key->bytes + key->length, bytes, n);
    key->length += n;
    return 0;
}

static int put_tag(Key *key, char tag) { return put(key, &tag, 1); }

/* Takes the reference. */
static int put_object(Key *key, PyObject *object) {
    if (object == NULL) {
        return -1;
    }
    if (key->n_objects == key->objects_room) {
        size_t held = (size_t)key->n_objects * sizeof object;
        PyObject **more = malloc(2 * held);
        if (more == NULL) {
            Py_DECREF(object);
            PyErr_NoMemory();
            return -1;
        }
        memcpy(more, key->objects, held);
        if (key->objects != key->first_objects) {
            free(key->objects);
        }
        key->objects = more;
        key->objects_room *= 2;
    }
    key->objects[key->n_objects++] = object;
    return put_tag(key, 'O');
}

/* Not by DLPack: that asks for the address, and then a tensor that shares its memory until it is written to
 * (`torch._lazy_clone`) gets memory of its own. The program would notice. */
static int put_tensor(Key *key, PyObject *value) {
    const int64_t *sizes;
    int64_t n;
    PyObject *dtype;
    if (shape_and_dtype(value, &n, &sizes, &dtype)) {
        int failed = put_tag(key, 'T') || put(key, &dtype, sizeof dtype) || put(key, &n, sizeof n) ||
                     put(key, sizes, (size_t)n * sizeof *sizes);
        return failed ? -1 : 0;
    }
    PyObject *shape = shape_of(value);
    dtype = shape == NULL ? NULL : dtype_of(value);
    if (dtype == NULL) {
        Py_XDECREF(shape);
        return -1;
    }
    n = PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : -1;
    Py_DECREF(dtype); /* there is one for the process, which is never gone */
    int failed = put_tag(key, 'T') || put(key, &dtype, sizeof dtype) || put(key, &n, sizeof n);
    for (int64_t d = 0; d < n && !failed; d++) {
        int64_t size = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, d));
        failed = (size == -1 && PyErr_Occurred()) || put(key, &size, sizeof size);
    }
    Py_DECREF(shape);
    return failed ? -1 : 0;
}

static int put_string(Key *key, PyObject *value) {
    Py_ssize_t n;
    const char *text = PyUnicode_AsUTF8AndSize(value, &n);
    if (text == NULL) { /* half of a pair of surrogates, say */
        PyErr_Clear();
        return put_object(key, Py_NewRef(value));
    }
    return put_tag(key, 's') || put(key, &n, sizeof n) || put(key, text, (size_t)n) ? -1 : 0;
}

/* The first object that was equal, since `seen.c` goes by addresses: torch makes a new `device` for each call that has one.
 * There are few of them. A new reference, or NULL with an exception. */
static PyObject *first_alike(PyObject *value) {
    static PyObject *first;
    if (first == NULL && (first = PyDict_New()) == NULL) {
        return NULL;
    }
    return Py_XNewRef(PyDict_SetDefault(first, value, value));
}

static int put_value(Key *key, PyObject *value, int depth) {
    if (is_tensor(value)) {
        return put_tensor(key, value);
    }
    if (PyLong_CheckExact(value)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        /* Large ones change from step to step, as floats do: they would make each call a context of its own. */
        if (overflow || number > LARGE || number < -LARGE) {
            return put_tag(key, 'i');
        }
        return put_tag(key, 'I') || put(key, &number, sizeof number) ? -1 : 0;
    }
    if (PyFloat_CheckExact(value)) {
        return put_tag(key, 'f');
    }
    if (value == Py_None || value == Py_True || value == Py_False) {
        return put_tag(key, value == Py_None ? 'N' : value == Py_True ? '1' : '0');
    }
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
        Py_ssize_t n = PySequence_Fast_GET_SIZE(value);
        if (depth > 100) {
            PyErr_SetString(PyExc_RecursionError, "lists too deep for a context");
            return -1;
        }
        if (put_tag(key, '[') || put(key, &n, sizeof n)) {
            return -1;
        }
        for (Py_ssize_t i = 0; i < n && i < MOST_ITEMS && i < PySequence_Fast_GET_SIZE(value); i++) {
            PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
            int failed = put_value(key, item, depth + 1);
            Py_DECREF(item);
            if (failed) {
                return -1;
            }
        }
        return 0;
    }
    if (PyUnicode_CheckExact(value)) {
        return put_string(key, value);
    }
    int answer = is_exact(value);
    if (answer == 0 && (answer = is_any_tensor(value)) == 1) {
        return put_tensor(key, value);
    }
    return answer < 0 ? -1 : put_object(key, answer ? first_alike(value) : Py_NewRef((PyObject *)Py_TYPE(value)));
}

int put_call(Key *key, PyObject *args, PyObject *kwargs) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
        if (put_value(key, PyTuple_GET_ITEM(args, i), 0)) {
            return -1;
        }
    }
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(kwargs, &position, &name, &value)) {
        Py_INCREF(value);
        int failed = put_string(key, name) || put_value(key, value, 0);
        Py_DECREF(value);
        if (failed) {
            return -1;
        }
    }
    return 0;
}

PyObject *as_tuple(Key *key, PyObject *index, PyObject *device, const Place *place) {
    PyObject *bytes = PyBytes_FromStringAndSize(key->bytes, (Py_ssize_t)key->length);
    PyObject *made = bytes == NULL ? NULL : PyTuple_New(6 + key->n_objects);
    if (made == NULL) {
        Py_XDECREF(bytes);
        return NULL;
    }
    PyTuple_SET_ITEM(made, 0, Py_NewRef(index));
    PyTuple_SET_ITEM(made, 1, bytes);
    PyTuple_SET_ITEM(made, 2, Py_NewRef(device));
    PyTuple_SET_ITEM(made, 3, Py_NewRef(place->module));
    PyTuple_SET_ITEM(made, 4, Py_NewRef(place->phase));
    PyTuple_SET_ITEM(made, 5, Py_NewRef(place->site));
    for (Py_ssize_t i = 0; i < key->n_objects; i++) {
        PyTuple_SET_ITEM(made, 6 + i, Py_NewRef(key->objects[i]));
    }
    return made;
}

void begin_key(Key *key) {
    key->bytes = key->first;
    key->length = 0;
    key->room = sizeof key->first;
    key->objects = key->first_objects;
    key->n_objects = 0;
    key->objects_room = sizeof key->first_objects / sizeof *key->first_objects;
}

void drop_key(Key *key) {
    while (key->n_objects) {
        Py_DECREF(key->objects[--key->n_objects]);
    }
    if (key->bytes != key->first) {
        free(key->bytes);
    }
    if (key->objects != key->first_objects) {
        free(key->objects);
    }
}

/* context_key(index, device, place, args, kwargs) */
PyObject *context_key(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 5 || !PyTuple_Check(args[2]) || PyTuple_GET_SIZE(args[2]) != 3 || !PyTuple_Check(args[3]) ||
        !PyDict_Check(args[4])) {
        return wrong_count("context_key");
    }
    Place place = {PyTuple_GET_ITEM(args[2], 0), PyTuple_GET_ITEM(args[2], 1), PyTuple_GET_ITEM(args[2], 2)};
    Key key;
    begin_key(&key);
    PyObject *made = put_call(&key, args[3], args[4]) ? NULL : as_tuple(&key, args[0], args[1], &place);
    drop_key(&key);
    return made;
}
