/* The user's own call, without what torch does of it a second time.
 *
 * An `OpOverload` is called by way of TorchScript's operator of that name, which makes strings of its names and looks
 * for somebody who wants to handle the call himself (`__torch_function__`): a tenth of the code that a call runs through,
 * most of it out of the processor's caches. Whoever does was asked where the program called torch, and is not asked by
 * the dispatcher where no mode like ours is on. So where all tensors are torch's own the dispatcher's boxed call, which
 * comes next in any case, is made at once.
 */

#include "handler.h"

enum { MOST_GIVEN = 32 };

static int is_number(PyObject *value) {
    return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
           PyComplex_CheckExact(value);
}

/* Whether a list holds tensors of torch's own, numbers and None alone. */
static int holds_plain(PyObject *values) {
    Py_ssize_t n = PySequence_Fast_GET_SIZE(values);
    PyObject **items = PySequence_Fast_ITEMS(values);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!is_tensor(items[i]) && !is_number(items[i])) {
            return 0;
        }
    }
    return 1;
}

/* Whether it is no tensor, nor has one that might want to be asked. */
static int is_plain(PyObject *value) {
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
        return holds_plain(value);
    }
    return is_number(value) || is_exact(value) == 1;
}

/* Whether the call means the same to the dispatcher: where a tensor is due there is one, or None, and nothing else. */
static int goes_directly(const Entry *entry, PyObject *args, PyObject *kwargs) {
    Py_ssize_t n = PyTuple_GET_SIZE(args), position = 0;
    if (entry->handle == NULL || n + PyDict_GET_SIZE(kwargs) >= MOST_GIVEN) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *value = PyTuple_GET_ITEM(args, i);
        if (entry->tensors >> i & 1 ? !(is_tensor(value) || value == Py_None) : !is_plain(value)) {
            return 0;
        }
    }
    PyObject *name, *value;
    while (PyDict_Next(kwargs, &position, &name, &value)) {
        if (!is_plain(value)) {
            return 0;
        }
    }
    return 1;
}

PyObject *run_operator(Handler *self, Entry *entry, PyObject *args, PyObject *kwargs) {
    PyObject *named = PyDict_GET_SIZE(kwargs) ? kwargs : NULL;
    if (!goes_directly(entry, args, kwargs)) {
        return PyObject_Call(entry->run, args, named);
    }
    PyObject *given[MOST_GIVEN + 2]; /* the first is the callee's to use */
    Py_ssize_t n = PyTuple_GET_SIZE(args);
    given[1] = entry->handle;
    for (Py_ssize_t i = 0; i < n; i++) {
        given[2 + i] = PyTuple_GET_ITEM(args, i);
    }
    return PyObject_VectorcallDict(self->boxed, given + 1, (size_t)(n + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, named);
}
