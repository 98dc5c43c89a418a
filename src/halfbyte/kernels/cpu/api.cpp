// The library's functions: choose an instruction set, plan a call, share it among threads.
#include <cstring>
#include <new>

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
#if defined(HB_AMX)
    &amx_isa,  // last: taken only where asked for, as one row of x takes twice as long as on AVX-512
#endif
};
constexpr int COUNT = sizeof isas / sizeof isas[0];

constexpr int64_t ALONE = 300000;  // weights (a row of x more costs an eighth) below which waking threads does not pay

struct Call {
    const Isa *isa;
    Job job;
};

void prepare_row(void *context, int64_t row) {
    const auto &call = *static_cast<Call *>(context);
    const int64_t floats = (call.job.weight->k + 127) / 128 * 128;
    call.isa->prepare(call.job, row, thread_floats(1, floats));
}

void run_task(void *context, int64_t task) {
    const auto &call = *static_cast<Call *>(context);
    call.isa->run(call.job, task, thread_floats(1, call.job.scratch_floats));
}

}  // namespace

#define HB_EXPORT extern "C" __attribute__((visibility("default")))

// Raised whenever a struct of abi.hpp changes.
HB_EXPORT int32_t hb_abi_version() { return 1; }

HB_EXPORT int32_t hb_struct_bytes(int32_t which) { return which ? sizeof(HbCall) : sizeof(HbWeight); }

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

void decode_task(void *context, int64_t task) {
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
