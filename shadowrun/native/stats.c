/* All statistics of two tensors that differ, in one pass over memory: numerics.diff in C. */

#include "core.h"
#include "stats.h"

static inline uint32_t code_of_float(float value) {
    uint32_t code;
    memcpy(&code, &value, sizeof code);
    return code;
}

/* For processors without a conversion, and compilers that make no vectors of it. */
static inline uint32_t code_of_half(uint16_t half) {
    uint32_t size = half & 0x7fff, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t normal = (size << 13) + ((uint32_t)112 << 23);
    uint32_t subnormal = code_of_float((float)(int32_t)size * 0x1p-24f);
    uint32_t is_subnormal = 0 - (uint32_t)(size < 0x400), is_special = 0 - (uint32_t)(size >= 0x7c00);
    return sign | (is_subnormal & subnormal) | (~is_subnormal & (normal | (is_special & 0x7f800000)));
}

static const char *const formats[] = {
    "float32", "float64", "bfloat16", "float16", "float8", "int8", "uint8",
    "int16",   "uint16",  "int32",    "uint32",  "int64",  "uint64", "bool",
};
#define N_FORMATS (sizeof formats / sizeof *formats)

#define INSTRUCTIONS plain
#define TARGET
#include "stats_all.h"

/* A build runs on every processor of its kind, so the loops are there for older and newer ones. */
#if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__) && (defined(__linux__) || defined(__APPLE__))
#define HAS_MORE 1
#include <immintrin.h>

#define INSTRUCTIONS avx2
#define TARGET __attribute__((target("avx2")))
#include "stats_all.h"

#define INSTRUCTIONS avx512
#if defined(__clang__)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#define HALVES(from, to) _mm512_storeu_ps((to), _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from))))
#include "stats_all.h"
#endif

/* By the name of the instructions, or with None the best that the processor has. NULL with an exception. */
static const add_function *table_of(PyObject *instructions) {
    const char *name = instructions == Py_None ? "" : PyUnicode_AsUTF8(instructions);
    if (name == NULL) return NULL;
#ifdef HAS_MORE
    int avx2 = __builtin_cpu_supports("avx2");
    int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && (!*name || !strcmp(name, "avx512"))) return all_formats_avx512;
    if (avx2 && (!*name || !strcmp(name, "avx2"))) return all_formats_avx2;
#endif
    if (!*name || !strcmp(name, "plain")) return all_formats_plain;
    PyErr_Format(PyExc_ValueError, "this processor, or this build, has no instructions \"%s\"", name);
    return NULL;
}

static add_function function_of(PyObject *format, PyObject *instructions) {
    const add_function *table = table_of(instructions);
    const char *name = table == NULL ? NULL : PyUnicode_AsUTF8(format);
    if (name == NULL) return NULL;
    for (size_t i = 0; i < N_FORMATS; i++)
        if (!strcmp(name, formats[i])) return table[i];
    PyErr_Format(PyExc_ValueError, "no statistics of the format \"%s\"", name);
    return NULL;
}

/* What follows from the dtype: (name, smallest normal number, mean square that vanishes, signed, numbers). The last are
   the 256 numbers of an 8-bit format as float32, else None. */
int read_format(PyObject *tuple, PyObject *instructions, struct input *in, add_function *add) {
    PyObject *name, *wide;
    if (!PyArg_ParseTuple(tuple, "UddpO", &name, &in->normal, &in->vanishing, &in->is_signed, &wide)) return -1;
    *add = function_of(name, instructions);
    if (*add == NULL) return -1;
    in->is_bool = PyUnicode_CompareWithASCIIString(name, "bool") == 0;
    in->wide = NULL;
    if (PyBytes_Check(wide) && PyBytes_GET_SIZE(wide) == 256 * (Py_ssize_t)sizeof(float))
        in->wide = (const float *)(const void *)PyBytes_AS_STRING(wide);
    if (in->wide == NULL && PyUnicode_CompareWithASCIIString(name, "float8") == 0) {
        PyErr_SetString(PyExc_ValueError, "an 8-bit format needs its 256 numbers as float32");
        return -1;
    }
    return 0;
}

void add_up(struct totals *t, const struct input *in, add_function add, size_t n_bytes) {
    if (n_bytes <= FEW_BYTES) {
        add(t, in);
    } else {
        Py_BEGIN_ALLOW_THREADS
        add(t, in);
        Py_END_ALLOW_THREADS
    }
}

/* statistics(left, right, n, n_bytes, format, instructions=None): addresses of two dense tensors, their elements and the
   bytes of one of them. Returns the fields of Totals in their order, and the two values of the worst element. */
PyObject *statistics(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    (void)module;
    if (n_args < 5 || n_args > 6 || !PyTuple_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "statistics(left, right, n, n_bytes, format, instructions=None)");
        return NULL;
    }
    struct input in = {.left = PyLong_AsVoidPtr(args[0]), .right = PyLong_AsVoidPtr(args[1]), .n = PyLong_AsSize_t(args[2])};
    size_t n_bytes = PyLong_AsSize_t(args[3]);
    struct totals t = {.worst = -1};
    add_function add;
    if (PyErr_Occurred() || read_format(args[4], n_args == 6 ? args[5] : Py_None, &in, &add) < 0) return NULL;
    if (in.n && in.left && in.right) add_up(&t, &in, add, n_bytes);
    typedef unsigned long long count;
    return Py_BuildValue(
        "KdddKKKKKKKKLOdd", (count)t.n_different, t.max_abs, t.max_rel, t.squares, (count)t.n_finite, (count)t.max_ulp,
        (count)t.any_xor, (count)t.n_nan, (count)t.n_inf, (count)t.n_zero_sign, (count)t.n_subnormal,
        (count)t.n_from_zero, (long long)t.worst, t.worst_is_class ? Py_True : Py_False, t.worst_actual,
        t.worst_expected);
}
