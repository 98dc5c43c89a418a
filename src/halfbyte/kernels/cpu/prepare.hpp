// x once a call: to fp32, into the order in which the kernels meet the weights, with sums for formats with offsets.
#pragma once
#include "job.hpp"
#include "scales.hpp"

namespace halfbyte::HB_ISA {

// k numbers as fp32, from element `start` on, then zeros up to `padded`.
inline void widen_row(const void *numbers, int64_t start, int32_t dtype, int64_t k, int64_t padded, float *out) {
    const uint8_t *from = bytes(numbers) + start * (dtype == HB_FP32 ? 4 : 2);
    int64_t i = 0;
    if (dtype == HB_FP32) {
        std::memcpy(out, from, k * 4);
    } else if (dtype == HB_BF16) {
        for (; i < k; ++i) out[i] = bf16_to_float(read<uint16_t>(from + i * 2));
    } else {
#if defined(__F16C__)
        for (; i + 8 <= k; i += 8)
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i * 2))));
#endif
        for (; i < k; ++i) out[i] = fp16_to_float(read<uint16_t>(from + i * 2));
    }
    for (i = k; i < padded; ++i) out[i] = 0;
}

// The bits of the largest magnitude.
inline uint32_t largest(const float *x, int64_t k) {
    uint32_t most = 0;
    for (int64_t i = 0; i < k; ++i) {
        const uint32_t magnitude = as_bits(x[i]) & 0x7FFFFFFF;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

// A row of x as fp32, zeros up to `padded`. Returns the bits of its largest magnitude.
inline uint32_t widen(const HbCall &call, int64_t row, int64_t k, int64_t padded, float *out) {
    widen_row(call.x, row * call.x_stride, call.dtype, k, padded, out);
    return largest(out, k);
}

// Sums of products must not leave fp32's range where the result does not: rows whose largest value is outside
// [2^-40, 2^64] are scaled by a power of two, which their outputs get back.
inline void normalise(uint32_t most, int64_t k, float *x, float *factor, uint8_t *special) {
    *special = most >= 0x7F800000;
    *factor = 1;
    const int exponent = int(most >> 23) - 127;
    if (*special || most == 0 || (exponent >= -40 && exponent < 64)) return;
    const int by = exponent < -120 ? -120 : exponent > 120 ? 120 : exponent;
    *factor = as_float(uint32_t(by + 127) << 23);
    const float inverse = as_float(uint32_t(127 - by) << 23);
    for (int64_t i = 0; i < k; ++i) x[i] *= inverse;
}

// UNITS: [block of rows][unit][row][128 values, sums by lane].
inline void arrange_units(const Job &job, int64_t row, const float *x) {
    const int64_t start = row / Simd::MAX_M * Simd::MAX_M;
    const int rows = block_rows(job.call->m - start, Simd::MAX_M);
    const int sums = Simd::groups(Grouping(job.grouping));
    float *out = job.x + start * job.units * job.stride + (row - start) * job.stride;
    for (int u = 0; u < job.units; ++u, x += 128, out += rows * job.stride) {
        for (int i = 0; i < 128; ++i) out[i] = x[job.order[i]];
        if (job.stride == 128) continue;
        float *sum = out + 128;
        for (int i = 0; i < sums * Simd::LANES; ++i) sum[i] = 0;
        for (int v = 0; v < 128 / Simd::LANES; ++v) {
            float *mine = sum + Simd::group(Grouping(job.grouping), v) * Simd::LANES;
            for (int i = 0; i < Simd::LANES; ++i) mine[i] += out[v * Simd::LANES + i];
        }
    }
}

// COLUMNS: [block of rows][k][row], then the sums over each group of k, [group][row].
inline void arrange_columns(const Job &job, int64_t row, const float *x) {
    const HbWeight &w = *job.weight;
    const int64_t start = row / Simd::MAX_M * Simd::MAX_M, groups = w.k / w.blocksize;
    const int rows = block_rows(job.call->m - start, Simd::MAX_M);
    float *out = job.x + start * (w.k + groups) + (row - start), *sums = out + rows * w.k;
    for (int64_t i = 0; i < w.k; ++i) out[i * rows] = x[(i & ~7) + job.order[i & 7]];
    for (int64_t g = 0; g < groups; ++g) {
        float part[8] = {};
        for (int64_t i = g * w.blocksize; i < (g + 1) * w.blocksize; ++i) part[i & 7] += x[i];
        sums[g * rows] = ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
    }
}

// One row of x; rows from m on fill a block up and are zero. `scratch` holds units * 128 floats.
inline void prepare(const Job &job, int64_t row, float *scratch) {
    const int64_t k = job.weight->k, padded = ceil_div(k, 128) * 128;
    if (row < job.call->m) {
        const uint32_t most = widen(*job.call, row, k, padded, scratch);
        normalise(most, k, scratch, job.factor + row, job.special + row);
    } else {
        std::memset(scratch, 0, padded * 4);
    }
    if (job.path == UNITS) arrange_units(job, row, scratch);
    if (job.path == COLUMNS) arrange_columns(job, row, scratch);
    if (job.path == ROWS) std::memcpy(job.x + row * padded, scratch, padded * 4);
}

}  // namespace halfbyte::HB_ISA
