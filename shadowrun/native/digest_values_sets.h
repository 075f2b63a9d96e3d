/* Every format for one set of instructions, and a table of them: included by digest.c for each set, with
   INSTRUCTIONS (a name), TARGET (what makes a compiler use them), and HALVES(from, to) if they widen 16 float16 at a time. */

#define FORMAT float16
#define WIDTH 16
#define MANTISSA 10
#define WIDEN(bits) values_half(bits)
#ifdef HALVES
#define WIDEN_MANY(from, to) HALVES(from, to)
#endif
#include "digest_values.h"

#define FORMAT bfloat16
#define WIDTH 16
#define MANTISSA 7
#define WIDEN(bits) ((uint32_t)(bits) << 16)
#include "digest_values.h"

#define FORMAT float32
#define WIDTH 32
#define MANTISSA 23
#include "digest_values.h"

#define FORMAT float64
#define WIDTH 64
#define MANTISSA 52
#include "digest_values.h"

#define FORMAT int8
#define WIDTH 8
#define NUMBER int8_t
#define SQUARE int32_t
#include "digest_values.h"

#define FORMAT uint8
#define WIDTH 8
#define NUMBER uint8_t
#define SQUARE uint32_t
#include "digest_values.h"

#define FORMAT int16
#define WIDTH 16
#define NUMBER int16_t
#define SQUARE int64_t
#include "digest_values.h"

#define FORMAT int32
#define WIDTH 32
#define NUMBER int32_t
#define SQUARE double
#include "digest_values.h"

#define FORMAT int64
#define WIDTH 64
#define NUMBER int64_t
#define SQUARE double
#include "digest_values.h"

#define FORMAT uint16
#define WIDTH 16
#define NUMBER uint16_t
#define SQUARE uint64_t
#include "digest_values.h"

#define FORMAT uint32
#define WIDTH 32
#define NUMBER uint32_t
#define SQUARE double
#include "digest_values.h"

#define FORMAT uint64
#define WIDTH 64
#define NUMBER uint64_t
#define SQUARE double
#include "digest_values.h"

#define ADD(format) VALUES_JOIN(add, format, INSTRUCTIONS)
static const values_add VALUES_JOIN(all, formats, INSTRUCTIONS)[SR_CODES][4] = {
    [SR_FLOAT] = {NULL, ADD(float16), ADD(float32), ADD(float64)},
    [SR_BFLOAT] = {NULL, ADD(bfloat16), NULL, NULL},
    [SR_SIGNED] = {ADD(int8), ADD(int16), ADD(int32), ADD(int64)},
    [SR_UNSIGNED] = {ADD(uint8), ADD(uint16), ADD(uint32), ADD(uint64)},
};
#undef ADD
#undef INSTRUCTIONS
#undef TARGET
#undef HALVES
