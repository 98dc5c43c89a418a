// LoRA adapters: what they shrink x to, and what they add to the outputs, in fp32. Each number is the same chain of
// operations whatever the other rows of x use, however many there are and on how many threads.
#pragma once
#include "prepare.hpp"

namespace halfbyte::HB_ISA {

constexpr int COLUMN_VECTORS = int(EXPAND_COLUMNS / Simd::LANES);

// Sums by lane over k, four chains at a time.
inline float dot(const float *a, const float *b, int64_t padded) {
    Simd::F sums[4] = {Simd::zero(), Simd::zero(), Simd::zero(), Simd::zero()};
    for (int64_t i = 0; i < padded; i += 4 * Simd::LANES)
        for (int j = 0; j < 4; ++j)
            sums[j] = Simd::mul_add(Simd::load(a + i + j * Simd::LANES), Simd::load(b + i + j * Simd::LANES), sums[j]);
    const Simd::F one = Simd::set(1);
    return Simd::sum(Simd::mul_add(one, Simd::mul_add(one, sums[0], sums[1]), Simd::mul_add(one, sums[2], sums[3])));
}

// A row of x as fp32, zeros up to `padded`; returns the power of two that was taken out of it.
inline float widen_for_shrink(const HbShrink &s, int64_t row, int64_t padded, float *out) {
    widen_row(s.x, row * s.x_stride, s.dtype, s.k, padded, out);
    float factor = 1;
    uint8_t special = 0;
    normalise(largest(out, s.k), s.k, out, &factor, &special);
    return factor;
}

// Rows [from, to) of one adapter's A, times those rows of the block that use it. scratch: `padded` floats.
inline void shrink_task(const Adapters &job, int64_t segment, int64_t from, int64_t to, float *scratch) {
    const HbShrink &s = *job.shrink;
    const Segment &mine = job.segments[segment];
    const int64_t first = s.spans[2 * mine.slot];
    for (int64_t j = from; j < to; ++j) {
        widen_row(s.a, (first + j) * s.k, s.a_dtype, s.k, job.padded, scratch);
        for (int64_t at = mine.begin; at < mine.end; ++at)
            s.h[job.rows[at] * s.width + j] =
                dot(scratch, job.x + (at - job.first) * job.padded, job.padded) * job.factor[at - job.first];
    }
}

// An adapter's B for some outputs, [rank][EXPAND_COLUMNS]: lanes along the outputs, so that no sum crosses lanes. Behind
// it, B as fp32.
inline void turn(const HbExpand &e, const int32_t *entry, int64_t first, int64_t count, float *turned) {
    const int64_t rank = entry[1], stride = entry[3], whole = EXPAND_COLUMNS * stride;
    float *wide = turned + rank * EXPAND_COLUMNS;
    widen_row(e.b, entry[2] * e.n + first * stride, e.b_dtype, count * stride, whole, wide);
    for (int64_t j = 0; j < rank; ++j)
        for (int v = 0; v < COLUMN_VECTORS; ++v)
            Simd::store(turned + j * EXPAND_COLUMNS + v * Simd::LANES,
                        Simd::strided(wide + v * Simd::LANES * stride + j, int32_t(stride)));
}

inline void expand_row(const HbExpand &e, int64_t row, const int32_t *entry, float scaling, int64_t first,
                       int64_t count, const float *bias, const float *turned) {
    const float *h = e.h + row * e.width + entry[0];
    Simd::F sums[COLUMN_VECTORS];
#pragma GCC unroll 16
    for (int v = 0; v < COLUMN_VECTORS; ++v) sums[v] = Simd::zero();
    for (int64_t j = 0; j < entry[1]; ++j) {
        const Simd::F value = Simd::set(h[j]);
#pragma GCC unroll 16
        for (int v = 0; v < COLUMN_VECTORS; ++v)
            sums[v] = Simd::mul_add(value, Simd::load(turned + j * EXPAND_COLUMNS + v * Simd::LANES), sums[v]);
    }
    float whole[EXPAND_COLUMNS];
    float *to = count == EXPAND_COLUMNS ? e.out + row * e.n + first : whole;
    const Simd::F factor = Simd::set(scaling);
#pragma GCC unroll 16
    for (int v = 0; v < COLUMN_VECTORS; ++v)
        Simd::store(to + v * Simd::LANES, Simd::mul_add(factor, sums[v], Simd::load(bias + v * Simd::LANES)));
    if (to == whole) std::memcpy(e.out + row * e.n + first, whole, count * 4);
}

// scratch: the bias, and one adapter's B twice.
inline void expand_task(const Adapters &job, int64_t task, float *scratch) {
    const HbExpand &e = *job.expand;
    const int64_t first = task * EXPAND_COLUMNS, count = smaller(EXPAND_COLUMNS, e.n - first);
    float *bias = scratch, *turned = scratch + EXPAND_COLUMNS;
    std::memset(bias, 0, EXPAND_COLUMNS * 4);
    if (e.bias) widen_row(e.bias, first, e.bias_dtype, count, count, bias);
    for (int64_t m = 0; m < e.m; ++m)
        if (e.index && e.index[m] < 0) std::memcpy(e.out + m * e.n + first, bias, count * 4);
    for (int64_t i = 0; i < job.count; ++i) {
        const Segment &mine = job.segments[i];
        const int32_t *entry = e.table + 4 * mine.slot;
        turn(e, entry, first, count, turned);
        for (int64_t at = mine.begin; at < mine.end; ++at)
            expand_row(e, job.rows[at], entry, e.scalings[mine.slot], first, count, bias, turned);
    }
}

}  // namespace halfbyte::HB_ISA
