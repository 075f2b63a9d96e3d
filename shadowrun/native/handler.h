/* What the handler, its type, its rows and the short ways share. */

#ifndef SHADOWRUN_HANDLER_H
#define SHADOWRUN_HANDLER_H

#include "core.h"

enum { OFF, COMPARING, RECORDING }; /* what a Handler does with calls */
enum { PART_PLACE, PART_CONTEXT, PART_COPY, PART_REPLAY, PART_COMPARE, PART_RECORD, N_PARTS };

/* An operator, of whose plan this is what the short ways need. */
typedef struct {
    PyObject *plan, *run, *index;
    PyObject *skipped; /* tuple: the key under which calls without values are counted */
    int silent, fresh, in_place;
} Entry;

typedef struct {
    PyObject_HEAD
    PyObject *entries;       /* dict: id of an operator to a capsule with its Entry */
    PyObject *n_modes_below; /* callable */
    PyObject *places;        /* Places */
    PyObject *selection;     /* its attribute `everything`: all calls are wanted */
    PyObject *recorder;      /* whose attributes _seen, _skipped change */
    PyObject *contexts;      /* dict: key to number */
    PyObject *rows;          /* Rows: what waits to be written */
    PyObject *device;        /* torch.device("cpu") */
    PyObject *matched;       /* number of the verdict */
    PyObject *suspects;      /* set: numbers of plans that were wrong before */
    PyObject *spares;        /* dict: (dtype, shape) to Spare */
    PyObject *again;         /* callable(run, args, kwargs): a replay */
    PyObject *shares_memory; /* callable(tensor, tensor) */
    PyObject *ended, *ended_in_place, *failed, *unrecorded; /* callables: what the short ways leave to Python */
    PyObject *lock, *gate;   /* replaced after a fork */
    int way, on_target, clocked;
    long long worth_timing_ns, own_ns;
    long long parts_ns[N_PARTS];
    Py_ssize_t parts_n[N_PARTS];
} Handler;

/* A call under way. */
typedef struct {
    Entry *entry;
    PyObject *known; /* capsule that holds the entry */
    PyObject *args, *kwargs;
    long long entered;
} Call;

/* handler_type.c */
extern PyTypeObject *handler_type;

/* handler.c: mode.__torch_dispatch__(func, types, args=(), kwargs=None), and what others need of it. */
PyObject *dispatch_call(PyObject *mode, PyObject *const *args, Py_ssize_t n, PyObject *names);
long long now_ns(void);
PyObject *run_operator(PyObject *run, PyObject *args, PyObject *kwargs);
PyObject *replayed(Handler *self, PyObject *run, PyObject *args, PyObject *kwargs);

/* rows.c: 1 with the number of the call's context and its place; 0 where Python must look; -1 with an interrupt. */
int find_context(Handler *self, Call *call, PyObject **context, PyObject **place);

/* Append a row; -1 with an exception. Negative times are unknown. */
int add_row(Handler *self, PyObject *context, PyObject *verdict, long long ref_ns, long long target_ns);

/* Count a call that is not compared, by (operator, device, reason), as Recorder.skip; -1 with an exception. */
int count_skipped(Handler *self, PyObject *key);

/* Tell `reporter` of the exception that is on its way; -1 where it is an interrupt, or telling failed. */
int report(PyObject *reporter, Call *call, PyObject *place);

/* short.c: each returns 1 with the result, or with an exception and no result; 0 where nothing was done. */
int compare_fresh(Handler *self, Call *call, PyObject **out);
int compare_in_place(Handler *self, Call *call, PyObject **out);

/* Time since `start`, if somebody wants to know; see benchmarks/profiling.py. */
static inline void lap(Handler *self, int part, long long start) {
    if (self->clocked) {
        self->parts_ns[part] += now_ns() - start;
        self->parts_n[part]++;
    }
}

static inline long long started(Handler *self) { return self->clocked ? now_ns() : 0; }

#endif
