/* A matrix of rounded numbers times a vector, for one set of instructions: included by stats_formats.h for each.
 *
 * judge/cause/product_sketch.py is the specification. Each number is read once, rounded in a register and multiplied:
 * torch writes the rounded matrix to memory, and reads it again. The order of the sums differs from torch's. */

static inline float STATS_JOIN(rounded, value, INSTRUCTIONS)(float value, struct sketch_rounding to) {
    uint32_t bits = stats_float_bits(value);
    uint32_t rounded = (bits + to.half + ((bits >> to.dropped) & to.to_even)) & to.kept;
    bits = (bits & 0x7fffffff) > 0x7f800000 ? bits : rounded; /* a NaN stays one */
    memcpy(&value, &bits, sizeof value);
    return value;
}
#define ROUNDED STATS_JOIN(rounded, value, INSTRUCTIONS)

/* Rows that are contiguous: one sum for each. */
TARGET static void STATS_JOIN(add, rows, INSTRUCTIONS)(const struct sketch_product *p) {
    const struct sketch_rounding to = p->to;
    const float *vector = p->vector;
    for (int64_t i = 0; i < p->n_rows; i++) {
        const float *row = p->matrix + i * p->row_stride;
        float lanes[SKETCH_LANES] = {0}, sum = 0;
        int64_t j = 0;
        for (; j + SKETCH_LANES <= p->n_columns; j += SKETCH_LANES)
            for (int lane = 0; lane < SKETCH_LANES; lane++) lanes[lane] += ROUNDED(row[j + lane], to) * vector[j + lane];
        for (int half = SKETCH_LANES / 2; half > 4; half /= 2)
            for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
        sum = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
        for (; j < p->n_columns; j++) sum += ROUNDED(row[j], to) * vector[j];
        p->out[i] += sum;
    }
}

/* Columns that are contiguous, as in a transposed matrix: some rows at a time, whose sums stay in the L1 cache. */
TARGET static void STATS_JOIN(add, columns, INSTRUCTIONS)(const struct sketch_product *p) {
    const struct sketch_rounding to = p->to;
    for (int64_t start = 0; start < p->n_rows; start += SKETCH_ROWS) {
        int64_t n = p->n_rows - start < SKETCH_ROWS ? p->n_rows - start : SKETCH_ROWS;
        float sums[SKETCH_ROWS] = {0};
        for (int64_t j = 0; j < p->n_columns; j++) {
            const float *column = p->matrix + start + j * p->column_stride;
            float factor = p->vector[j];
            for (int64_t i = 0; i < n; i++) sums[i] += ROUNDED(column[i], to) * factor;
        }
        for (int64_t i = 0; i < n; i++) p->out[start + i] += sums[i];
    }
}
#undef ROUNDED
