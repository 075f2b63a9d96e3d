/* Rows of a recording and the tensors whose values they have: storage_rows.c, tensor_rows.c. */

#ifndef SHADOWRUN_TENSOR_ROWS_H
#define SHADOWRUN_TENSOR_ROWS_H

#include "places.h"

/* What is known of a storage: `_StorageRows` of recording/data_flow.py, with the same attributes. */
typedef struct {
    PyObject_HEAD
    PyObject *reference; /* weak; a number of torch's */
    PyObject *last, *rows;
    long long version;
    char counts;
} SrStorageRows;

int sr_add_storage_rows_type(PyObject *module);
int sr_is_storage_rows(PyObject *value);
PyObject *sr_setup_storage_rows(PyObject *module, PyObject *free_reference);
SrStorageRows *sr_new_storage_rows(PyObject *tensor, long long version);
int sr_renew_storage_rows(SrStorageRows *self, long long version); /* forget all rows; -1 with an exception */

/* Whether no write was missed since the last recorded one. */
int sr_is_current(SrStorageRows *self, long long version);

int sr_add_tensor_rows_type(PyObject *module);

#endif
