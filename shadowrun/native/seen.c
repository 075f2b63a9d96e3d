/* Contexts that were met before: a table by the hash of their keys, so that a call of one makes no object.
 *
 * Between two calls the user's operators push nearly all of it out of the processor's caches, and each line of it that is
 * read again costs as much as the arithmetic. So a key is told by 128 bits of hash and is not kept: of a billion keys, two
 * are taken for one with a probability of 10^-21.
 */

#include "contexts.h"

#include <stdlib.h>
#include <string.h>

enum { ROOM = 1024, MOST_ROOM = 16384 }; /* powers of two; never more than half of it is taken */

typedef struct {
    uint64_t low, high;
} Hash;

typedef struct {
    Hash hash;
    PyObject **held; /* whose addresses went into the hash, and NULL; no address: free */
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
        for (PyObject **held = items[i].held; held != NULL && *held != NULL; held++) {
            Py_DECREF(*held);
        }
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
        for (PyObject **held = seen->items[i].held; held != NULL && *held != NULL; held++) {
            Py_VISIT(*held);
        }
    }
    return 0;
}

static uint64_t mixed(uint64_t x) { /* the finaliser of MurmurHash3 */
    x = (x ^ (x >> 33)) * UINT64_C(0xFF51AFD7ED558CCD);
    x = (x ^ (x >> 33)) * UINT64_C(0xC4CEB9FE1A85EC53);
    return x ^ (x >> 33);
}

/* Of bytes, eight at a time, in two lanes. */
static Hash hash_of(const char *bytes, size_t n) {
    uint64_t a = UINT64_C(0x243F6A8885A308D3) ^ n, b = UINT64_C(0x13198A2E03707344), word;
    while (n) {
        size_t taken = n < sizeof word ? n : sizeof word;
        word = 0;
        memcpy(&word, bytes, taken);
        bytes += taken;
        n -= taken;
        a = (a ^ word) * UINT64_C(0x9E3779B97F4A7C15);
        a ^= a >> 29;
        b = (b + word) * UINT64_C(0xD6E8FEB86659FD93);
        b ^= b >> 32;
    }
    return (Hash){mixed(a + b), mixed(b ^ (a << 1 | a >> 63))};
}

static Item *item_of(Item *items, size_t room, Hash hash) {
    size_t i = hash.low & (room - 1);
    while (items[i].held != NULL && (items[i].hash.low != hash.low || items[i].hash.high != hash.high)) {
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
        if (former[i].held != NULL) {
            *item_of(items, room, former[i].hash) = former[i];
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
static void remember(Seen *seen, Hash hash, const Key *key, const Place *place, long long number) {
    PyObject **held = malloc((size_t)(key->n_objects + 4) * sizeof *held);
    if (held == NULL || !make_room(seen)) {
        free(held);
        return;
    }
    Item *item = item_of(seen->items, seen->room, hash);
    if (item->held != NULL) { /* by another thread, while Python compared keys */
        free(held);
        return;
    }
    held[0] = Py_NewRef(place->module);
    held[1] = Py_NewRef(place->phase);
    held[2] = Py_NewRef(place->site);
    for (Py_ssize_t i = 0; i < key->n_objects; i++) {
        held[3 + i] = Py_NewRef(key->objects[i]);
    }
    held[3 + key->n_objects] = NULL;
    *item = (Item){hash, held, number};
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
            Hash hash = hash_of(key.bytes, key.length);
            Item *item = item_of(seen->items, seen->room, hash);
            if (item->held != NULL) {
                *number = item->number;
                found = 1;
            } else {
                key.length = length;
                PyObject *tuple = as_tuple(&key, index, device, place);
                found = look_up(contexts, tuple, number);
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
