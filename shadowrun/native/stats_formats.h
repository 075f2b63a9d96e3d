/* Every format for one set of instructions, and a table of them: included by stats.c for each set.

   The includer defines INSTRUCTIONS (a name), TARGET (what makes a compiler use them), and HALVES(from, to) if they
   widen 16 float16 at a time. */

#define FORMAT float32
#define WIDTH 32
#define VALUE float
#define VALUE_WIDTH 32
#define BLOCK 2048
#include "stats_float.h"

#define FORMAT float64
#define WIDTH 64
#define VALUE double
#define VALUE_WIDTH 64
#define BLOCK 1024
#include "stats_float.h"

#define FORMAT bfloat16
#define WIDTH 16
#define VALUE float
#define VALUE_WIDTH 32
#define BLOCK 2048
#define WIDEN(bits, wide) ((uint32_t)(bits) << 16)
#include "stats_float.h"

#define FORMAT float16
#define WIDTH 16
#define VALUE float
#define VALUE_WIDTH 32
#define BLOCK 2048
#define WIDEN(bits, wide) stats_half_bits(bits)
#ifdef HALVES
#define WIDEN_MANY(from, to) HALVES(from, to)
#endif
#include "stats_float.h"

#define FORMAT float8
#define WIDTH 8
#define VALUE float
#define VALUE_WIDTH 32
#define BLOCK 2048
#define WIDEN(bits, wide) stats_float_bits((wide)[bits])
#include "stats_float.h"

#define FORMAT int8
#define NUMBER int8_t
#define SIZE uint8_t
#define TWICE uint16_t
#define SQUARES uint32_t
#include "stats_integer.h"

#define FORMAT uint8
#define NUMBER uint8_t
#define SIZE uint8_t
#define TWICE uint16_t
#define SQUARES uint32_t
#include "stats_integer.h"

#define FORMAT int16
#define NUMBER int16_t
#define SIZE uint16_t
#define TWICE uint32_t
#define SQUARES uint64_t
#include "stats_integer.h"

#define FORMAT uint16
#define NUMBER uint16_t
#define SIZE uint16_t
#define TWICE uint32_t
#define SQUARES uint64_t
#include "stats_integer.h"

#define FORMAT int32
#define NUMBER int32_t
#define SIZE uint32_t
#define TWICE uint64_t
#define SQUARES double
#include "stats_integer.h"

#define FORMAT uint32
#define NUMBER uint32_t
#define SIZE uint32_t
#define TWICE uint64_t
#define SQUARES double
#include "stats_integer.h"

#define FORMAT int64
#define NUMBER int64_t
#define SIZE uint64_t
#define SQUARES double
#include "stats_integer.h"

#define FORMAT uint64
#define NUMBER uint64_t
#define SIZE uint64_t
#define SQUARES double
#include "stats_integer.h"

#include "stats_near.h"
#include "stats_sketch.h"

#define ADD(format) STATS_JOIN(add, format, INSTRUCTIONS)
static const stats_function_t STATS_JOIN(all, formats, INSTRUCTIONS)[] = {
    ADD(float32), ADD(float64), ADD(bfloat16), ADD(float16), ADD(float8), ADD(int8),  ADD(uint8),
    ADD(int16),   ADD(uint16),  ADD(int32),    ADD(uint32),  ADD(int64),  ADD(uint64), ADD(uint8),
};
#undef ADD
#undef INSTRUCTIONS
#undef TARGET
#undef HALVES
