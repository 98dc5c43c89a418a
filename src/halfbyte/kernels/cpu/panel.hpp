// UNITS: one task, a panel of rows of the weight times all rows of x.
#pragma once
#include "units.hpp"

namespace halfbyte::HB_ISA {

constexpr int64_t X_TILE = 24 << 10;  // bytes of x that stay in the first-level cache while a panel's rows pass
constexpr int64_t AHEAD = 6 << 10;    // bytes, at least, from a read to its prefetch
constexpr int64_t STAGED = 256;       // bytes for a copy of a row's last unit

HB_INLINE int64_t scale_stride(const Job &job) { return job.units * (128 / job.block) + 8; }

// Scratch of a task: by row the scales, offsets, a staged last unit and the sums.
HB_INLINE int64_t panel_floats(const Job &job) {
    const int64_t offsets = job.weight->offset_kind == HB_NO_OFFSET ? 1 : 2;
    return job.panel * (scale_stride(job) * offsets + STAGED / 4 + Simd::MAX_M * Simd::LANES) + 64;
}

struct Panel {
    const Job &job;
    SpanFn (*const span_of_call)(const HbWeight &, int, int);  // span_for, or another path's
    int64_t first, count, rounded;  // rows; `rounded` repeats the last one up to whole sets of rows
    float *scales, *offsets, *sums;
    uint8_t *staged;
    Row rows[64];
    int staged_from;                // rows from here on have their last unit staged
    int64_t next;                   // the panel that this thread computes after this one, or -1

    Panel(const Job &job, int64_t task, float *scratch, SpanFn (*span_of_call)(const HbWeight &, int, int),
          int64_t next = -1)
        : job(job), span_of_call(span_of_call), first(task * job.panel), next(next) {
        count = smaller(job.panel, job.weight->n - first);
        rounded = ceil_div(count, 4) * 4;
        const bool has_offset = job.weight->offset_kind != HB_NO_OFFSET;
        scales = scratch;
        offsets = scales + job.panel * scale_stride(job);
        sums = offsets + (has_offset ? job.panel * scale_stride(job) : 0);
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
        staged_from = int(rounded);
        for (int64_t r = 0; r < rounded; ++r) {
            const int64_t row = first + smaller(r, count - 1);
            const int64_t at = row * w.k / w.elements * w.record_bytes + w.record_start;
            rows[r] = {bytes(w.codes) + at, scales + r * scale_stride(job), offsets + r * scale_stride(job)};
            if (last_unit < 0 || at + last_unit + unit_bytes() <= total) continue;
            uint8_t *copy = staged + r * STAGED;
            std::memset(copy, 0, STAGED);
            const int64_t row_bytes = w.k / w.elements * w.record_bytes - w.record_start;
            std::memcpy(copy, rows[r].codes + last_unit, row_bytes - last_unit);
            staged_from = int(smaller(staged_from, r));
        }
    }

    // The weight's row at place r of the panel, or, past its end, of the one that comes next.
    int64_t row_after(int64_t r) const {
        return next < 0 || r < job.panel ? first + r : next * job.panel + r - job.panel;
    }

    void read_scales_of(int64_t r, int64_t set) {
        const int64_t stride = scale_stride(job);
        prefetch_scales(row_after(r + 2 * set), set);
        for (int64_t i = r; i < r + set; ++i) {
            float *scale = scales + i * stride, *offset = offsets + i * stride;
            const int64_t row = first + smaller(i, count - 1);
            const int64_t read = read_row_scales(*job.weight, row, job.block, scale, offset);
            for (int64_t j = read; j < stride; ++j) scale[j] = 0;
            if (job.weight->offset_kind == HB_NO_OFFSET) continue;
            for (int64_t j = read; j < stride; ++j) offset[j] = 0;
        }
    }

    // Scales in a tensor of their own are a stream that the codes' prefetching does not see.
    void prefetch_scales(int64_t row, int64_t rows) const {
        const HbWeight &w = *job.weight;
        if (!w.scales) return;
        const int64_t size = w.scale_kind == HB_ABSMAX ? 4 : 1;
        const uint8_t *from = bytes(w.scales) + row * w.k / w.blocksize * size;
        for (int64_t i = 0; i < rows * w.k / w.blocksize * size; i += 64) Simd::prefetch(from + i);
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

    void finish(int64_t start, int rows_of_x, float *sums) {
        const HbCall &call = *job.call;
        for (int64_t r = 0; r < count; ++r) {
            const int64_t row = first + r;
            for (int m = 0; m < rows_of_x && start + m < call.m; ++m) {
                const float y = Simd::sum(Simd::load(sums + (r * rows_of_x + m) * Simd::LANES));
                store_float(call.out, (start + m) * call.out_stride + row,
                            y / job.divisor * job.factor[start + m] + bias_at(call, start + m, row), call.dtype);
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
        const int64_t row_bytes = w.k / w.elements * w.record_bytes, ahead = ceil_div(AHEAD, set * row_bytes) * set;
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
