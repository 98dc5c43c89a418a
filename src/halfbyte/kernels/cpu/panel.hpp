// UNITS: one task, a panel of rows of the weight times all rows of x.
#pragma once
#include "units.hpp"

namespace halfbyte::HB_ISA {

constexpr int64_t X_TILE = 24 << 10;  // bytes of x that stay in the first-level cache while a panel's rows pass
constexpr int64_t AHEAD = 6 << 10;    // bytes, at least, from a read to its prefetch
constexpr int64_t STAGED = 256;       // bytes for a copy of a row's last unit

// Floats from a row's scales to the next row's: units read eight at a time.
HB_INLINE int64_t scale_stride(const Job &job) { return ceil_div(job.units * (128 / job.block) + 8, 16) * 16; }

// Scratch of a task: by row the scales, offsets, a staged last unit and the sums.
HB_INLINE int64_t panel_floats(const Job &job) {
    const int64_t offsets = job.weight->offset_kind == HB_NO_OFFSET ? 1 : 2;
    return job.panel * (scale_stride(job) * offsets + STAGED / 4 + Simd::MAX_M * Simd::LANES) + 64;
}

// Simd::sum of four vectors, `stride` floats apart: the same additions.
HB_INLINE void sum4(const float *from, int64_t stride, float *out) {
#if defined(__AVX512F__)
    __m128 four[4];
    for (int i = 0; i < 4; ++i) {
        const __m256 half = _mm256_add_ps(_mm256_loadu_ps(from + i * stride), _mm256_loadu_ps(from + i * stride + 8));
        four[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    _MM_TRANSPOSE4_PS(four[0], four[1], four[2], four[3]);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(four[0], four[2]), _mm_add_ps(four[1], four[3])));
#else
    for (int i = 0; i < 4; ++i) out[i] = Simd::sum(Simd::load(from + i * stride));
#endif
}

struct Panel {
    const Job &job;
    SpanFn (*const span_of_call)(const HbWeight &, int, int);  // span_for, or another path's
    int64_t first, count, rounded;  // rows; `rounded` repeats the last one up to whole sets of rows
    const int64_t stride;           // of scales, between rows
    float *scales, *offsets, *sums;
    uint8_t *staged;
    Row rows[64];
    int staged_from;                // rows from here on have their last unit staged
    int64_t next;                   // the panel that this thread computes after this one, or -1

    Panel(const Job &job, int64_t task, float *scratch, SpanFn (*span_of_call)(const HbWeight &, int, int),
          int64_t next = -1)
        : job(job), span_of_call(span_of_call), first(task * job.panel), stride(scale_stride(job)), next(next) {
        count = smaller(job.panel, job.weight->n - first);
        rounded = ceil_div(count, 4) * 4;
        const bool has_offset = job.weight->offset_kind != HB_NO_OFFSET;
        scales = scratch;
        offsets = scales + job.panel * stride;
        sums = offsets + (has_offset ? job.panel * stride : 0);
        staged = reinterpret_cast<uint8_t *>(sums + job.panel * Simd::MAX_M * Simd::LANES);
        locate();
    }

    // Bytes from a unit's first that loading it touches.
    int64_t unit_bytes() const {
        return loader_of(*job.weight) == QUARTERS ? 3 * job.weight->record_bytes + 16 : 64;
    }

    void locate() {
        const HbWeight &w = *job.weight;
        const int64_t total = ceil_div(w.n * w.k, w.elements) * w.record_bytes;
        const int64_t last_unit = w.k % 128 ? (job.units - 1) * 128 / w.elements * w.record_bytes : -1;
        const int64_t safe = last_unit < 0 ? total : total - last_unit - unit_bytes();  // the last row to be read as it is
        staged_from = int(rounded);
        for (int64_t r = 0; r < rounded; ++r) {
            const int64_t row = first + smaller(r, count - 1), at = row * job.row_bytes + w.record_start;
            rows[r] = {bytes(w.codes) + at, scales + r * stride, offsets + r * stride};
            if (at <= safe) continue;
            uint8_t *copy = staged + r * STAGED;
            std::memset(copy, 0, STAGED);
            std::memcpy(copy, rows[r].codes + last_unit, job.row_bytes - w.record_start - last_unit);
            staged_from = int(smaller(staged_from, r));
        }
    }

    // The weight's row at place r of the panel, or, past its end, of the one that comes next.
    int64_t row_after(int64_t r) const {
        return next < 0 || r < job.panel ? first + r : next * job.panel + r - job.panel;
    }

    void read_scales_of(int64_t r, int64_t set) {
        prefetch_scales(row_after(r + 2 * set), set);
        const HbWeight &w = *job.weight;
        const bool as_they_are = w.scale_kind == HB_ABSMAX && job.row_blocks && job.block == w.blocksize;
        for (int64_t i = r; i < r + set; ++i) {
            float *scale = scales + i * stride, *offset = offsets + i * stride;
            const int64_t row = first + smaller(i, count - 1);
            if (as_they_are) {
                copy_padded(bytes(w.scales) + row * job.row_blocks * 4, job.row_blocks, stride, scale);
                continue;
            }
            const int64_t read = read_row_scales(*job.weight, row, job.row_blocks, job.block, scale, offset);
            for (int64_t j = read; j < stride; ++j) scale[j] = 0;
            if (job.weight->offset_kind == HB_NO_OFFSET) continue;
            for (int64_t j = read; j < stride; ++j) offset[j] = 0;
        }
    }

    // Scales in a tensor of their own are a stream that the codes' prefetching does not see.
    void prefetch_scales(int64_t row, int64_t rows) const {
        const HbWeight &w = *job.weight;
        if (!w.scales || !job.row_blocks) return;
        const int64_t size = w.scale_kind == HB_ABSMAX ? 4 : 1;
        const int64_t row_size = job.row_blocks * size;
        const uint8_t *from = bytes(w.scales) + row * row_size;
        for (int64_t i = 0; i < rows * row_size; i += 64) Simd::prefetch(from + i);
    }

    // Units [begin, end) of one set of rows; the last unit from its copy where reading on would leave the codes.
    void run_set(SpanFn span, const Units &units, int64_t r, int set, int64_t begin, int64_t end, float *sums) {
        if (r + set <= staged_from || end < job.units) return span(rows + r, units, begin, end, sums);
        if (end - 1 > begin) span(rows + r, units, begin, end - 1, sums);
        Row last[4];
        const HbWeight &w = *job.weight;
        const int64_t shift = (job.units - 1) * 128 / w.elements * w.record_bytes;
        for (int i = 0; i < set; ++i) {
            last[i] = rows[r + i];
            if (r + i >= staged_from) last[i].codes = staged + (r + i) * STAGED - shift;
        }
        span(last, units, end - 1, end, sums);
    }

    // Four rows of the weight at a time.
    void finish(int64_t start, int rows_of_x, float *sums) {
        const HbCall &call = *job.call;
        for (int64_t m = start; m < start + rows_of_x && m < call.m; ++m) {
            const float *from = sums + (m - start) * Simd::LANES;
            const float factor = job.factor[m];
            for (int64_t r = 0; r < count; r += 4, from += 4 * rows_of_x * Simd::LANES) {
                float y[4];
                sum4(from, rows_of_x * Simd::LANES, y);
                const int64_t row = first + r, used = smaller(4, count - r);
                for (int i = 0; i < 4; ++i) y[i] = y[i] / job.divisor * factor;
                for (int i = 0; i < used; ++i) y[i] += bias_at(call, m, row + i);
                for (int i = 0; i < used; ++i) store_float(call.out, m * call.out_stride + row + i, y[i], call.dtype);
            }
        }
    }

    void block(int64_t start, Units &units) {
        const HbWeight &w = *job.weight;
        const int m = block_rows(job.call->m - start, Simd::MAX_M), set = Simd::rows(m);
        const SpanFn span = span_of_call(w, job.grouping, m);
        const int64_t fit = m == 1 ? job.units : larger(2, X_TILE / 4 / (m * job.stride));
        const int64_t tile = fit / 2 * 2 + (fit & 1 && m == 1);
        units.x = job.x + start * job.units * job.stride;
        // the same place in the next set of rows, or further where rows are short: these lines come next but one
        const int64_t row_bytes = job.row_bytes, ahead = ceil_div(AHEAD, set * row_bytes) * set;
        std::memset(sums, 0, rounded * m * Simd::LANES * 4);
        for (int64_t begin = 0; begin < job.units; begin += tile)
            for (int64_t r = 0; r < rounded; r += set) {
                if (start == 0 && begin == 0) read_scales_of(r, set);
                const int64_t end = smaller(begin + tile, job.units);
                units.ahead = ((tile < job.units ? first + r + ahead : row_after(r + ahead)) - first - r) * row_bytes;
                run_set(span, units, r, set, begin, end, sums + r * m * Simd::LANES);
            }
        finish(start, m, sums);
    }

    void run() {
        Units units;
        units.record_bytes = job.weight->record_bytes;
        units.scales = 128 / job.block;
        units.table = Simd::table(job.table);
        for (int g = 0; g < 4; ++g) units.picks[g] = Simd::index(job.picks[g]);
        for (int64_t start = 0; start < job.call->m; start += Simd::MAX_M) block(start, units);
    }
};

}  // namespace halfbyte::HB_ISA
