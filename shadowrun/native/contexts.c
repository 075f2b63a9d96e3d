/* The key of a call's context, which the calls of one row in the data file have in common; and the contexts already met.
 *
 * Shapes, small integers, strings and the like become bytes. A value that is known by its identity (a type, a device)
 * is kept as an object after them. Two keys are equal where those of recording/recorder.py are equal, except that True and
 * 1 are two values here.
 */

#include "contexts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { KEY_MAX_ITEMS = 4, KEY_LARGEST_INTEGER = 1024 };

int sr_key_put(SrKey *key, const void *bytes, size_t n) {
    if (key->length + n > key->room) {
        size_t room = 2 * (key->length + n);
        char *more = malloc(room);
        if (more == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(more, key->bytes, key->length);
        if (key->bytes != key->first) {
            free(key->bytes);
        }
        key->bytes = more;
        key->room = room;
    }
    memcpy(key->bytes + key->length, bytes, n);
    key->length += n;
    return 0;
}

static int key_put_tag(SrKey *key, char tag) { return sr_key_put(key, &tag, 1); }

/* Takes the reference. */
static int key_put_object(SrKey *key, PyObject *object) {
    if (object == NULL) {
        return -1;
    }
    if (key->n_objects == key->objects_room) {
        size_t held = (size_t)key->n_objects * sizeof object;
        PyObject **more = malloc(2 * held);
        if (more == NULL) {
            Py_DECREF(object);
            PyErr_NoMemory();
            return -1;
        }
        memcpy(more, key->objects, held);
        if (key->objects != key->first_objects) {
            free(key->objects);
        }
        key->objects = more;
        key->objects_room *= 2;
    }
    key->objects[key->n_objects++] = object;
    return key_put_tag(key, 'O');
}

/* Not by DLPack: that asks for the address, and then a tensor that shares its memory until it is written to
 * (`torch._lazy_clone`) gets its own memory. The program would notice. */
static int key_put_tensor(SrKey *key, PyObject *value) {
    if (key->exact) {
        return key_put_tag(key, 'T');
    }
    const int64_t *sizes;
    int64_t n;
    PyObject *dtype;
    if (sr_shape_and_dtype(value, &n, &sizes, &dtype)) {
        int failed = key_put_tag(key, 'T') || sr_key_put(key, &dtype, sizeof dtype) || sr_key_put(key, &n, sizeof n) ||
                     sr_key_put(key, sizes, (size_t)n * sizeof *sizes);
        return failed ? -1 : 0;
    }
    PyObject *shape = sr_shape(value);
    dtype = shape == NULL ? NULL : sr_dtype(value);
    if (dtype == NULL) {
        Py_XDECREF(shape);
        return -1;
    }
    n = PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : -1;
    Py_DECREF(dtype); /* torch keeps one object for each dtype */
    int failed = key_put_tag(key, 'T') || sr_key_put(key, &dtype, sizeof dtype) || sr_key_put(key, &n, sizeof n);
    for (int64_t d = 0; d < n && !failed; d++) {
        int64_t size = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, d));
        failed = (size == -1 && PyErr_Occurred()) || sr_key_put(key, &size, sizeof size);
    }
    Py_DECREF(shape);
    return failed ? -1 : 0;
}

static int key_put_string(SrKey *key, PyObject *value) {
    Py_ssize_t n;
    const char *text = PyUnicode_AsUTF8AndSize(value, &n);
    if (text == NULL) { /* a lone surrogate, say */
        PyErr_Clear();
        return key_put_object(key, Py_NewRef(value));
    }
    return key_put_tag(key, 's') || sr_key_put(key, &n, sizeof n) || sr_key_put(key, text, (size_t)n) ? -1 : 0;
}

/* The first object that was equal, since the cache below compares addresses, and torch makes a new `torch.device` for each
 * call. There are few such values. A new reference, or NULL with an exception. */
static PyObject *key_first_equal(PyObject *value) {
    static PyObject *first;
    if (first == NULL && (first = PyDict_New()) == NULL) {
        return NULL;
    }
    return Py_XNewRef(PyDict_SetDefault(first, value, value));
}

static int key_put_value(SrKey *key, PyObject *value, int depth) {
    if (sr_is_tensor(value)) {
        return key_put_tensor(key, value);
    }
    if (PyLong_CheckExact(value)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        /* Large ones change from step to step, as floats do: each call would be a new context. */
        if (overflow && key->exact) {
            PyObject *digits = PyObject_Repr(value);
            int failed = digits == NULL || key_put_tag(key, 'i') || key_put_string(key, digits);
            Py_XDECREF(digits);
            return failed ? -1 : 0;
        }
        if (!key->exact && (overflow || number > KEY_LARGEST_INTEGER || number < -KEY_LARGEST_INTEGER)) {
            return key_put_tag(key, 'i');
        }
        return key_put_tag(key, 'I') || sr_key_put(key, &number, sizeof number) ? -1 : 0;
    }
    if (PyFloat_CheckExact(value)) {
        double number = key->exact ? PyFloat_AS_DOUBLE(value) : 0.0; /* zeros of both signs are two values */
        number = isnan(number) ? (double)NAN : number;
        return key_put_tag(key, 'f') || (key->exact && sr_key_put(key, &number, sizeof number)) ? -1 : 0;
    }
    if (value == Py_None || value == Py_True || value == Py_False) {
        return key_put_tag(key, value == Py_None ? 'N' : value == Py_True ? '1' : '0');
    }
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
        Py_ssize_t n = PySequence_Fast_GET_SIZE(value);
        if (depth > 100) {
            PyErr_SetString(PyExc_RecursionError, "lists too deep for a context");
            return -1;
        }
        /* With its length: without it, [[1], 2] and [[1, 2]] would have the same bytes. */
        if (key_put_tag(key, '[') || sr_key_put(key, &n, sizeof n)) {
            return -1;
        }
        for (Py_ssize_t i = 0; i < n && (i < KEY_MAX_ITEMS || key->exact) && i < PySequence_Fast_GET_SIZE(value); i++) {
            PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
            int failed = key_put_value(key, item, depth + 1);
            Py_DECREF(item);
            if (failed) {
                return -1;
            }
        }
        return 0;
    }
    if (PyUnicode_CheckExact(value)) {
        return key_put_string(key, value);
    }
    if (key->exact && PyComplex_CheckExact(value)) {
        Py_complex number = ((PyComplexObject *)value)->cval;
        return key_put_tag(key, 'c') || sr_key_put(key, &number, sizeof number) ? -1 : 0;
    }
    int answer = sr_is_exact(value);
    if (answer == 0 && (answer = sr_is_tensor_or_subclass(value)) == 1) {
        return key_put_tensor(key, value);
    }
    return answer < 0 ? -1 : key_put_object(key, answer ? key_first_equal(value) : Py_NewRef((PyObject *)Py_TYPE(value)));
}

int sr_key_put_call(SrKey *key, PyObject *args, PyObject *kwargs) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
        if (key_put_value(key, PyTuple_GET_ITEM(args, i), 0)) {
            return -1;
        }
    }
    PyObject *name, *value;
    Py_ssize_t position = 0;
    if (PyDict_GET_SIZE(kwargs) && key_put_tag(key, 'k')) { /* else a keyword could be read as a positional string */
        return -1;
    }
    while (PyDict_Next(kwargs, &position, &name, &value)) {
        Py_INCREF(value);
        int failed = key_put_string(key, name) || key_put_value(key, value, 0);
        Py_DECREF(value);
        if (failed) {
            return -1;
        }
    }
    return 0;
}

PyObject *sr_key_tuple(SrKey *key, PyObject *index, PyObject *device, const SrOrigin *origin) {
    PyObject *bytes = PyBytes_FromStringAndSize(key->bytes, (Py_ssize_t)key->length);
    PyObject *made = bytes == NULL ? NULL : PyTuple_New(6 + key->n_objects);
    if (made == NULL) {
        Py_XDECREF(bytes);
        return NULL;
    }
    PyTuple_SET_ITEM(made, 0, Py_NewRef(index));
    PyTuple_SET_ITEM(made, 1, bytes);
    PyTuple_SET_ITEM(made, 2, Py_NewRef(device));
    PyTuple_SET_ITEM(made, 3, Py_NewRef(origin->module));
    PyTuple_SET_ITEM(made, 4, Py_NewRef(origin->phase));
    PyTuple_SET_ITEM(made, 5, Py_NewRef(origin->site));
    for (Py_ssize_t i = 0; i < key->n_objects; i++) {
        PyTuple_SET_ITEM(made, 6 + i, Py_NewRef(key->objects[i]));
    }
    return made;
}

void sr_key_begin(SrKey *key, int exact) {
    key->exact = exact;
    key->bytes = key->first;
    key->length = 0;
    key->room = sizeof key->first;
    key->objects = key->first_objects;
    key->n_objects = 0;
    key->objects_room = sizeof key->first_objects / sizeof *key->first_objects;
}

void sr_key_drop(SrKey *key) {
    while (key->n_objects) {
        Py_DECREF(key->objects[--key->n_objects]);
    }
    if (key->bytes != key->first) {
        free(key->bytes);
    }
    if (key->objects != key->first_objects) {
        free(key->objects);
    }
}

/* context_key(index, device, place, args, kwargs, exact=False) */
PyObject *sr_context_key(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n < 5 || n > 6 || !PyTuple_Check(args[2]) || PyTuple_GET_SIZE(args[2]) != 3 || !PyTuple_Check(args[3]) ||
        !PyDict_Check(args[4])) {
        return sr_wrong_count("context_key");
    }
    SrOrigin origin = {PyTuple_GET_ITEM(args[2], 0), PyTuple_GET_ITEM(args[2], 1), PyTuple_GET_ITEM(args[2], 2)};
    SrKey key;
    sr_key_begin(&key, n == 6 && args[5] == Py_True);
    PyObject *made = sr_key_put_call(&key, args[3], args[4]) ? NULL : sr_key_tuple(&key, args[0], args[1], &origin);
    sr_key_drop(&key);
    return made;
}

/* ---- the cache: contexts that were met before, so that a call in a known context makes no object ---------------------
 *
 * A hit is a key with the same bytes. The objects whose addresses are in those bytes are held by the table, so an address
 * means one object as long as the key is there.
 */

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
    /* Without memory, the context is looked up in the dict at its next call too: slower, and right. */
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
