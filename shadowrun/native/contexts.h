/* The key of a call's context, and the cache of contexts. */

#ifndef SHADOWRUN_CONTEXTS_H
#define SHADOWRUN_CONTEXTS_H

#include "core.h"

/* What makes a context, but for the operator and the origin: bytes, and objects that have none. */
typedef struct {
    char *bytes, first[512];
    size_t length, room;
    PyObject **objects, *first_objects[16]; /* owned */
    Py_ssize_t n_objects, objects_room;
    int exact; /* each value counts, and of a tensor only that it is one: the key of a recording's context */
} SrKey;

/* contexts.c. 0, or -1 with an exception. */
void sr_key_begin(SrKey *key, int exact);
void sr_key_drop(SrKey *key);
int sr_key_put(SrKey *key, const void *bytes, size_t n);
int sr_key_put_call(SrKey *key, PyObject *args, PyObject *kwargs);
PyObject *sr_key_tuple(SrKey *key, PyObject *index, PyObject *device, const SrOrigin *origin);

/* Contexts by the identity of what their keys hold. A hit makes no object; a miss may still be in the dict
 * of all contexts. */
typedef struct SrContextCache SrContextCache;
uint64_t sr_key_hash(const char *bytes, size_t n);
SrContextCache *sr_new_context_cache(void); /* NULL without memory */
void sr_drop_context_cache(SrContextCache *cache);
int sr_visit_context_cache(const SrContextCache *cache, visitproc visit, void *arg);
void sr_collide_context_cache(SrContextCache *cache); /* one hash for all keys from here on: for tests */

/* The number of a call's context in `contexts`: 1; 0, perhaps with an exception, where it is new or has no key. */
int sr_context_number(SrContextCache *cache, PyObject *contexts, PyObject *index, PyObject *device,
                      const SrOrigin *origin, PyObject *args, PyObject *kwargs, int exact, long long *number);

#endif
