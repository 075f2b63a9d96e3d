/* Contexts that were met before: a hash table by their keys, so that a call in a known context makes no object.
 *
 * A hit is a key with the same bytes. The objects whose addresses are in those bytes are held by the table, so an address
 * means one object as long as the key is there.
 */

#include "contexts.h"

#include <stdlib.h>
#include <string.h>

enum { CACHE_ROOM = 1024, CACHE_MAX_ROOM = 16384 }; /* powers of two; at most half of it is filled */

typedef struct {
    uint64_t hash;
    PyObject **held; /* owned, up to a NULL; the bytes of the key come after it. NULL: the slot is free */
    const char *bytes;
    size_t length;
    long long number;
} CacheItem;

struct SrContextCache {
    CacheItem *items;
    size_t room, n;
    uint64_t mask; /* of hashes: all bits, but in tests */
};

SrContextCache *sr_new_context_cache(void) {
    SrContextCache *cache = malloc(sizeof *cache);
    if (cache != NULL) {
        *cache = (SrContextCache){calloc(CACHE_ROOM, sizeof(CacheItem)), CACHE_ROOM, 0, ~UINT64_C(0)};
        if (cache->items == NULL) {
            free(cache);
            return NULL;
        }
    }
    return cache;
}

static void cache_drop_items(CacheItem *items, size_t room) {
    for (size_t i = 0; i < room; i++) {
        for (PyObject **held = items[i].held; held != NULL && *held != NULL; held++) {
            Py_DECREF(*held);
        }
        free(items[i].held);
    }
    free(items);
}

void sr_drop_context_cache(SrContextCache *cache) {
    if (cache != NULL) {
        cache_drop_items(cache->items, cache->room);
        free(cache);
    }
}

int sr_visit_context_cache(const SrContextCache *cache, visitproc visit, void *arg) {
    for (size_t i = 0; cache != NULL && i < cache->room; i++) {
        for (PyObject **held = cache->items[i].held; held != NULL && *held != NULL; held++) {
            Py_VISIT(*held);
        }
    }
    return 0;
}

void sr_collide_context_cache(SrContextCache *cache) { cache->mask = 0; }

static uint64_t cache_mixed(uint64_t x) { /* the finaliser of MurmurHash3 */
    x = (x ^ (x >> 33)) * UINT64_C(0xFF51AFD7ED558CCD);
    x = (x ^ (x >> 33)) * UINT64_C(0xC4CEB9FE1A85EC53);
    return x ^ (x >> 33);
}

uint64_t sr_key_hash(const char *bytes, size_t n) {
    uint64_t hash = UINT64_C(0x243F6A8885A308D3) ^ n, word;
    while (n) {
        size_t taken = n < sizeof word ? n : sizeof word;
        word = 0;
        memcpy(&word, bytes, taken);
        bytes += taken;
        n -= taken;
        hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
        hash ^= hash >> 29;
    }
    return cache_mixed(hash);
}

/* The slot of a key, or the free one that it would get. */
static CacheItem *cache_slot(CacheItem *items, size_t room, uint64_t hash, const char *bytes, size_t length) {
    size_t i = hash & (room - 1);
    while (items[i].held != NULL && (items[i].hash != hash || items[i].length != length ||
                                     memcmp(items[i].bytes, bytes, length) != 0)) {
        i = (i + 1) & (room - 1);
    }
    return &items[i];
}

/* Room for one more; 0 where there is none. */
static int cache_grow(SrContextCache *cache) {
    if (2 * (cache->n + 1) <= cache->room) {
        return 1;
    }
    int grows = cache->room < CACHE_MAX_ROOM; /* else all are dropped: such a program repeats few calls */
    size_t room = grows ? 2 * cache->room : CACHE_ROOM;
    CacheItem *items = calloc(room, sizeof *items), *former = cache->items;
    if (items == NULL) {
        return 0;
    }
    size_t former_room = cache->room;
    for (size_t i = 0; grows && i < former_room; i++) {
        if (former[i].held != NULL) {
            *cache_slot(items, room, former[i].hash, former[i].bytes, former[i].length) = former[i];
        }
    }
    cache->items = items;
    cache->room = room;
    if (grows) {
        free(former);
    } else {
        cache->n = 0;
        cache_drop_items(former, former_room);
    }
    return 1;
}

/* Remember a number; without memory nothing is. */
static void cache_remember(
    SrContextCache *cache, uint64_t hash, const SrKey *key, size_t length, const SrOrigin *origin, long long number) {
    size_t n_held = (size_t)key->n_objects + 4;
    PyObject **held = malloc(n_held * sizeof *held + length);
    if (held == NULL || !cache_grow(cache)) {
        free(held);
        return;
    }
    CacheItem *item = cache_slot(cache->items, cache->room, hash, key->bytes, length);
    if (item->held != NULL) { /* by another thread, while Python compared keys */
        free(held);
        return;
    }
    held[0] = Py_NewRef(origin->module);
    held[1] = Py_NewRef(origin->phase);
    held[2] = Py_NewRef(origin->site);
    for (Py_ssize_t i = 0; i < key->n_objects; i++) {
        held[3 + i] = Py_NewRef(key->objects[i]);
    }
    held[n_held - 1] = NULL;
    memcpy(held + n_held, key->bytes, length);
    *item = (CacheItem){hash, held, (const char *)(held + n_held), length, number};
    cache->n++;
}

/* Append the operator's number and the addresses of the objects. The position of each address follows from the tags in
 * the bytes before; `length` ends those. */
static int cache_put_addresses(SrKey *key, PyObject *index, const SrOrigin *origin) {
    size_t length = key->length;
    long long number = PyLong_AsLongLong(index);
    int failed = (number == -1 && PyErr_Occurred()) || sr_key_put(key, &number, sizeof number) ||
                 sr_key_put(key, origin, sizeof *origin) ||
                 sr_key_put(key, key->objects, (size_t)key->n_objects * sizeof *key->objects) ||
                 sr_key_put(key, &length, sizeof length);
    return failed ? -1 : 0;
}

/* The number in the dict of all contexts, by the key in Python; 0 as `sr_context_number`. */
static int cache_look_up_in_dict(PyObject *contexts, PyObject *key, long long *number) {
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(contexts, key);
    *number = found == NULL ? -1 : PyLong_AsLongLong(found);
    return found != NULL && !(*number == -1 && PyErr_Occurred());
}

int sr_context_number(SrContextCache *cache, PyObject *contexts, PyObject *index, PyObject *device,
                      const SrOrigin *origin, PyObject *args, PyObject *kwargs, int exact, long long *number) {
    SrKey key;
    sr_key_begin(&key, exact);
    int found = 0;
    if (sr_key_put_call(&key, args, kwargs) == 0) {
        size_t call_length = key.length;
        if (cache_put_addresses(&key, index, origin) == 0) {
            size_t length = key.length;
            uint64_t hash = sr_key_hash(key.bytes, length) & cache->mask;
            CacheItem *item = cache_slot(cache->items, cache->room, hash, key.bytes, length);
            if (item->held != NULL) {
                *number = item->number;
                found = 1;
            } else {
                key.length = call_length; /* the tuple holds the objects themselves */
                PyObject *tuple = sr_key_tuple(&key, index, device, origin);
                found = cache_look_up_in_dict(contexts, tuple, number);
                if (found) {
                    cache_remember(cache, hash, &key, length, origin, *number);
                }
                Py_XDECREF(tuple);
            }
        }
    }
    sr_key_drop(&key);
    return found;
}
