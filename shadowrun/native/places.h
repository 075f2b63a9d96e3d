/* What places.c and the type around it share. */

#ifndef SHADOWRUN_PLACES_H
#define SHADOWRUN_PLACES_H

#include "core.h"

/* Slots of what is known of a thread: `_ThreadState` of intercept/attribution.py. */
enum { ABOVE, ENTERED, LAST_NUMBER, LINKS, MODULES, RECOMPUTED, RECOMPUTING, N_SLOTS };

enum { SITES_KEPT = 512 }; /* a power of two */

/* A site that was found: what `found` has for a code and an offset, without the objects that its key is made of. */
typedef struct {
    PyObject *code; /* kept alive by `found` */
    int offset;
    PyObject *found; /* owned */
} KnownSite;

struct Places {
    PyObject_HEAD
    PyObject *threads; /* its attribute `state` is that of the thread */
    PyObject *kinds;   /* dict: file name to kind of code */
    PyObject *found;   /* dict: (id of code, offset) to (site, in optimizer, code) */
    PyObject *mark;    /* type of what lies in the frame of an optimizer */
    PyObject *phases;  /* tuple: forward, backward, optimizer */
    PyObject *node;    /* callable: autograd's node that is executed */
    PyObject *number;  /* callable: the number that the next node gets */
    PyObject *place;   /* callable: the slow way */
    PyObject *module_call; /* code that modules are called through, or None */
    PyObject *state;   /* of the thread that asked last, or NULL */
    uint64_t state_of; /* number of that thread */
    PyTypeObject *state_type;
    Py_ssize_t slots[N_SLOTS]; /* offsets in it */
    Py_ssize_t found_in_mark;  /* likewise */
    uint64_t (*next_number)(void); /* the same as `number`, without Python; or NULL */
    int (*graph_task)(void);       /* -1: there is no node; or NULL */
    Py_ssize_t most_links;
    KnownSite sites[SITES_KEPT];
};

#endif
