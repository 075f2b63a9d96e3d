/* What the dispatch handlers share: compare_handler.c has that of a comparison, record_call.c that of a recording, and dispatch.c
 * that of a search for NaN; and what the files record_*.c share. */

#ifndef SHADOWRUN_DISPATCH_H
#define SHADOWRUN_DISPATCH_H

#include "core.h"

enum { SR_MAX_WRITTEN = 8 };

/* What a handler needs of an operator's plan. Entries live as long as the handler: a call may use one while another thread
 * adds operators. */
typedef struct {
    /* What most calls read comes first, so that it lies in one or two cache lines. */
    PyObject *func, *plan, *run, *index; /* owned */
    PyObject *skipped; /* in a comparison, owned tuple: the key under which calls without values are counted; or NULL */
    Py_ssize_t n_skipped; /* since the last `collect` */
    int route, n_written;
    /* In a recording; the returns are `Returns` of recording/call_results.py: */
    char is_left;    /* all its calls go to Python from here on */
    char is_watched; /* Python watches some of its calls; see recording/undeclared_writes.py */
    char has_values, is_view, counts, is_item, is_random;
    int written[SR_MAX_WRITTEN]; /* positions of the arguments that it writes to */
    int n_returns;
    uint64_t aliases, uninitialised; /* returns that are arguments it writes to; returns without values */
} SrOperator;

typedef struct SrHandler SrHandler;

/* A call that is being handled. */
typedef struct {
    SrOperator *operator;
    PyObject *args, *kwargs; /* owned: a tuple and a dict */
    long long entered;
    SrOrigin origin;   /* from when it was found, until `sr_drop_origin` */
    long long context; /* number */
    PyObject *device;  /* in a recording: borrowed, its name; NULL: the handler's */
} SrCall;

/* The first fields of a handler. */
struct SrHandler {
    PyObject_HEAD
    /* Done with the operator's result, or its exception and no result; a fallback, where nothing was done; or an error. */
    sr_result (*handle)(SrHandler *self, SrCall *call, PyObject **out);
    SrOperator **operators; /* hash table by the address of `func`; NULL: free */
    size_t room, n_operators;
    SrContextCache *cache;
    Py_ssize_t everything; /* offset of that slot of the selection: all calls are selected */
    PyObject *origins;     /* Origins */
    PyObject *selection, *contexts, *device; /* contexts: dict, key to number */
    PyObject *n_modes_below, *function_mode_on, *profiler_on; /* callables */
    PyObject *acquire, *release; /* bound methods of a lock; others after a fork */
};

/* The fields above that are given by name, for a table of a handler's fields. */
#define SR_HANDLER_FIELDS                                                                                              \
    SR_FIELD(SrHandler, origins), SR_FIELD(SrHandler, selection), SR_FIELD(SrHandler, contexts),                       \
        SR_FIELD(SrHandler, device), SR_FIELD(SrHandler, n_modes_below), SR_FIELD(SrHandler, function_mode_on),        \
        SR_FIELD(SrHandler, profiler_on), SR_FIELD(SrHandler, acquire), SR_FIELD(SrHandler, release)

/* dispatch.c. Of the types: -1 with an exception, and a new reference. */
int sr_start_handler(SrHandler *self, PyObject *kwargs, const SrField *fields);
int sr_visit_handler(SrHandler *self, const SrField *fields, visitproc visit, void *arg);
void sr_clear_handler(SrHandler *self, const SrField *fields);
PyObject *sr_bind_handler(PyObject *self, PyObject *mode); /* the mode's `__torch_dispatch__`, which goes by it */

/* The entry of an operator, a new one with no more than these set if there was none; NULL with an exception. */
SrOperator *sr_add_operator(SrHandler *self, PyObject *func, PyObject *plan, PyObject *run, PyObject *index);
SrOperator *sr_find_operator(const SrHandler *self, PyObject *func); /* or NULL */
int sr_read_written(PyObject *positions, int most, int *written); /* a tuple: how many; -1 with an exception */

PyObject *sr_run_operator(const SrCall *call); /* the program's own call */
PyObject *sr_pack_origin(const SrCall *call);
int sr_has_modes_below(const SrHandler *self); /* dispatch modes of the program below shadowrun's */
void sr_release(PyObject *release); /* an exception that is set stays set */

/* Whether a callable answers so; an exception stays set. */
static inline int sr_answers(PyObject *callable, PyObject *wanted) {
    PyObject *answer = PyObject_CallNoArgs(callable);
    Py_XDECREF(answer);
    return answer == wanted;
}

static inline int sr_selects_all(const SrHandler *self) { return sr_slot(self->selection, self->everything) == Py_True; }

/* The first tensor of a call that is not on the CPU: borrowed, or NULL; and the type of its device. */
typedef struct {
    PyObject *tensor;
    int32_t type;
} SrOnDevice;

/* record_rows.c; `rows`: a TensorRows. */
enum { SR_ROW_BYTES = 92, SR_MANY_ROWS = 20000 };
int sr_add_storage_rows_type(PyObject *module);
PyObject *sr_setup_storage_rows(PyObject *module, PyObject *free_reference);
PyObject *sr_forget_freed(PyObject *module, PyObject *storages);
int sr_add_tensor_rows_type(PyObject *module);
int sr_is_tensor_rows(PyObject *value);
/* A list; NULL, perhaps with an exception, where Python has to look. */
PyObject *sr_rows_of_inputs(PyObject *rows, PyObject *args, PyObject *kwargs, SrOnDevice *found);
long long sr_row_number(PyObject *rows, PyObject *row); /* of such a list; -1, perhaps with an exception */
/* Done; a fallback, where nothing was done; an error, after which some may have been added. */
sr_result sr_add_rows(PyObject *rows, const SrOperator *operator, PyObject *args, PyObject *out, long long base);
int sr_append(PyObject *column, const void *bytes, size_t n); /* to a bytearray; -1 with an exception */
int sr_add_watch_schedule_type(PyObject *module);
int sr_is_watch_schedule(PyObject *value);
/* Whether the next call of a signature is to be watched, and is left to Python; if not, it counts as made. -1 with an exception. */
int sr_is_next_watched(PyObject *schedule, PyObject *index, PyObject *args, PyObject *kwargs);

/* record_call.c */
int sr_add_record_handler_type(PyObject *module);

#endif
