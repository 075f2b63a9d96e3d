/* What the key of a context and the table of those that were seen share. */

#ifndef SHADOWRUN_CONTEXTS_H
#define SHADOWRUN_CONTEXTS_H

#include "core.h"

/* What a call is told by, but for the operator and the place. */
typedef struct {
    char *bytes, first[512];
    size_t length, room;
    PyObject **objects, *first_objects[16]; /* owned */
    Py_ssize_t n_objects, objects_room;
} Key;

/* contexts.c: of `put...`, -1 with an exception. */
void begin_key(Key *key);
void drop_key(Key *key);
int put(Key *key, const void *bytes, size_t n);
int put_call(Key *key, PyObject *args, PyObject *kwargs);
PyObject *as_tuple(Key *key, PyObject *index, PyObject *device, const Place *place);

/* seen.c: contexts that were met before, by the identity of what their keys hold. It finds them without making an object;
 * whom it does not find, the dict of all contexts may still have. */
typedef struct Seen Seen;
Seen *new_seen(void); /* NULL without memory */
void drop_seen(Seen *seen);
int visit_seen(const Seen *seen, visitproc visit, void *arg);

/* The number of a call's context in `contexts`: 1; 0, perhaps with an exception, where there is none or it is not to be
 * found. */
int number_of_context(Seen *seen, PyObject *contexts, PyObject *index, PyObject *device, const Place *place,
                      PyObject *args, PyObject *kwargs, long long *number);

#endif
