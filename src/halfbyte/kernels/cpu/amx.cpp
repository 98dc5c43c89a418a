// AVX-512 with AMX: bf16 activations on tiles, all else as on AVX-512.
#define HB_ISA amx
#include "simd_avx512.hpp"
#include "tiles.hpp"

namespace halfbyte {
namespace {

void plan(Job &job) {
    avx512_isa.plan(job);
    HB_ISA::plan_tiles(job);
}

void prepare(const Job &job, int64_t row, float *scratch) {
    if (job.path == TILES)
        HB_ISA::prepare_tiles(job, row, scratch);
    else
        avx512_isa.prepare(job, row, scratch);
}

void run(const Job &job, int64_t task, int64_t next, float *scratch) {
    if (job.path == TILES)
        HB_ISA::run_tiles(job, task, next, scratch);
    else
        avx512_isa.run(job, task, next, scratch);
}

void decode(const HbWeight &weight, int64_t row, int64_t rows, void *out, int64_t stride, bool split, float *scratch) {
    avx512_isa.decode(weight, row, rows, out, stride, split, scratch);
}

int64_t decode_floats(const HbWeight &weight, int64_t rows) { return avx512_isa.decode_floats(weight, rows); }

void shrink(const Adapters &job, int64_t segment, int64_t from, int64_t to, float *scratch) {
    avx512_isa.shrink(job, segment, from, to, scratch);
}

void expand(const Adapters &job, int64_t task, float *scratch) { avx512_isa.expand(job, task, scratch); }

float widen(const HbShrink &call, int64_t row, int64_t padded, float *out) {
    return avx512_isa.widen(call, row, padded, out);
}

}  // namespace

const Isa amx_isa = {"amx", plan, prepare, run, decode, decode_floats, shrink, expand, widen};

}  // namespace halfbyte
