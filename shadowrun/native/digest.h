/* Digests of tensors: what digest_ladder.c and digest.c share, and what a recording asks. */

#ifndef SHADOWRUN_DIGEST_H
#define SHADOWRUN_DIGEST_H

#include "core.h"

enum { SR_LANES = 32, SR_MOST_PLANES = 64, SR_CHUNK_BLOCKS = 128 }; /* a chunk of float32 is 16 KiB */

/* digest_ladder.c. Add the bit planes of whole blocks of 32 elements to `planes`: 8, 16, 32 or 64 of them. */
typedef void (*sr_add_planes)(const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes);
uint64_t sr_mix(uint64_t value);
void sr_set_up_ladders(void);
sr_add_planes sr_planes_function(int width, sr_instructions instructions);
const uint64_t *sr_keys(size_t first, size_t n, uint64_t *room); /* n at most SR_CHUNK_BLOCKS; room for one more */
void sr_rungs(const uint64_t *planes, int width, uint64_t n_elements, int mantissa, uint64_t *rungs); /* mantissa + 1 */

/* Of the elements: added up over chunks. */
typedef enum { SR_FLOAT, SR_BFLOAT, SR_SIGNED, SR_UNSIGNED, SR_CODES /* floats of 8 bits */ } sr_number;
typedef struct {
    uint64_t n_nan, n_pos_inf, n_neg_inf, n_zero, n_neg_zero, n_subnormal, n_finite;
    double min, max, squares; /* of the finite elements; min and max are infinite while there are none */
    uint64_t counts[256];     /* of codes */
} SrValues;

/* digest_ladder.c: both at once, in one pass over whole blocks, of which there is one at least. Values are added if all
 * elements are finite; it says what is left to do. */
typedef enum { SR_NOT_FINITE, SR_FINITE, SR_SMALL /* finite, and zeros and subnormal numbers are yet to be counted */ } sr_left;
typedef sr_left (*sr_add_both)(
    const unsigned char *at, size_t n_blocks, const uint64_t *keys, uint64_t *planes, SrValues *values);
sr_add_both sr_both_function(sr_number number, int width, sr_instructions instructions); /* or NULL */
void sr_count_small(SrValues *v, const unsigned char *at, size_t n_blocks); /* of a chunk: zeros and subnormal numbers */

/* digest.c: what a recording keeps of a tensor; see recording/digests/tensor_digest.py. */
enum { SR_MOST_SAMPLES = 128 };
typedef struct {
    int64_t n_nan, n_pos_inf, n_neg_inf, n_zero, n_neg_zero, n_subnormal;
    double min, max, norm;
} SrStatistics; /* the last columns of `RESULT` in recording/model.py */
typedef struct {
    SrStatistics statistics;
    uint64_t rungs[SR_MOST_PLANES], samples[SR_MOST_SAMPLES];
    size_t n_rungs, n_samples;
} SrDigest;
/* Of a plain tensor on the CPU: 1; 0 where Python has to prepare it; -1 with an exception. */
int sr_digest_tensor(PyObject *tensor, const SrTensor *t, SrDigest *found);
PyObject *sr_setup_digests(PyObject *module, PyObject *formats);
PyObject *sr_digest(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *sr_digest_memory(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *sr_split_samples(PyObject *module, PyObject *args);

#endif
