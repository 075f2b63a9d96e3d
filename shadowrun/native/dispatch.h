/* What the files of the dispatch handler share. */

#ifndef SHADOWRUN_DISPATCH_H
#define SHADOWRUN_DISPATCH_H

#include "contexts.h"

enum { SR_OFF, SR_COMPARING, SR_RECORDING }; /* states of a handler */

/* Parts of a call's cost, for benchmarks/profiling.py. */
enum { SR_PART_ORIGIN, SR_PART_CONTEXT, SR_PART_COPY, SR_PART_REPLAY, SR_PART_COMPARE, SR_PART_RECORD, SR_N_PARTS };

/* Routes of an operator's calls, which `_learn` in intercept/dispatch.py chooses. */
enum {
    SR_FRESH,    /* returns one new tensor */
    SR_IN_PLACE, /* writes to one argument and returns it */
    SR_SEVERAL,  /* returns or writes to several tensors */
    SR_SILENT,   /* not compared (a view, say); its origin is noted for its backward */
    SR_PASSING,  /* neither compared nor noted */
    SR_LONG,     /* compared by Python */
    SR_N_ROUTES
};

enum { SR_MAX_WRITTEN = 4 };

/* What the fast paths need of an operator's plan. */
typedef struct {
    PyObject *plan, *run, *index;
    PyObject *skipped; /* tuple: the key under which calls without values are counted */
    int route, n_written;
    Py_ssize_t n_skipped; /* since the last `collect` */
    int written[SR_MAX_WRITTEN]; /* positions of the arguments that it writes to */
} SrOperator;

typedef struct {
    PyObject *func; /* the operator, owned; NULL: free */
    SrOperator *operator;
} SrTableSlot;

typedef struct {
    PyObject_HEAD
    SrTableSlot *table; /* hash table by the operator's address; entries live as long as the handler */
    size_t table_room, n_operators;
    SrContextCache *cache;
    PyObject *n_modes_below; /* callable */
    PyObject *function_mode_on; /* callable: whether a function mode is on */
    PyObject *profiler_on;     /* callable: whether the program's own profiler records */
    PyObject *origins;       /* Origins */
    PyObject *selection;     /* its slot `everything`: all calls are selected */
    Py_ssize_t everything;   /* offset of that slot */
    PyObject *recorder;      /* whose attribute _skipped changes */
    PyObject *contexts;      /* dict: key to number */
    PyObject *rows;          /* RowBuffer: what waits to be written */
    PyObject *device;        /* torch.device("cpu") */
    PyObject *matched, *seen_verdict; /* numbers of verdicts */
    PyObject *watched;      /* set: numbers of operators that differed before */
    PyObject *buffers;        /* dict: (dtype, shape) to CopyBuffer; (dtype, shape, k) for the k-th further one */
    PyObject *make_buffer;    /* callable(tensor, k): a new CopyBuffer, or None */
    PyObject *replay;         /* callable(run, args, kwargs): a replay */
    PyObject *shares_memory; /* callable(tensor, tensor) */
    PyObject *conclude, *failed, *unrecorded; /* callables: unequal or slow; replay failed; not recorded */
    PyObject *too_large; /* callable(plan, context, result): records a result that is; whether it did */
    PyObject *acquire, *release, *waited_for; /* bound methods of a lock and its gate; others after a fork */
    int state, on_target, clocked;
    double slow_ratio, max_bytes;
    long long own_ns;
    long long parts_ns[SR_N_PARTS];
    Py_ssize_t parts_n[SR_N_PARTS];
} SrHandler;

/* A call that is being handled. */
typedef struct {
    SrOperator *operator;
    PyObject *args, *kwargs;
    long long entered;
    SrOrigin origin;   /* from `sr_find_context` on, until `sr_drop_origin` */
    long long context; /* number */
} SrCall;

/* handler.c: an operator that `learn` was called for, or NULL. */
SrOperator *sr_find_operator(const SrHandler *self, PyObject *func);

/* dispatch_slot.c: the mode's `__torch_dispatch__`, which goes by this handler: an SrHandler or SrCallRows. */
PyObject *sr_bind_method(PyObject *handler, PyObject *mode);

/* dispatch.c: mode.__torch_dispatch__(func, types, args=(), kwargs=None). `handler`: or NULL. */
PyObject *sr_dispatch(PyObject *mode, PyObject *handler, PyObject *const *args, Py_ssize_t n, PyObject *names);
int sr_are_plain_types(PyObject *types); /* torch.Tensor and Parameter only */
long long sr_now_ns(void);
PyObject *sr_run_operator(const SrCall *call); /* the program's own call */
PyObject *sr_replay(SrHandler *self, PyObject *run, PyObject *args, PyObject *kwargs);

/* The call's origin and the number of its context. */
sr_result sr_find_context(SrHandler *self, SrCall *call);

/* Append a row; -1 with an exception. Negative times are unknown. */
int sr_add_row(SrHandler *self, long long context, PyObject *verdict, long long ref_ns, long long target_ns);

/* Append the row of a call whose results are equal: 1; 0 where Python must look, since it was slow or its operator was
 * unequal before; `failed` is -1 with an exception. */
int sr_add_match(SrHandler *self, SrCall *call, long long ns, long long other_ns, int *failed);

/* Add so many calls to a dict of such counts; -1 with an exception. */
int sr_add_count(PyObject *counts, PyObject *key, Py_ssize_t n);

/* Call `reporter` with the exception that is set; -1 where that is an interrupt, or the reporter failed. */
int sr_report(PyObject *reporter, SrCall *call);

/* compare_call.c: done with the result, or an error, or done with an exception of the operator and no result. */
sr_result sr_compare_call(SrHandler *self, SrCall *call, PyObject **out);

/* Add the time since `start` to a part, if clocks are on; see benchmarks/profiling.py. */
static inline void sr_lap(SrHandler *self, int part, long long start) {
    if (self->clocked) {
        self->parts_ns[part] += sr_now_ns() - start;
        self->parts_n[part]++;
    }
}

static inline long long sr_clock_start(SrHandler *self) { return self->clocked ? sr_now_ns() : 0; }

#endif
