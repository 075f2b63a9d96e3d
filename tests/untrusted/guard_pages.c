/* Puts each tensor of the CPU beside a page that nothing may touch: whoever reads or writes past it is ended.
   Preloaded by test_guard_pages.py, and switched on by `guard_set` while a call runs. MKL's products of sparse matrices
   load the last indices of a row as a whole vector, and use none of those behind the tensor: for these calls, as many
   bytes lie between tensor and page, which nothing may write to. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

extern void __libc_free(void *);
extern void *__libc_memalign(size_t, size_t);

enum { PAGE = 4096, ALIGNMENT = 8, VECTOR = 64, N = 1 << 16, FILL = 0xA5 };
enum { OFF, BEHIND, BEFORE, BEHIND_A_VECTOR }; /* where the page lies */
static struct { uintptr_t at, base; size_t length, size; } blocks[N];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int is_on, was_on;

void guard_set(int place) { is_on = place; was_on |= place; }

static unsigned slot_of(uintptr_t at) { return ((unsigned)(at >> 3) * 2654435761u) >> 16; }

int posix_memalign(void **out, size_t alignment, size_t n) {
    if (!is_on || !n || n > 1UL << 28) {
        *out = __libc_memalign(alignment, n);
        return *out ? 0 : ENOMEM;
    }
    size_t size = (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, between = is_on == BEHIND_A_VECTOR ? VECTOR : 0;
    size_t inner = (size + between + PAGE - 1) / PAGE * PAGE;
    char *base = mmap(0, inner + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + PAGE, inner, PROT_READ | PROT_WRITE)) return ENOMEM;
    memset(base + PAGE, FILL, inner);
    char *block = base + PAGE + (is_on == BEFORE ? 0 : inner - size - between);
    pthread_mutex_lock(&mutex);
    unsigned k = slot_of((uintptr_t)block), tried = 0;
    while (blocks[k % N].at > 1 && tried++ < N) k++;
    blocks[k % N].at = (uintptr_t)block, blocks[k % N].base = (uintptr_t)base;
    blocks[k % N].length = inner + 2 * PAGE, blocks[k % N].size = size;
    pthread_mutex_unlock(&mutex);
    *out = block;
    return 0;
}

void free(void *given) {
    if (!given) return;
    if (was_on) {
        pthread_mutex_lock(&mutex);
        for (unsigned k = slot_of((uintptr_t)given), tried = 0; blocks[k % N].at && tried < N; k++, tried++)
            if (blocks[k % N].at == (uintptr_t)given) {
                char *base = (char *)blocks[k % N].base, *begin = given;
                size_t length = blocks[k % N].length;
                char *end = begin + blocks[k % N].size;
                blocks[k % N].at = 1; /* was used: a search goes on behind it */
                pthread_mutex_unlock(&mutex);
                for (char *c = base + PAGE; c < base + length - PAGE; c++)
                    if ((unsigned char)*c != FILL && (c < begin || c >= end)) abort(); /* written beside it */
                munmap(base, length);
                return;
            }
        pthread_mutex_unlock(&mutex);
    }
    __libc_free(given);
}
