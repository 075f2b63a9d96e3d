/* Where a tensor lies: storages.c. */

#ifndef SHADOWRUN_PLACES_H
#define SHADOWRUN_PLACES_H

#include "core.h"

/* What is borrowed stays as long as nothing changes the tensor. */
typedef struct {
    void *storage;    /* its identity while it lives */
    int64_t offset;   /* in it, in elements */
    int64_t n_dims;
    const int64_t *sizes, *strides;
    PyObject *dtype;
} SrPlace;

/* Of an ordinary dense tensor on the CPU: 1; 0 where Python has to be asked. */
int sr_read_place(PyObject *tensor, SrPlace *place);

int sr_read_storage_size(PyObject *tensor, int64_t *n_bytes); /* likewise */

/* Number of writes to its memory, as torch counts them, or SR_UNCOUNTED; -1 with an exception. */
enum { SR_UNCOUNTED = -1 };
int sr_read_version(PyObject *tensor, long long *version);

PyObject *sr_setup_places(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *sr_place(PyObject *module, PyObject *tensor);

#endif
