/* The handler of a comparison: what compare_handler.c and compare_call.c share. */

#ifndef SHADOWRUN_COMPARE_H
#define SHADOWRUN_COMPARE_H

#include "dispatch.h"

enum { SR_OFF, SR_COMPARING, SR_RECORDING }; /* states of a handler */

/* Parts of a call's cost, for benchmarks/profiling.py. */
enum { SR_PART_ORIGIN, SR_PART_CONTEXT, SR_PART_COPY, SR_PART_REPLAY, SR_PART_COMPARE, SR_PART_RECORD, SR_N_PARTS };

/* Routes of an operator's calls, which `NativeHandler.add_operator` in replay/paths/native_handler.py chooses. */
enum {
    SR_FRESH,    /* returns one new tensor */
    SR_IN_PLACE, /* writes to one argument and returns it */
    SR_SEVERAL,  /* returns or writes to several tensors */
    SR_SILENT,   /* not compared (a view, say); its origin is noted for its backward */
    SR_PASSING,  /* neither compared nor noted */
    SR_LONG,     /* compared by Python */
    SR_N_ROUTES
};

enum { SR_MAX_COPIED = 4 }; /* arguments that a call writes to */

typedef struct {
    SrHandler head;
    PyObject *recorder;      /* whose attribute _skipped changes */
    PyObject *rows;          /* RowBuffer: what waits to be written */
    PyObject *matched, *seen_verdict; /* numbers of verdicts */
    PyObject *watched;      /* set: numbers of operators that differed before */
    PyObject *buffers;        /* dict: (dtype, shape) to CopyBuffer; (dtype, shape, k) for the k-th further one */
    PyObject *make_buffer;    /* callable(tensor, k): a new CopyBuffer, or None */
    PyObject *replay;         /* callable(run, args, kwargs): a replay */
    PyObject *shares_memory; /* callable(tensor, tensor) */
    PyObject *conclude, *failed, *unrecorded; /* callables: unequal or slow; replay failed; not recorded */
    PyObject *bounds;         /* dict: number of a context to its CloseBounds */
    PyObject *diff_rows;      /* list: rows of differences that wait to be written */
    PyObject *verdict_numbers, *tensor_numbers; /* dicts: numbers of the rows that these refer to */
    PyObject *too_large; /* callable(plan, context, result): records a result that is; whether it did */
    PyObject *waited_for; /* bound method of the lock's gate; another after a fork */
    int state, on_target, clocked;
    int keeps_drift, has_twins; /* accumulated errors are recorded; a chain has values of its own */
    double slow_ratio, max_bytes;
    long long own_ns;
    long long parts_ns[SR_N_PARTS];
    Py_ssize_t parts_n[SR_N_PARTS];
} SrCompareHandler;

/* compare_handler.c */
long long sr_now_ns(void);

/* The call's origin and the number of its context. */
sr_result sr_find_context(SrCompareHandler *self, SrCall *call);

/* Append the row of a call whose results are equal: 1; 0 where Python must look, since it was slow or its operator was
 * unequal before; `failed` is -1 with an exception. */
int sr_add_match(SrCompareHandler *self, SrCall *call, long long ns, long long other_ns, int *failed);

/* Whether Python must look at a call, since it was slow or its operator was unequal before. */
int sr_needs_look(SrCompareHandler *self, SrCall *call, long long actual_ns, long long expected_ns);

/* Append a row with a number from `sr_next_seq`; -1 with an exception. */
int sr_add_row(
    SrCompareHandler *self, long long seq, long long context, PyObject *verdict, long long ref_ns, long long target_ns, double drift);

/* Call `reporter` with the exception that is set; -1 where that is an interrupt, or the reporter failed. */
int sr_report(PyObject *reporter, SrCall *call);

/* compare_call.c: done with the result, or an error, or done with an exception of the operator and no result. */
sr_result sr_compare_call(SrCompareHandler *self, SrCall *call, PyObject **out);

/* Add the time since `start` to a part, if clocks are on; see benchmarks/profiling.py. */
static inline void sr_lap(SrCompareHandler *self, int part, long long start) {
    if (self->clocked) {
        self->parts_ns[part] += sr_now_ns() - start;
        self->parts_n[part]++;
    }
}

static inline long long sr_clock_start(SrCompareHandler *self) { return self->clocked ? sr_now_ns() : 0; }

#endif
