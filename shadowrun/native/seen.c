/* Contexts that were met before: a table by the bytes of their keys, so that a call of one makes no object. */

#include "contexts.h"

#include <stdlib.h>
#include <string.h>

enum { ROOM = 1024, MOST_ROOM = 16384 }; /* powers of two; never more than half of it is taken */

typedef struct {
    uint64_t hash;
    size_t length;
    char *bytes; /* NULL: free */
    PyObject **held; /* whose addresses are among the bytes */
    Py_ssize_t n_held;
    long long number;
} Item;

struct Seen {
    Item *items;
    size_t room, n;
};

Seen *new_seen(void) {
    Seen *seen = malloc(sizeof *seen);
    if (seen != NULL) {
        *seen = (Seen){calloc(ROOM, sizeof(Item)), ROOM, 0};
        if (seen->items == NULL) {
            free(seen);
            return NULL;
        }
    }
    return seen;
}

static void drop_items(Item *items, size_t room) {
    for (size_t i = 0; i < room; i++) {
        for (Py_ssize_t k = 0; items[i].bytes != NULL && k < items[i].n_held; k++) {
            Py_DECREF(items[i].held[k]);
        }
        free(items[i].bytes);
        free(items[i].held);
    }
    free(items);
}

void drop_seen(Seen *seen) {
    if (seen != NULL) {
        drop_items(seen->items, seen->room);
        free(seen);
    }
}

int visit_seen(const Seen *seen, visitproc visit, void *arg) {
    for (size_t i = 0; seen != NULL && i < seen->room; i++) {
        for (Py_ssize_t k = 0; seen->items[i].bytes != NULL && k < seen->items[i].n_held; k++) {
            Py_VISIT(seen->items[i].held[k]);
        }
    }
    return 0;
}

/* Of bytes, eight at a time: multiplied, the upper half folded into the lower. */
static uint64_t hash_of(const char *bytes, size_t n) {
    uint64_t hash = n, word;
    for (; n; bytes += sizeof word, n -= sizeof word) {
        if (n < sizeof word) {
            word = 0;
            memcpy(&word, bytes, n);
            n = sizeof word;
        } else {
            memcpy(&word, bytes, sizeof word);
        }
        hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
        hash ^= hash >> 32;
    }
    return hash;
}

static Item *item_of(Item *items, size_t room, uint64_t hash, const char *bytes, size_t length) {
    size_t i = hash & (room - 1);
    while (items[i].bytes != NULL &&
           (items[i].hash != hash || items[i].length != length || memcmp(items[i].bytes, bytes, length) != 0)) {
        i = (i + 1) & (room - 1);
    }
    return &items[i];
}

/* Room for one more; 0 where there is none. */
static int make_room(Seen *seen) {
    if (2 * (seen->n + 1) <= seen->room) {
        return 1;
    }
    int grows = seen->room < MOST_ROOM; /* else all are forgotten: a program that never does the same twice */
    size_t room = grows ? 2 * seen->room : ROOM;
    Item *items = calloc(room, sizeof *items), *former = seen->items;
    if (items == NULL) {
        return 0;
    }
    size_t former_room = seen->room;
    for (size_t i = 0; grows && i < former_room; i++) {
        if (former[i].bytes != NULL) {
            *item_of(items, room, former[i].hash, former[i].bytes, former[i].length) = former[i];
        }
    }
    seen->items = items;
    seen->room = room;
    if (grows) {
        free(former);
    } else {
        seen->n = 0;
        drop_items(former, former_room);
    }
    return 1;
}

/* Remembers a number; without memory it does not. */
static void remember(Seen *seen, uint64_t hash, const Key *key, const Place *place, long long number) {
    Py_ssize_t n_held = key->n_objects + 3;
    char *bytes = malloc(key->length);
    PyObject **held = malloc((size_t)n_held * sizeof *held);
    if (bytes == NULL || held == NULL || !make_room(seen)) {
        free(bytes);
        free(held);
        return;
    }
    Item *item = item_of(seen->items, seen->room, hash, key->bytes, key->length);
    if (item->bytes != NULL) { /* by another thread, while Python compared keys */
        free(bytes);
        free(held);
        return;
    }
    memcpy(bytes, key->bytes, key->length);
    held[0] = Py_NewRef(place->module);
    held[1] = Py_NewRef(place->phase);
    held[2] = Py_NewRef(place->site);
    for (Py_ssize_t i = 0; i < key->n_objects; i++) {
        held[3 + i] = Py_NewRef(key->objects[i]);
    }
    *item = (Item){hash, key->length, bytes, held, n_held, number};
    seen->n++;
}

/* The key in bytes alone: what it holds by address, which is its own while the table holds it. An operator's number
 * holds itself. Each address stands behind the tag that says what it is of. */
static int put_addresses(Key *key, PyObject *index, const Place *place) {
    size_t length = key->length;
    long long number = PyLong_AsLongLong(index);
    int failed = (number == -1 && PyErr_Occurred()) || put(key, &number, sizeof number) ||
                 put(key, place, sizeof *place) ||
                 put(key, key->objects, (size_t)key->n_objects * sizeof *key->objects) ||
                 put(key, &length, sizeof length);
    return failed ? -1 : 0;
}

/* The number in the dict of all contexts, by the key in Python; 0 as `number_of_context`. */
static int look_up(PyObject *contexts, PyObject *key, long long *number) {
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(contexts, key);
    *number = found == NULL ? -1 : PyLong_AsLongLong(found);
    return found != NULL && !(*number == -1 && PyErr_Occurred());
}

int number_of_context(Seen *seen, PyObject *contexts, PyObject *index, PyObject *device, const Place *place,
                      PyObject *args, PyObject *kwargs, long long *number) {
    Key key;
    begin_key(&key);
    int found = 0;
    if (put_call(&key, args, kwargs) == 0) {
        size_t length = key.length;
        if (put_addresses(&key, index, place) == 0) {
            uint64_t hash = hash_of(key.bytes, key.length);
            Item *item = item_of(seen->items, seen->room, hash, key.bytes, key.length);
            if (item->bytes != NULL) {
                *number = item->number;
                found = 1;
            } else {
                size_t whole = key.length;
                key.length = length; /* the bytes behind stay as they are */
                PyObject *tuple = as_tuple(&key, index, device, place);
                found = look_up(contexts, tuple, number);
                key.length = whole;
                if (found) {
                    remember(seen, hash, &key, place, *number);
                }
                Py_XDECREF(tuple);
            }
        }
    }
    drop_key(&key);
    return found;
}
