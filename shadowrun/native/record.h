/* The handler of a recording: what the files record_*.c share. */

#ifndef SHADOWRUN_RECORD_H
#define SHADOWRUN_RECORD_H

#include "dispatch.h"

/* record_memory.c. What is known of a storage: `_StorageRows` of recording/data_flow.py, with the same attributes. */
typedef struct {
    PyObject_HEAD
    PyObject *reference; /* weak; a number of torch's */
    PyObject *last, *rows;
    long long version;
    char counts;
    unsigned char n_resting, rest; /* looks for freed storages that leave it out, and how many did last time */
} SrStorageRows;

int sr_add_storage_rows_type(PyObject *module);
int sr_is_storage_rows(PyObject *value);
PyObject *sr_setup_storage_rows(PyObject *module, PyObject *free_reference);
PyObject *sr_forget_freed(PyObject *module, PyObject *storages);
SrStorageRows *sr_new_storage_rows(PyObject *tensor, long long version);
int sr_renew_storage_rows(SrStorageRows *self, long long version); /* forget all rows; -1 with an exception */
PyObject *sr_place_key(const SrPlace *place, PyObject *form);
SrStorageRows *sr_known_storage(PyObject *storages, const SrPlace *place);
SrStorageRows *sr_renewed_storage(PyObject *storages, PyObject *tensor, const SrPlace *place);

/* Whether no write was missed since the last recorded one. */
int sr_is_current(SrStorageRows *self, long long version);

/* The first tensor of a call that is not on the CPU: borrowed, or NULL; and the type of its device. */
typedef struct {
    PyObject *tensor;
    int32_t type;
} SrOnDevice;

/* record_rows.c; `rows`: a TensorRows. */
enum { SR_ROW_BYTES = 92, SR_MANY_ROWS = 20000 };
int sr_add_tensor_rows_type(PyObject *module);
int sr_is_tensor_rows(PyObject *value);
/* A list; NULL, perhaps with an exception, where Python has to look. */
PyObject *sr_rows_of_inputs(PyObject *rows, PyObject *args, PyObject *kwargs, SrOnDevice *found);
long long sr_row_number(PyObject *rows, PyObject *row); /* of such a list; -1, perhaps with an exception */
/* Done; a fallback, where nothing was done; an error, after which some may have been added. */
sr_result sr_add_rows(PyObject *rows, const SrOperator *operator, PyObject *args, PyObject *out, long long base);
int sr_append(PyObject *column, const void *bytes, size_t n); /* to a bytearray; -1 with an exception */

/* record_memory.c */
int sr_add_watch_schedule_type(PyObject *module);
int sr_is_watch_schedule(PyObject *value);
/* Whether the next call of a signature is to be watched, and is left to Python; if not, it counts as made. -1 with an exception. */
int sr_is_next_watched(PyObject *schedule, PyObject *index, PyObject *args, PyObject *kwargs);

/* record_call.c */
int sr_add_record_handler_type(PyObject *module);

#endif
