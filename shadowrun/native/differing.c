/* Which elements of two tensors differ, and how: numerics.differing in C. */

#include "stats.h"

enum { ZEROS = 1, CLASSES = 2, NANS = 4, PART = 2048 };

typedef size_t (*finder)(memory, memory, size_t, int, int64_t *, unsigned char *, size_t, unsigned *);

/* Indices and kinds of the elements that differ; room for `most` of them. Returns how many there are, and all kinds. */
#define FIND(width)                                                                                                    \
    static size_t find_##width(                                                                                        \
        memory left, memory right, size_t n, int mantissa, int64_t *where, unsigned char *kinds, size_t most,          \
        unsigned *all) {                                                                                               \
        const uint##width##_t sign = (uint##width##_t)((uint##width##_t)1 << (width - 1));                             \
        const uint##width##_t infinite = (uint##width##_t)(sign - ((uint##width##_t)1 << mantissa));                   \
        size_t found = 0;                                                                                              \
        for (size_t start = 0; start < n; start += PART) {                                                             \
            size_t stop = n - start < PART ? n : start + PART, bytes = width / 8;                                      \
            if (!memcmp(left + start * bytes, right + start * bytes, (stop - start) * bytes)) continue;                \
            for (size_t i = start; i < stop; i++) {                                                                    \
                uint##width##_t a, e;                                                                                  \
                memcpy(&a, left + i * bytes, bytes);                                                                   \
                memcpy(&e, right + i * bytes, bytes);                                                                  \
                if (a == e) continue;                                                                                  \
                if (found == most) return found + 1;                                                                   \
                a = (uint##width##_t)(a & ~sign), e = (uint##width##_t)(e & ~sign);                                    \
                unsigned nan_a = a > infinite, nan_e = e > infinite, special = (a == infinite) | (e == infinite);      \
                unsigned kind = ((a | e) == 0 ? ZEROS : 0u) | (nan_a & nan_e ? NANS : 0u) |                            \
                                ((nan_a ^ nan_e) | (special & !nan_a & !nan_e) ? CLASSES : 0u);                        \
                where[found] = (int64_t)i;                                                                             \
                kinds[found++] = (unsigned char)kind;                                                                  \
                *all |= kind;                                                                                          \
            }                                                                                                          \
        }                                                                                                              \
        return found;                                                                                                  \
    }

FIND(16)
FIND(32)
FIND(64)

/* differing(left, right, n, width, mantissa, where, kinds, most): addresses of two dense tensors of IEEE floats, their
 * elements, their format, and room for what differs. Returns how many do (more than `most`: too many), and all kinds. */
PyObject *differing(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    (void)module;
    if (n_args != 8) {
        return wrong_count("differing");
    }
    memory left = PyLong_AsVoidPtr(args[0]), right = PyLong_AsVoidPtr(args[1]);
    size_t n = PyLong_AsSize_t(args[2]), most = PyLong_AsSize_t(args[7]), found = 0;
    long width = PyLong_AsLong(args[3]), mantissa = PyLong_AsLong(args[4]);
    int64_t *where = PyLong_AsVoidPtr(args[5]);
    unsigned char *kinds = PyLong_AsVoidPtr(args[6]);
    unsigned all = 0;
    if (PyErr_Occurred()) {
        return NULL;
    }
    if ((width != 16 && width != 32 && width != 64) || mantissa < 1 || mantissa > width - 2) {
        return PyErr_Format(PyExc_ValueError, "no floats of %ld bits with %ld of mantissa", width, mantissa);
    }
    finder find = width == 16 ? find_16 : width == 32 ? find_32 : find_64;
    if (n <= FEW_BYTES * 8 / (size_t)width) {
        found = find(left, right, n, (int)mantissa, where, kinds, most, &all);
    } else {
        Py_BEGIN_ALLOW_THREADS
        found = find(left, right, n, (int)mantissa, where, kinds, most, &all);
        Py_END_ALLOW_THREADS
    }
    return Py_BuildValue("nI", (Py_ssize_t)found, all);
}
