/* The calls in leaf pages of a data file's table `call`: store/call_pages.py gives the pages, SQLite is the specification.
 *
 * The format: https://www.sqlite.org/fileformat2.html, sections 1.6 and 2.1. The bytes may be a hostile file's: every read is
 * within the page. Whatever the recorder does not write ends the reading with None, and SQLite reads the file instead: a
 * value of another type, a column too few, a record with overflow pages, rows out of order.
 */

#include "core.h"

#include <math.h>
#include <string.h>

enum { LEAF = 13, HEADER = 8, MAX_USABLE = 1 << 16, MIN_USABLE = 480 };
enum { MAX_RECORD = 200 }; /* bytes of a call: far fewer than those from which a record has overflow pages */
enum { N_COLUMNS = 8, WHOLE_COLUMNS = 4, TIME_COLUMNS = 6 }; /* the numbers of the call, its times, its drift */
enum { TYPE_NULL = 0, TYPE_FLOAT = 7, TYPE_ZERO = 8, TYPE_ONE = 9, TYPE_TEXT_3 = 19 };

static const double EXACT = 9007199254740992.0; /* 2^53: whole numbers below are exact */

typedef struct {
    const uint8_t *at, *end;
} Bytes;

/* A varint that the file may hold, or -1. */
static int64_t varint(Bytes *from) {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) { /* eight bytes hold 2^56 - 1: more than any number that is expected here */
        if (from->at >= from->end) {
            return -1;
        }
        uint8_t byte = *from->at++;
        value = value << 7 | (byte & 0x7F);
        if (!(byte & 0x80)) {
            return (int64_t)value;
        }
    }
    return -1;
}

/* A number; NaN where `type` is no number's, or the bytes end before it. */
static double number(Bytes *from, int64_t type) {
    static const int sizes[] = {0, 1, 2, 3, 4, 6, 8, 8, 0, 0};
    if (type <= TYPE_NULL || type > TYPE_ONE || from->end - from->at < sizes[type]) {
        return NAN;
    }
    if (type >= TYPE_ZERO) {
        return type == TYPE_ONE;
    }
    int size = sizes[type];
    uint64_t bits = *from->at & 0x80 && type != TYPE_FLOAT ? UINT64_MAX : 0; /* the sign of an integer */
    for (int i = 0; i < size; i++) {
        bits = bits << 8 | from->at[i];
    }
    from->at += size;
    double value = (double)(int64_t)bits;
    if (type == TYPE_FLOAT) {
        memcpy(&value, &bits, sizeof value);
    }
    return value;
}

/* One column of a call; 0 where it is not what the recorder writes. NULL becomes -1, the text 'nan' NaN. */
static int column(Bytes *from, int64_t type, int place, double *value) {
    if (type == TYPE_NULL) {
        *value = -1.0;
        return place >= WHOLE_COLUMNS;
    }
    if (place >= TIME_COLUMNS && type == TYPE_TEXT_3) {
        int is_nan = from->end - from->at >= 3 && !memcmp(from->at, "nan", 3);
        from->at += 3 * is_nan;
        *value = NAN;
        return is_nan;
    }
    *value = number(from, type);
    /* Below 2^53; of drift also more, and infinity. Below 0, NULL could not be told from it. */
    return *value >= 0.0 && (place >= TIME_COLUMNS || (type != TYPE_FLOAT && *value < EXACT));
}

static int cell(Bytes page, double row[N_COLUMNS]) {
    int64_t size = varint(&page), seq = varint(&page);
    if (size < 0 || size > MAX_RECORD || size > page.end - page.at || seq < 0 || seq >= (int64_t)1 << 47) {
        return 0;
    }
    Bytes body = {page.at, page.at + size}, types = body;
    int64_t header = varint(&types);
    if (header < 0 || header > size) {
        return 0;
    }
    types.end = body.at + header;
    body.at = types.end;
    for (int place = 0; place < N_COLUMNS; place++) {
        int64_t type = varint(&types);
        if (place == 0) {
            row[place] = (double)seq; /* the key of the table: its column is stored as NULL */
            if (type != TYPE_NULL) {
                return 0;
            }
        } else if (type < 0 || !column(&body, type, place, &row[place])) {
            return 0;
        }
    }
    return types.at == types.end && body.at == body.end;
}

static int count_cells(const uint8_t *page) { return page[3] << 8 | page[4]; }

static int leaf(const uint8_t *page, Py_ssize_t usable, double after, double *rows, Py_ssize_t *n) {
    double last = -1.0;
    int n_cells = count_cells(page);
    for (int i = 0; i < n_cells; i++) {
        const uint8_t *pointer = page + HEADER + 2 * i;
        Py_ssize_t start = pointer[0] << 8 | pointer[1];
        double *row = rows + *n * N_COLUMNS;
        if (start < HEADER + 2 * n_cells || start >= usable || !cell((Bytes){page + start, page + usable}, row) || row[0] <= last) {
            return 0;
        }
        last = row[0];
        *n += last > after;
    }
    return 1;
}

/* call_rows(pages, page_size, usable, after) -> the rows of eight float64 after call `after`, or None. */
PyObject *sr_call_rows(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer pages;
    Py_ssize_t size, usable;
    double after;
    if (!PyArg_ParseTuple(args, "y*nnd", &pages, &size, &usable, &after)) {
        return NULL;
    }
    PyObject *found = NULL;
    if (usable < MIN_USABLE || usable > size || size > MAX_USABLE || pages.len % size) {
        PyErr_SetString(PyExc_ValueError, "call_rows: no pages of this size");
        goto done;
    }
    Py_ssize_t room = 0, n = 0;
    int regular = 1;
    const uint8_t *start = pages.buf, *end = start + pages.len;
    for (const uint8_t *page = start; page < end && regular; page += size) {
        regular = page[0] == LEAF && HEADER + 2 * count_cells(page) <= usable;
        room += count_cells(page);
    }
    if (!regular) {
        found = Py_NewRef(Py_None);
        goto done;
    }
    /* One row more: the row after the last one that counts is written before it is found to be none. */
    found = PyBytes_FromStringAndSize(NULL, (room + 1) * N_COLUMNS * (Py_ssize_t)sizeof(double));
    if (found == NULL) {
        goto done;
    }
    double *rows = (double *)PyBytes_AS_STRING(found);
    double last = after;
    for (const uint8_t *page = start; page < end && regular; page += size) {
        Py_ssize_t before = n;
        regular = leaf(page, usable, after, rows, &n) && (n == before || rows[before * N_COLUMNS] > last);
        last = n ? rows[(n - 1) * N_COLUMNS] : after;
    }
    if (regular) {
        _PyBytes_Resize(&found, n * N_COLUMNS * (Py_ssize_t)sizeof(double));
    } else {
        Py_SETREF(found, Py_NewRef(Py_None));
    }
done:
    PyBuffer_Release(&pages);
    return found;
}
