// The library's functions: choose an instruction set, plan a call, share it among threads.
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "job.hpp"
#include "threads.hpp"
#if defined(HB_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace halfbyte;

namespace {

#if defined(HB_AMX)
// The processor has bf16 tiles, and Linux lets this process use their registers (asked for once a process).
bool amx_available() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(d & (1u << 22)) || !(d & (1u << 24))) return false;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}
#endif

bool available(const Isa &isa) {
#if defined(HB_AMX)
    if (&isa == &amx_isa) return available(avx512_isa) && amx_available();
#endif
#if defined(HB_X86)
    if (&isa == &avx2_isa)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (&isa == &avx512_isa)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
#if defined(HB_VNNI)
    if (&isa == &avx512vnni_isa) return available(avx512_isa) && __builtin_cpu_supports("avx512vnni");
#endif
#if defined(HB_NEON)
    if (&isa == &neon_isa) return true;  // every aarch64 processor has it
#endif
    return &isa == &portable_isa;
}

// In the order of choice.
const Isa *const isas[] = {
#if defined(HB_X86)
    &avx512_isa, &avx2_isa,
#endif
#if defined(HB_NEON)
    &neon_isa,
#endif
    &portable_isa,
    // Taken only where asked for:
#if defined(HB_VNNI)
    &avx512vnni_isa,  // rounds x: within the contract by its norms, but an output beside a large x may lose digits
#endif
#if defined(HB_AMX)
    &amx_isa,  // slower for one row of x than AVX-512, faster from five on, and one of them must serve all
#endif
};
constexpr int COUNT = sizeof isas / sizeof isas[0];

constexpr int64_t ALONE = 300000;  // weights (a row of x more costs an eighth) below which waking threads does not pay

struct Call {
    const Isa *isa;
    Job job;
};

void prepare_row(void *context, int64_t row, int64_t) {
    const auto &call = *static_cast<Call *>(context);
    const int64_t floats = (call.job.weight->k + 127) / 128 * 128;
    call.isa->prepare(call.job, row, thread_floats(1, 2 * floats));
}

void run_task(void *context, int64_t task, int64_t next) {
    const auto &call = *static_cast<Call *>(context);
    call.isa->run(call.job, task, next, thread_floats(1, call.job.scratch_floats));
}

}  // namespace

#define HB_EXPORT extern "C" __attribute__((visibility("default")))

// Raised whenever a struct of abi.hpp changes.
HB_EXPORT int32_t hb_abi_version() { return 2; }

HB_EXPORT int32_t hb_struct_bytes(int32_t which) {
    constexpr int32_t sizes[] = {sizeof(HbWeight), sizeof(HbCall), sizeof(HbShrink), sizeof(HbExpand)};
    return sizes[which];
}

// The OpenMP runtime to run on, and what was set; null for threads of our own.
HB_EXPORT void hb_set_gomp(void *gomp_parallel) { set_gomp(gomp_parallel); }
HB_EXPORT void *hb_get_gomp() { return get_gomp(); }

// Number of instruction sets compiled in; their names, in the order of choice; whether this processor has them.
HB_EXPORT int32_t hb_isa_count() { return COUNT; }
HB_EXPORT const char *hb_isa_name(int32_t isa) { return isas[isa]->name; }
HB_EXPORT int32_t hb_isa_available(int32_t isa) { return available(*isas[isa]); }

// 0, or 1 where memory ran out. The caller has validated everything that the structs say.
HB_EXPORT int32_t hb_linear(int32_t isa, const HbWeight *weight, const HbCall *call) {
    try {
        Call context{isas[isa], {}};
        Job &job = context.job;
        job.weight = weight;
        job.call = call;
        context.isa->plan(job);
        const int64_t m = call->m, padded_m = m + 8;
        job.x = thread_floats(0, job.x_floats + padded_m * 2);
        job.factor = job.x + job.x_floats;
        job.special = reinterpret_cast<uint8_t *>(job.factor + padded_m);
        const int threads = weight->n * weight->k / 8 * (m + 7) < ALONE ? 1 : call->threads;
        parallel(m > 8 ? threads : 1, job.x_rows, prepare_row, &context);
        parallel(threads, job.tasks, run_task, &context);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

namespace {
struct Decode {
    const Isa *isa;
    const HbWeight *weight;
    void *out;
    int64_t row, rows, stride, step;
    bool split;
};

void decode_task(void *context, int64_t task, int64_t) {
    const auto &d = *static_cast<Decode *>(context);
    const int64_t from = task * d.step, rows = d.rows - from < d.step ? d.rows - from : d.step;
    auto *out = static_cast<char *>(d.out) + from * d.stride * (d.split ? 2 : 4);
    d.isa->decode(*d.weight, d.row + from, rows, out, d.stride, d.split,
                  thread_floats(1, d.isa->decode_floats(*d.weight, rows)));
}
}  // namespace

// True values of rows [row, row + rows): fp32 [rows, k], or, with split, bf16 [rows, 2k]: a first term and the rest.
// `stride` in elements of out.
HB_EXPORT int32_t hb_decode(int32_t isa, const HbWeight *weight, int64_t row, int64_t rows, void *out, int64_t stride,
                            int32_t split, int32_t threads) {
    try {
        Decode context{isas[isa], weight, out, row, rows, stride, 16, split != 0};
        parallel(threads, (rows + context.step - 1) / context.step, decode_task, &context);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

namespace {
constexpr int64_t SHRINK_ROWS = 64, SHRINK_STEP = 4;  // rows of x a block; rows of A a task

// The rows of x by slot. A slot out of range is the caller's mistake: hb_shrink and hb_expand return 2.
struct Order {
    std::vector<int64_t> rows;
    std::vector<Segment> segments;
    bool valid = true;

    Order(const int32_t *index, int64_t m, int64_t slots) {
        for (int64_t i = 0; i < m; ++i) {
            const int32_t slot = index ? index[i] : 0;
            valid &= slot >= -1 && slot < slots;
            if (slot >= 0) rows.push_back(i);
        }
        if (!valid) return;
        if (index)
            std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return index[a] < index[b]; });
        for (int64_t at = 0; at < int64_t(rows.size()); ++at) {
            const int32_t slot = index ? index[rows[at]] : 0;
            if (segments.empty() || segments.back().slot != slot) segments.push_back({slot, at, at});
            segments.back().end = at + 1;
        }
    }
};

struct ShrinkTask {
    int64_t segment, from, to;
};

struct Shrinking {
    const Isa *isa;
    Adapters job;
    const ShrinkTask *tasks;
};

void widen_task(void *context, int64_t i, int64_t) {
    const auto &c = *static_cast<Shrinking *>(context);
    const int64_t row = c.job.rows[c.job.first + i];
    c.job.factor[i] = c.isa->widen(*c.job.shrink, row, c.job.padded, c.job.x + i * c.job.padded);
}

void shrink_task(void *context, int64_t i, int64_t) {
    const auto &c = *static_cast<Shrinking *>(context);
    const ShrinkTask &task = c.tasks[i];
    c.isa->shrink(c.job, task.segment, task.from, task.to, thread_floats(1, c.job.padded));
}

struct Expanding {
    const Isa *isa;
    Adapters job;
    int64_t floats;
};

void expand_task(void *context, int64_t i, int64_t) {
    const auto &c = *static_cast<Expanding *>(context);
    c.isa->expand(c.job, i, thread_floats(1, c.floats));
}

int threads_for(int64_t work, int threads) { return work < ALONE ? 1 : threads; }
}  // namespace

// 0; 1 where memory ran out; 2 where the index names a slot that does not exist, 3 where a slot that is used does not lie
// within the tensors.
HB_EXPORT int32_t hb_shrink(int32_t isa, const HbShrink *call) {
    try {
        const HbShrink &s = *call;
        const Order order(s.index, s.m, s.slots);
        if (!order.valid) return 2;
        for (const Segment &each : order.segments) {
            const int64_t row = s.spans[2 * each.slot], rows = s.spans[2 * each.slot + 1];
            if (row < 0 || rows < 0 || rows > s.width || row + rows > s.rows_of_a) return 3;
        }
        std::memset(s.h, 0, s.m * s.width * 4);
        const int64_t padded = (s.k + 63) / 64 * 64, places = order.rows.size();
        for (int64_t first = 0; first < places; first += SHRINK_ROWS) {
            const int64_t end = std::min(places, first + SHRINK_ROWS);
            std::vector<Segment> segments;
            std::vector<ShrinkTask> tasks;
            int64_t work = 0;
            for (const Segment &each : order.segments) {
                const Segment cut{each.slot, std::max(each.begin, first), std::min(each.end, end)};
                if (cut.begin >= cut.end) continue;
                const int64_t rows = s.spans[2 * each.slot + 1];
                for (int64_t j = 0; j < rows; j += SHRINK_STEP)
                    tasks.push_back({int64_t(segments.size()), j, std::min(rows, j + SHRINK_STEP)});
                work += rows * s.k * (cut.end - cut.begin + 1);
                segments.push_back(cut);
            }
            float *x = thread_floats(0, (end - first) * (padded + 1));
            Adapters job{call, nullptr, order.rows.data(), segments.data(), int64_t(segments.size()),
                         x, x + (end - first) * padded, first, padded};
            Shrinking context{isas[isa], job, tasks.data()};
            const int threads = threads_for(work, s.threads);
            parallel(threads, end - first, widen_task, &context);
            parallel(threads, tasks.size(), shrink_task, &context);
        }
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

// As hb_shrink.
HB_EXPORT int32_t hb_expand(int32_t isa, const HbExpand *call) {
    try {
        const HbExpand &e = *call;
        const Order order(e.index, e.m, e.slots);
        if (!order.valid) return 2;
        int64_t most = 0, work = e.m * e.n;
        for (const Segment &each : order.segments) {
            const int32_t *entry = e.table + 4 * each.slot;
            const int64_t column = entry[0], rank = entry[1], first = entry[2], stride = entry[3];
            if (column < 0 || rank < 0 || first < 0 || stride < rank || column + rank > e.width ||
                (first + stride) * e.n > e.elements_of_b)
                return 3;
            most = std::max(most, rank + stride);
            work += e.n * rank * (each.end - each.begin + 8);
        }
        const int64_t count = order.segments.size();
        Adapters job{nullptr, call, order.rows.data(), order.segments.data(), count, nullptr, nullptr, 0, 0};
        Expanding context{isas[isa], job, (most + 1) * EXPAND_COLUMNS};
        parallel(threads_for(work, e.threads), (e.n + EXPAND_COLUMNS - 1) / EXPAND_COLUMNS, expand_task, &context);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}
