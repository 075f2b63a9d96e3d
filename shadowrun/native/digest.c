/* Digests of tensors on the CPU, as bytes of a recording's columns: recording/digests/tensor_digest.py is the specification. */

#include "digest.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* ---- counts of classes, range and squares of the numbers, added up over chunks -------------------------------------- */

enum { VALUES_LANES = 16 };
enum { VALUES_FEW = 128 };    /* elements that are counted in a type as narrow as theirs */
enum { VALUES_PIECE = 1024 }; /* elements that stay in the L1 cache with their copy */

#define VALUES_JOIN_(a, b, c) values_##a##_##b##_##c
#define VALUES_JOIN(a, b, c) VALUES_JOIN_(a, b, c)
#define VALUES_TYPE_(sign, width) sign##width##_t
#define VALUES_TYPE(sign, width) VALUES_TYPE_(sign, width)

static inline float values_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline double values_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The bits of a float of the same value: a loop of it becomes vectors with any compiler. */
static inline uint32_t values_half(uint16_t half) {
    uint32_t size = half & 0x7fff, sign = (uint32_t)(half & 0x8000) << 16, small;
    float subnormal = (float)(int32_t)size * 0x1p-24f;
    memcpy(&small, &subnormal, sizeof small);
    uint32_t normal = (size << 13) + ((uint32_t)112 << 23);
    return sign | (size < 0x400 ? small : normal | (size >= 0x7c00 ? 0x7f800000 : 0));
}

static inline double values_sum(const double *lanes) {
    double sum = 0;
    for (int j = 0; j < VALUES_LANES; j++) {
        sum += lanes[j];
    }
    return sum;
}

static inline void values_range(SrValues *v, double low, double high) {
    v->min = low < v->min ? low : v->min;
    v->max = high > v->max ? high : v->max;
}

typedef void (*values_add)(SrValues *values, const unsigned char *at, size_t n);

#define INSTRUCTIONS plain
#define TARGET
#include "digest_values_sets.h"

#ifdef SR_HAS_X86_SETS
#include <immintrin.h>

#define INSTRUCTIONS avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define HALVES(from, to)                                                                                               \
    (_mm256_storeu_ps((to), _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from)))),                                   \
     _mm256_storeu_ps((to) + 8, _mm256_cvtph_ps(_mm_loadu_si128((const void *)((from) + 8)))))
#include "digest_values_sets.h"

#define INSTRUCTIONS avx512
#define TARGET SR_TARGET_AVX512
#define HALVES(from, to) _mm512_storeu_ps((to), _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from))))
#include "digest_values_sets.h"
#endif

/* Of codes there are 256 only. Four tables: equal codes in a row would wait for each other. */
static void values_add_codes(SrValues *v, const unsigned char *at, size_t n) {
    uint32_t counts[4][256] = {0}; /* a chunk has few elements */
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        counts[0][at[i]]++, counts[1][at[i + 1]]++, counts[2][at[i + 2]]++, counts[3][at[i + 3]]++;
    }
    for (; i < n; i++) {
        counts[0][at[i]]++;
    }
    for (int code = 0; code < 256; code++) {
        v->counts[code] += (uint64_t)counts[0][code] + counts[1][code] + counts[2][code] + counts[3][code];
    }
}

static values_add values_function(sr_number number, int width, sr_instructions instructions) {
    if (number == SR_CODES) {
        return values_add_codes;
    }
    int size = width == 8 ? 0 : width == 16 ? 1 : width == 32 ? 2 : 3;
#ifdef SR_HAS_X86_SETS
    if (instructions != SR_PLAIN) {
        return instructions == SR_AVX512 ? values_all_formats_avx512[number][size] : values_all_formats_avx2[number][size];
    }
#endif
    (void)instructions;
    return values_all_formats_plain[number][size];
}

static void values_clear(SrValues *v, sr_number number) {
    memset(v, 0, number == SR_CODES ? sizeof *v : offsetof(SrValues, counts));
    v->min = (double)INFINITY, v->max = -(double)INFINITY;
}

/* After the last chunk of codes, given their 256 numbers and the smallest normal one. */
static void values_sum_counts(SrValues *v, const double *numbers, double normal) {
    for (int code = 0; code < 256; code++) {
        uint64_t n = v->counts[code];
        double value = numbers[code];
        if (n == 0) {
            continue;
        }
        if (isnan(value)) {
            v->n_nan += n;
        } else if (isinf(value)) {
            *(value > 0 ? &v->n_pos_inf : &v->n_neg_inf) += n;
        } else {
            if (value == 0) {
                *(signbit(value) ? &v->n_neg_zero : &v->n_zero) += n;
            } else if (fabs(value) < normal) {
                v->n_subnormal += n;
            }
            v->n_finite += n;
            v->squares += (double)n * (value * value);
            values_range(v, value, value);
        }
    }
}

/* The sum of squares scaled by the greatest number: of float64, squares themselves may overflow or vanish. */
static double values_scaled_norm(const unsigned char *at, size_t n, double scale) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        double value;
        memcpy(&value, at + i * sizeof value, sizeof value);
        if (isfinite(value)) {
            sum += (value / scale) * (value / scale);
        }
    }
    return scale * sqrt(sum);
}

static double values_norm(const SrValues *v, const unsigned char *at, size_t n, sr_number number, int width) {
    double scale = fmax(fabs(v->min), fabs(v->max));
    if (number == SR_FLOAT && width == 64 && scale != 0 && (scale > 0x1p450 || scale < 0x1p-450)) {
        return fmin(values_scaled_norm(at, n, scale), DBL_MAX); /* whether it overflows depends on the order of the sum */
    }
    return sqrt(v->squares);
}

/* ---- a tensor ------------------------------------------------------------------------------------------------------------ */

enum { MOST_FORMATS = 32, N_SAMPLES = SR_MOST_SAMPLES / 2, N_PARTS = 4, MOST_DIMS = 16 };
enum { MOST_GATHERED = 64 << 20 }; /* bytes of a tensor that is copied, as its elements do not lie in their order */

typedef struct {
    int code, width, mantissa; /* code and width: as in DLPack */
    sr_number number;
    double normal;      /* smallest normal number of a format of 8-bit codes */
    double numbers[256]; /* of its codes */
} DigestFormat;

static DigestFormat digest_formats[MOST_FORMATS];
static Py_ssize_t digest_n_formats;
static sr_instructions digest_best; /* that the processor has */

/* setup_digests(formats): for each (code, width, mantissa, kind of number, smallest normal, 256 float64 or None). */
PyObject *sr_setup_digests(PyObject *module, PyObject *formats) {
    (void)module;
    if (!PyTuple_Check(formats) || PyTuple_GET_SIZE(formats) > MOST_FORMATS) {
        return sr_wrong_count("setup_digests");
    }
    sr_set_up_ladders();
    digest_best = sr_best_instructions(1);
    digest_n_formats = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(formats); i++) {
        DigestFormat *f = digest_formats + i;
        int number;
        const char *numbers;
        Py_ssize_t n_bytes;
        if (!PyArg_ParseTuple(
                PyTuple_GET_ITEM(formats, i), "iiiidz#", &f->code, &f->width, &f->mantissa, &number, &f->normal, &numbers, &n_bytes)) {
            return NULL;
        }
        if (number < SR_FLOAT || number > SR_CODES || f->mantissa < 0 || f->mantissa >= f->width ||
            (f->width != 8 && f->width != 16 && f->width != 32 && f->width != 64) || (number == SR_BFLOAT && f->width != 16) ||
            (number == SR_FLOAT && f->width == 8) ||
            (number == SR_CODES && (f->width != 8 || numbers == NULL || n_bytes != sizeof f->numbers))) {
            return PyErr_Format(PyExc_ValueError, "no digests of format %zd", i);
        }
        f->number = (sr_number)number;
        if (number == SR_CODES) {
            memcpy(f->numbers, numbers, sizeof f->numbers);
        }
        digest_n_formats = i + 1;
    }
    Py_RETURN_NONE;
}

/* One tensor: dense, of real numbers. */
typedef struct {
    const unsigned char *at;
    size_t n;       /* elements */
    size_t n_rows;  /* of the leading dimension; 0 without one */
    size_t n_ladders; /* of its first rows, each with a ladder of its own */
    int parts;      /* of each sampled element: 2 of a complex number */
    const DigestFormat *format;
    int n_dims; /* 0: dense */
    int64_t sizes[MOST_DIMS], strides[MOST_DIMS];
} DigestInput;

static void digest_copy_run(unsigned char *to, const unsigned char *from, int64_t n, int64_t stride, size_t bytes) {
    if (stride == 1) {
        memcpy(to, from, (size_t)n * bytes);
        return;
    }
#define DIGEST_COPY(size)                                                                                              \
    for (int64_t i = 0; i < n; i++) {                                                                                  \
        memcpy(to + i * (size), from + i * stride * (size), (size));                                                   \
    }
    switch (bytes) {
    case 1: DIGEST_COPY(1) break;
    case 2: DIGEST_COPY(2) break;
    case 4: DIGEST_COPY(4) break;
    default: DIGEST_COPY(8)
    }
#undef DIGEST_COPY
}

/* The elements of a strided tensor, in the order of a dense one. */
static void digest_gather(const DigestInput *in, unsigned char *to) {
    size_t bytes = (size_t)in->format->width / 8;
    int last = in->n_dims - 1;
    int64_t index[MOST_DIMS] = {0}, run = in->sizes[last];
    const unsigned char *from = in->at;
    for (int64_t done = 0; done < (int64_t)in->n; done += run, to += (size_t)run * bytes) {
        digest_copy_run(to, from, run, in->strides[last], bytes);
        for (int d = last - 1; d >= 0; d--) {
            from += in->strides[d] * (int64_t)bytes;
            if (++index[d] < in->sizes[d]) {
                break;
            }
            from -= in->sizes[d] * in->strides[d] * (int64_t)bytes;
            index[d] = 0;
        }
    }
}

/* Note how a tensor that is not dense lies; dimensions that are as one become one. 0 where Python has to prepare it. */
static int digest_note_layout(DigestInput *in, const SrTensor *t) {
    if (in->n == 0 || in->n > MOST_GATHERED / ((size_t)in->format->width / 8)) {
        return 0;
    }
    int n = 0;
    for (int32_t d = 0; d < t->ndim; d++) {
        if (t->shape[d] == 1) {
            continue;
        }
        if (n && in->strides[n - 1] == t->shape[d] * t->strides[d]) {
            in->sizes[n - 1] *= t->shape[d], in->strides[n - 1] = t->strides[d];
        } else if (n < MOST_DIMS) {
            in->sizes[n] = t->shape[d], in->strides[n++] = t->strides[d];
        } else {
            return 0;
        }
    }
    in->n_dims = n;
    return n > 0;
}

/* Add the planes of n elements, and where `values` is given, these too. */
static void digest_add(
    const DigestFormat *f, const unsigned char *at, size_t n, sr_instructions instructions, uint64_t *planes, SrValues *values) {
    uint64_t room[SR_CHUNK_BLOCKS + 1];
    unsigned char last[SR_LANES * sizeof(uint64_t)];
    sr_add_planes add_planes = sr_planes_function(f->width, instructions);
    values_add add_values = values_function(f->number, f->width, instructions);
    sr_add_both add_both = values == NULL ? NULL : sr_both_function(f->number, f->width, instructions);
    size_t bytes = (size_t)f->width / 8, most = (size_t)SR_CHUNK_BLOCKS * SR_LANES;
    for (size_t first = 0; first < n; first += most) {
        size_t m = n - first < most ? n - first : most, n_blocks = m / SR_LANES, rest = m % SR_LANES, n_done = 0;
        const unsigned char *from = at + first * bytes;
        const uint64_t *keys = sr_keys(first / SR_LANES, n_blocks + (rest != 0), room);
        if (add_both != NULL && n_blocks) {
            sr_left left = add_both(from, n_blocks, keys, planes, values);
            n_done = left == SR_NOT_FINITE ? 0 : m - rest;
            if (left == SR_SMALL) {
                sr_count_small(values, from, n_blocks);
            }
        } else {
            add_planes(from, n_blocks, keys, planes);
        }
        if (rest) {
            memset(last, 0, sizeof last);
            memcpy(last, from + n_blocks * SR_LANES * bytes, rest * bytes);
            add_planes(last, 1, keys + n_blocks, planes);
        }
        if (values != NULL && n_done < m) {
            add_values(values, from + n_done * bytes, m - n_done);
        }
    }
}

static void digest_ladder(const DigestInput *in, size_t first, size_t n, sr_instructions instructions, SrValues *values, uint64_t *rungs) {
    uint64_t planes[SR_MOST_PLANES] = {0};
    const DigestFormat *f = in->format;
    digest_add(f, in->at + first * (size_t)f->width / 8, n, instructions, planes, values);
    sr_rungs(planes, f->width, n, f->mantissa, rungs);
}

static void digest_statistics(const DigestInput *in, SrValues *values, SrStatistics *found) {
    const DigestFormat *f = in->format;
    if (f->number == SR_CODES) {
        values_sum_counts(values, f->numbers, f->normal);
    }
    *found = (SrStatistics){
        (int64_t)values->n_nan, (int64_t)values->n_pos_inf, (int64_t)values->n_neg_inf, (int64_t)values->n_zero,
        (int64_t)values->n_neg_zero, (int64_t)values->n_subnormal, (double)NAN, (double)NAN, (double)NAN};
    if (values->n_finite) {
        found->min = values->min + 0.0, found->max = values->max + 0.0; /* -0 becomes +0: equal numbers in equal bytes */
        found->norm = values_norm(values, in->at, in->n, f->number, f->width);
    }
}

/* Everything of a digest but its samples. */
static void digest_compute(const DigestInput *in, sr_instructions instructions, SrDigest *found, uint64_t *row_rungs) {
    SrValues values;
    values_clear(&values, in->format->number);
    digest_ladder(in, 0, in->n, instructions, &values, found->rungs);
    digest_statistics(in, &values, &found->statistics);
    size_t each = in->n_rows ? in->n / in->n_rows : 0;
    for (size_t r = 0; r < in->n_ladders; r++) {
        digest_ladder(in, r * each, each, instructions, NULL, row_rungs + r * found->n_rungs);
    }
}

/* `sample_positions` of recording/model.py: (at most N_SAMPLES,). Returns how many. With the GIL: the last answers are kept. */
static size_t digest_positions(uint64_t n, const uint64_t **positions) {
    enum { N_KEPT = 32 };
    static struct {
        uint64_t n, positions[N_SAMPLES];
    } kept[N_KEPT];
    size_t slot = sr_mix(n) % N_KEPT;
    if (n > N_SAMPLES && kept[slot].n != n) {
        for (uint64_t i = 0; i < N_SAMPLES; i++) {
            uint64_t begin = i * n / N_SAMPLES, end = (i + 1) * n / N_SAMPLES;
            kept[slot].positions[i] = begin + sr_mix(i + n) % (end - begin);
        }
        kept[slot].n = n;
    }
    *positions = kept[slot].positions;
    return n < N_SAMPLES ? n : N_SAMPLES;
}

static size_t digest_samples(const DigestInput *in, uint64_t *samples) {
    size_t bytes = (size_t)in->format->width / 8, parts = (size_t)in->parts, n = in->n / parts;
    const uint64_t *positions;
    size_t n_samples = digest_positions(n, &positions);
    for (size_t i = 0; i < n_samples; i++) {
        const unsigned char *from = in->at + (n > N_SAMPLES ? positions[i] : i) * parts * bytes;
        for (size_t part = 0; part < parts; part++, from += bytes) {
            uint8_t one;
            uint16_t two;
            uint32_t four;
            uint64_t *sample = samples + i * parts + part;
            switch (bytes) {
            case 1: memcpy(&one, from, 1), *sample = one; break;
            case 2: memcpy(&two, from, 2), *sample = two; break;
            case 4: memcpy(&four, from, 4), *sample = four; break;
            default: memcpy(sample, from, 8);
            }
        }
    }
    return n_samples * parts;
}

static void digest_gather_and_compute(DigestInput *in, unsigned char *room, sr_instructions instructions, SrDigest *found, uint64_t *row_rungs) {
    if (room != NULL) {
        digest_gather(in, room);
        in->at = room;
    }
    digest_compute(in, instructions, found, row_rungs);
}

/* `row_rungs`: room for the ladders of rows. 0 without memory. */
static int digest_all(const DigestInput *given, sr_instructions instructions, SrDigest *found, uint64_t *row_rungs) {
    DigestInput in = *given;
    size_t n_bytes = in.n * (size_t)in.format->width / 8;
    unsigned char *room = in.n_dims ? malloc(n_bytes) : NULL;
    if (in.n_dims && room == NULL) {
        return 0;
    }
    found->n_rungs = (size_t)in.format->mantissa + 1;
    if (n_bytes <= SR_FEW_BYTES) {
        digest_gather_and_compute(&in, room, instructions, found, row_rungs);
    } else {
        Py_BEGIN_ALLOW_THREADS
        digest_gather_and_compute(&in, room, instructions, found, row_rungs);
        Py_END_ALLOW_THREADS
    }
    /* With the GIL again: positions that were worked out are kept for all threads. */
    found->n_samples = digest_samples(&in, found->samples);
    free(room);
    return 1;
}

/* (statistics, rungs, samples, rungs of rows), as bytes. */
static PyObject *digest_memory(const DigestInput *in, sr_instructions instructions) {
    SrDigest found;
    size_t n_rungs = (size_t)in->format->mantissa + 1;
    if (in->n_ladders > PY_SSIZE_T_MAX / sizeof found.rungs) {
        return PyErr_NoMemory();
    }
    PyObject *rows = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(in->n_ladders * n_rungs * sizeof *found.rungs));
    if (rows == NULL) {
        return NULL;
    }
    if (!digest_all(in, instructions, &found, (uint64_t *)(void *)PyBytes_AS_STRING(rows))) {
        Py_DECREF(rows);
        return PyErr_NoMemory();
    }
    PyObject *parts[N_PARTS] = {
        PyBytes_FromStringAndSize((const char *)&found.statistics, sizeof found.statistics),
        PyBytes_FromStringAndSize((const char *)found.rungs, (Py_ssize_t)(n_rungs * sizeof *found.rungs)),
        PyBytes_FromStringAndSize((const char *)found.samples, (Py_ssize_t)(found.n_samples * sizeof *found.samples)),
        rows,
    };
    PyObject *tuple = parts[0] == NULL || parts[1] == NULL || parts[2] == NULL ? NULL : PyTuple_New(N_PARTS);
    for (int i = 0; i < N_PARTS; i++) {
        if (tuple == NULL) {
            Py_XDECREF(parts[i]);
        } else {
            PyTuple_SET_ITEM(tuple, i, parts[i]);
        }
    }
    return tuple;
}

static const DigestFormat *digest_format(const SrTensor *t) {
    for (Py_ssize_t i = 0; i < digest_n_formats; i++) {
        if (digest_formats[i].code == t->dtype.code && digest_formats[i].width == t->dtype.bits && t->dtype.lanes == 1) {
            return digest_formats + i;
        }
    }
    return NULL;
}

/* What is digested of a plain tensor: 1; 0 where Python has to prepare it; -1 with an exception. */
static int digest_read(PyObject *tensor, const SrTensor *t, DigestInput *in) {
    *in = (DigestInput){.n = sr_n_elements(t), .parts = 1};
    if (!sr_is_on_cpu(t) || t->dtype.code == SR_DLPACK_COMPLEX || (in->format = digest_format(t)) == NULL) {
        return 0;
    }
    if (t->data == NULL && in->n) { /* a tensor of zeros without memory */
        return 0;
    }
    in->at = (const unsigned char *)t->data + t->byte_offset;
    in->n_rows = t->ndim ? (size_t)t->shape[0] : 0;
    if (!sr_is_contiguous(t) && !digest_note_layout(in, t)) {
        return 0;
    }
    int negated = sr_is_negated(tensor);
    return negated < 0 ? -1 : !negated;
}

int sr_digest_tensor(PyObject *tensor, const SrTensor *t, SrDigest *found) {
    DigestInput in;
    int done = digest_read(tensor, t, &in);
    if (done == 1) {
        done = digest_all(&in, digest_best, found, NULL);
    }
    return done;
}

/* digest(tensor, n_ladders): of a plain tensor, as `digest_memory`; None where Python has to prepare the tensor. */
PyObject *sr_digest(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    (void)module;
    SrTensor t;
    DigestInput in;
    if (n_args != 2) {
        return sr_wrong_count("digest");
    }
    int done = sr_is_tensor(args[0]) && sr_read_tensor(args[0], &t) ? digest_read(args[0], &t, &in) : 0;
    size_t n_ladders = done < 1 ? 0 : PyLong_AsSize_t(args[1]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (!done) {
        Py_RETURN_NONE;
    }
    in.n_ladders = in.n_rows < n_ladders ? in.n_rows : n_ladders;
    return digest_memory(&in, digest_best);
}

/* digest_memory(address, n, n_rows, n_ladders, format, parts, instructions=None): as `digest`, of n real numbers of a dense
 * tensor. `format`: its place in what setup_digests was given. */
PyObject *sr_digest_memory(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    (void)module;
    if (n_args < 6 || n_args > 7) {
        return sr_wrong_count("digest_memory");
    }
    DigestInput in = {.at = PyLong_AsVoidPtr(args[0]), .n = PyLong_AsSize_t(args[1]), .n_rows = PyLong_AsSize_t(args[2])};
    size_t n_ladders = PyLong_AsSize_t(args[3]);
    Py_ssize_t format = PyLong_AsSsize_t(args[4]);
    long parts = PyLong_AsLong(args[5]);
    sr_instructions instructions = digest_best;
    if (PyErr_Occurred() || (n_args == 7 && sr_read_instructions(args[6], digest_best, &instructions))) {
        return NULL;
    }
    if (format < 0 || format >= digest_n_formats || parts < 1 || parts > 2 || in.n % (size_t)parts || (in.at == NULL && in.n)) {
        PyErr_SetString(PyExc_ValueError, "no memory that can be digested");
        return NULL;
    }
    in.format = digest_formats + format, in.parts = (int)parts;
    in.n_ladders = in.n_rows < n_ladders ? in.n_rows : n_ladders;
    return digest_memory(&in, instructions);
}

/* split_samples(samples, how many of each result, bytes of each of these): `_split` of recording/file_format/recording_writer.py. */
PyObject *sr_split_samples(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer samples, counts, widths;
    if (!PyArg_ParseTuple(args, "y*y*y*:split_samples", &samples, &counts, &widths)) {
        return NULL;
    }
    const unsigned char *n_samples = counts.buf, *width = widths.buf, *from = samples.buf;
    size_t n = 0, n_lower = 0, n_tops = 0;
    int fits = counts.len == widths.len;
    for (Py_ssize_t i = 0; fits && i < counts.len; i++) {
        n += n_samples[i];
        n_lower += n_samples[i] * (size_t)(width[i] ? width[i] - 1 : 0);
        n_tops += width[i] ? n_samples[i] : 0;
        fits = width[i] <= sizeof(uint64_t);
    }
    PyObject *lower = NULL, *tops = NULL, *both = NULL;
    if (!fits || n * sizeof(uint64_t) != (size_t)samples.len) {
        PyErr_SetString(PyExc_ValueError, "split_samples: numbers that do not fit");
    } else {
        lower = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n_lower), tops = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n_tops);
    }
    if (lower != NULL && tops != NULL) {
        char *to = PyBytes_AS_STRING(lower), *top = PyBytes_AS_STRING(tops);
        for (Py_ssize_t i = 0; i < counts.len; i++) {
            size_t w = width[i];
            for (int k = 0; k < n_samples[i]; k++, from += sizeof(uint64_t)) {
                if (w) {
                    memcpy(to, from, w - 1);
                    to += w - 1, *top++ = (char)from[w - 1];
                }
            }
        }
        both = PyTuple_Pack(2, lower, tops);
    }
    Py_XDECREF(lower);
    Py_XDECREF(tops);
    PyBuffer_Release(&samples);
    PyBuffer_Release(&counts);
    PyBuffer_Release(&widths);
    return both;
}
