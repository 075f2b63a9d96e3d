/* What the handler, its type, its rows and the short ways share. */

#ifndef SHADOWRUN_HANDLER_H
#define SHADOWRUN_HANDLER_H

#include "contexts.h"

#include <stdbool.h>

enum { OFF, COMPARING, RECORDING }; /* what a Handler does with calls */
enum { PART_PLACE, PART_CONTEXT, PART_COPY, PART_REPLAY, PART_COMPARE, PART_RECORD, N_PARTS };

/* How calls of an operator go: `_learn` in intercept/dispatch.py says which way. */
enum { FRESH, IN_PLACE, SEVERAL, SILENT, PASSING, LONG, N_WAYS };

enum { MOST_WRITTEN = 4 };

/* An operator, of whose plan this is what the short ways need. */
typedef struct {
    PyObject *plan, *run, *index;
    PyObject *skipped; /* tuple: the key under which calls without values are counted */
    int way, n_written;
    Py_ssize_t n_skipped; /* not yet told to Python; see `collect` */
    int written[MOST_WRITTEN]; /* positions of the arguments that it writes to, of those that take several */
} Entry;

typedef struct {
    PyObject *func; /* the operator, owned; NULL: free */
    Entry *entry;
} Learnt;

typedef struct {
    PyObject_HEAD
    Learnt *learnt;          /* table by the operator's address; what is in it stays as long as this */
    size_t learnt_room, n_learnt;
    Seen *seen;
    PyObject *n_modes_below; /* callable */
    int64_t (*n_modes)(void); /* the same without Python; or NULL */
    PyObject *asks_functions; /* callable: whether a function mode is on */
    bool (*asks)(void);      /* the same without Python; or NULL */
    PyObject *places;        /* Places */
    PyObject *selection;     /* its slot `everything`: all calls are wanted */
    Py_ssize_t everything;   /* where that lies */
    PyObject *recorder;      /* whose attribute _skipped changes */
    PyObject *contexts;      /* dict: key to number */
    PyObject *rows;          /* Rows: what waits to be written */
    PyObject *device;        /* torch.device("cpu") */
    PyObject *matched, *seen_verdict; /* numbers of verdicts */
    PyObject *suspects;      /* set: numbers of plans that were wrong before */
    PyObject *spares;        /* dict: (dtype, shape) to Spare; (dtype, shape, k) to the k-th more */
    PyObject *make_spare;    /* callable(tensor, k): one more of them, or None */
    PyObject *again;         /* callable(run, args, kwargs): a replay */
    PyObject *shares_memory; /* callable(tensor, tensor) */
    PyObject *ended, *failed, *unrecorded; /* callables: what is left to Python */
    PyObject *too_large; /* callable(plan, context, result): records that it is; whether it did */
    PyObject *acquire, *release, *waited_for; /* bound methods of a lock and its gate; others after a fork */
    int way, on_target, clocked;
    double slow_ratio, max_bytes;
    long long own_ns;
    long long parts_ns[N_PARTS];
    Py_ssize_t parts_n[N_PARTS];
} Handler;

/* A call under way. */
typedef struct {
    Entry *entry;
    PyObject *args, *kwargs;
    long long entered;
    Place place;       /* from `find_context` on, until `drop_place` */
    long long context; /* number */
} Call;

/* handler_type.c: an operator that was learnt, or NULL. */
Entry *find_entry(const Handler *self, PyObject *func);

/* bound.c: a method of the mode's that goes by this handler. */
PyObject *bind(Handler *self, PyObject *mode);

/* handler.c: mode.__torch_dispatch__(func, types, args=(), kwargs=None), and what others need of it. `self`: or NULL. */
PyObject *dispatch_call(PyObject *mode, Handler *self, PyObject *const *args, Py_ssize_t n, PyObject *names);
long long now_ns(void);
PyObject *run_operator(const Call *call); /* the user's own */
PyObject *replayed(Handler *self, PyObject *run, PyObject *args, PyObject *kwargs);

/* rows.c: 1 with the call's place and the number of its context; 0 where Python must look; -1 with an interrupt. */
int find_context(Handler *self, Call *call);

/* Append a row; -1 with an exception. Negative times are unknown. */
int add_row(Handler *self, long long context, PyObject *verdict, long long ref_ns, long long target_ns);

/* Append the row of a call whose results are equal: 1; 0 where Python must look, since it was slow or its operator was
 * wrong before; `failed` is -1 with an exception. */
int add_match(Handler *self, Call *call, long long ns, long long other_ns, int *failed);

/* Count a call that is not compared, by (operator, device, reason), as Recorder.skip; -1 with an exception. */
int count_skipped(Handler *self, PyObject *key);

/* Add so many calls to a dict of such counts; -1 with an exception. */
int add_count(PyObject *counts, PyObject *key, Py_ssize_t n);

/* Tell `reporter` of the exception that is on its way; -1 where it is an interrupt, or telling failed. */
int report(PyObject *reporter, Call *call);

/* short.c: 1 with the result, or with an exception and no result; 0 where nothing was done. */
int compare_call(Handler *self, Call *call, PyObject **out);

/* copies.c: memory for the values of a tensor that a call writes to. */
typedef struct {
    PyObject *spare, *work, *shape; /* owned */
    void *at, *before_at, *work_at;
    size_t n_bytes;
} Copies;

/* 1 where the tensor can be copied to a spare, the k-th of its form; 0 where not; -1 with an interrupt. */
int prepare_copies(Handler *self, PyObject *tensor, int k, Copies *copies);
void drop_copies(Copies *copies);
void keep_values(Handler *self, const Copies *copies); /* of the tensor, as they are now */
void give_values(Handler *self, const Copies *copies); /* those kept, to the replay's tensor */
int same_values(PyObject *tensor, const Copies *copies); /* the tensor and the replay's, where neither was moved */

/* Whether an argument may share its memory with the one at `position`. */
int shares_memory(Handler *self, PyObject *args, Py_ssize_t position);

/* The same call with the replay's tensors in the places of those that are written to. */
PyObject *with_copies(PyObject *args, const int *positions, const Copies *copies, int n);

/* Time since `start`, if somebody wants to know; see benchmarks/profiling.py. */
static inline void lap(Handler *self, int part, long long start) {
    if (self->clocked) {
        self->parts_ns[part] += now_ns() - start;
        self->parts_n[part]++;
    }
}

static inline long long started(Handler *self) { return self->clocked ? now_ns() : 0; }

#endif
