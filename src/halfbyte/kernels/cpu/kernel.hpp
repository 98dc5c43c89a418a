// An instruction set's kernels behind the functions of Isa: include after its simd_*.hpp, with HB_ISA defined.
#pragma once
#include "adapters.hpp"
#include "columns.hpp"
#include "panel.hpp"
#include "prepare.hpp"

namespace halfbyte::HB_ISA {

// Tasks small enough that threads share the work evenly, large enough that taking one costs nothing.
inline void plan(Job &job) {
    const HbWeight &w = *job.weight;
    const int64_t m = job.call->m, blocks_end = (m - 1) / Simd::MAX_M * Simd::MAX_M;
    const int64_t rows = blocks_end + block_rows(m - blocks_end, Simd::MAX_M), padded = ceil_div(w.k, 128) * 128;
    job.x_rows = rows;
    job.divisor = 1;
    std::memcpy(job.table, w.codebook, sizeof job.table);
    if (w.layout != HB_RECORDS) {
        job.path = COLUMNS;
        for (int i = 0; i < 8; ++i) job.order[w.layout == HB_WORDS_K ? w.order[i] : i] = i;
        job.panel = STRIP;
        job.x_floats = rows * (w.k + w.k / w.blocksize);
        job.scratch_floats = larger(2 * STRIP * (w.k / w.blocksize), padded);
    } else {
        const int64_t share = ceil_div(w.n, 8 * larger(1, job.call->threads));
        job.panel = larger(4, smaller(32, share / 4 * 4));
        if (plan_units(job)) {
            job.x_floats = rows * job.units * job.stride;
            job.scratch_floats = larger(panel_floats(job), padded);
        } else {
            job.path = ROWS;
            job.x_floats = rows * padded;
            job.scratch_floats = padded + decode_rows_floats(w, 1);
        }
    }
    // rows of x that hold infinities are multiplied with decoded rows of the weight
    if (w.offset_kind != HB_NO_OFFSET) job.scratch_floats += padded + decode_rows_floats(w, 1);
    job.tasks = ceil_div(w.n, job.panel);
}

inline void run_rows(const Job &job, int64_t task, float *scratch) {
    const HbWeight &w = *job.weight;
    const HbCall &call = *job.call;
    const int64_t padded = ceil_div(w.k, 128) * 128, end = smaller(w.n, (task + 1) * job.panel);
    for (int64_t i = w.k; i < padded; ++i) scratch[i] = 0;
    for (int64_t n = task * job.panel; n < end; ++n) {
        decode_rows(w, n, 1, scratch, padded, scratch + padded);
        for (int64_t m = 0; m < call.m; ++m)
            store_float(call.out, m * call.out_stride + n,
                        dot(scratch, job.x + m * padded, padded) * job.factor[m] + bias_at(call, m, n), call.dtype);
    }
}

// Where x holds an infinity, scale * code and offset must meet before x does: 0 * inf is NaN, offset * inf is not.
inline void run_special(const Job &job, int64_t task, float *scratch) {
    const HbWeight &w = *job.weight;
    const HbCall &call = *job.call;
    bool any = false;
    for (int64_t m = 0; m < call.m; ++m) any |= job.special[m] != 0;
    if (!any) return;
    const int64_t end = smaller(w.n, (task + 1) * job.panel);
    for (int64_t n = task * job.panel; n < end; ++n) {
        decode_rows(w, n, 1, scratch, w.k, scratch + w.k);
        for (int64_t m = 0; m < call.m; ++m) {
            if (!job.special[m]) continue;
            float y = 0;
            for (int64_t k = 0; k < w.k; ++k) y += scratch[k] * load_float(call.x, m * call.x_stride + k, call.dtype);
            store_float(call.out, m * call.out_stride + n, y + bias_at(call, m, n), call.dtype);
        }
    }
}

inline void run(const Job &job, int64_t task, int64_t next, float *scratch) {
    if (job.path == UNITS) Panel(job, task, scratch, span_for, next).run();
    if (job.path == COLUMNS) run_strip(job, task, scratch);
    if (job.path == ROWS) run_rows(job, task, scratch);
    if (job.weight->offset_kind != HB_NO_OFFSET && job.path != ROWS) run_special(job, task, scratch);
}

}  // namespace halfbyte::HB_ISA

#define HB_DEFINE_ISA(isa)                                                                                        \
    namespace halfbyte {                                                                                          \
    const Isa isa##_isa = {#isa,           HB_ISA::plan,          HB_ISA::prepare,     HB_ISA::run,               \
                           HB_ISA::decode, HB_ISA::decode_floats, HB_ISA::shrink_task, HB_ISA::expand_task,       \
                           HB_ISA::widen_for_shrink};                                                             \
    }
