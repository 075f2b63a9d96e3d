/* How near elements of float32 lie, for one set of instructions: included by stats_formats.h for each.
 *
 * numerics/nearness.py is the specification. Each element is compared in float32, operation by operation as torch does it;
 * the sums are in another order. */

/* One block: sums over it, and whether an element is farther apart than the bound. */
TARGET static int STATS_JOIN(near, block, INSTRUCTIONS)(const float *actual, const float *expected, size_t n, struct near_pass *p) {
    const float relative = p->relative, absolute = p->absolute;
    float gaps[NEAR_LANES] = {0}, sizes[NEAR_LANES] = {0};
    uint32_t far[NEAR_LANES] = {0}, any = 0;
    for (size_t i = 0; i < n; i += NEAR_LANES) {
        for (size_t lane = 0; lane < NEAR_LANES; lane++) {
            float e = expected[i + lane], gap = actual[i + lane] - e;
            far[lane] |= !(fabsf(gap) - (fabsf(e) * relative + absolute) <= 0.0f); /* NaN is within none */
            gaps[lane] += gap * e, sizes[lane] += e * e;
        }
    }
    double of_gaps = 0, of_sizes = 0;
    for (size_t lane = 0; lane < NEAR_LANES; lane++) any |= far[lane], of_gaps += gaps[lane], of_sizes += sizes[lane];
    p->gap += of_gaps, p->size += of_sizes;
    return any != 0;
}

/* One block: the sums of the gaps and of the elements in units of each element, or of the usual size. */
TARGET static void STATS_JOIN(near, weights, INSTRUCTIONS)(const float *actual, const float *expected, size_t n, struct near_pass *p) {
    const float level = p->level;
    float gaps[NEAR_LANES] = {0}, weights[NEAR_LANES] = {0};
    for (size_t i = 0; i < n; i += NEAR_LANES) {
        for (size_t lane = 0; lane < NEAR_LANES; lane++) {
            float e = expected[i + lane], size = fabsf(e), unit = size < level ? level : size, weight = e / unit;
            gaps[lane] += (actual[i + lane] - e) / unit * weight, weights[lane] += weight * weight;
        }
    }
    double of_gaps = 0, of_weights = 0;
    for (size_t lane = 0; lane < NEAR_LANES; lane++) of_gaps += gaps[lane], of_weights += weights[lane];
    p->weighted_gap += of_gaps, p->weighted_size += of_weights;
}
