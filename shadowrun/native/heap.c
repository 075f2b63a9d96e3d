/* How much free memory at the upper end of the heap glibc keeps.
 *
 * A replay's result is the newest block of the heap and free again at once. With the program's own free memory below it,
 * the upper end then often passes the bound from which on glibc gives it back to the system, and the next operators pay a
 * page fault for each 4 KiB: up to a fifth of a step of a small convolutional network. That bound follows the largest block
 * that was mapped by itself and freed, to 64 MiB at most: a program that once frees a tensor of 32 MB has it there. So one
 * such block is taken and freed, untouched. Whoever has set a bound himself (mallopt, MALLOC_TRIM_THRESHOLD_) keeps it.
 */

#include "core.h"

#include <stdlib.h>

/* steady_heap(): see above; nothing where the C library is another. */
PyObject *steady_heap(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
#ifdef __GLIBC__
    enum { MOST_MAPPED = 32 << 20, HEADER = 64 << 10 };
    void *volatile block = malloc(MOST_MAPPED - HEADER);
    free(block);
#endif
    Py_RETURN_NONE;
}
