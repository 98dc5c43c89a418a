// Some rows of a 4-bit codebook weight as a dense fp16 matrix, each row scaled by a power of two, for a multiply of dense matrices.
//
// A block takes a row: it looks for the row's largest scale, with the first codes on their way, then decodes 8 weights a thread and
// turn, 4 bytes in and 16 out, side by side in a warp. The codebook is fp32, times the fp32 scale: a weight is rounded once, to
// fp16. A lane reads a copy of the codebook in its own bank of shared memory, so 32 look-ups take one turn.
//
// Macros: TERMS (codebook_prefill.cuh), THREADS, AHEAD (turns whose codes are on their way at once), BLOCK (weights that share a
// scale, a power of two), SCALE_KIND (codebook_scales.cuh), HIGH_FIRST (whether the first of a byte's weights is its high half).

#define X_TYPE 1
#define OVERLAP 0
#define SPLIT 1
#define SCALE_SIDE 1
#define STAGE_BLOCKS 1
#define SUBS 1
#define SCALE_PITCH 16

#include "codebook_types.cuh"
#include "codebook_prefill.cuh"
#include "codebook_shared.cuh"
#include "codebook_numbers.cuh"
#include "codebook_scales.cuh"

struct Table {
    float value[16];
    float top;      // the largest magnitude among them
};

DEVICE float scale_at(const Scales& s, u64 block, float offset, u32 map256) {
#if SCALE_KIND == 0
    return __ldg((const float*)s.values + block);
#else
    return scale_of(__ldg((const u8*)s.values + block), SCALE_KIND == 1 ? __ldg(s.outer + (block >> 8)) : 0.f, offset, map256);
#endif
}

// Weight i of a word, unscaled; `lane`: where, in bytes, this lane's copy of the codebook begins.
DEVICE float entry(const float* copies, u32 word, int i, u32 lane) {
    const int nibble = HIGH_FIRST ? i ^ 1 : i;
    const u32 place = nibble < 2 ? word << (7 - 4 * nibble) : word >> (4 * nibble - 7);    // 128 bytes an entry
    return *(const float*)((const u8*)copies + ((place & 0x780u) | lane));
}

extern "C" __global__ void __launch_bounds__(THREADS)
codebook_prefill(const __grid_constant__ Table table, const __grid_constant__ Scales s, const __grid_constant__ Problem p) {
    __shared__ float copies[16 * 32];
    __shared__ float map[SCALE_KIND == 1 ? 256 : 1];
    const u64 base = (u64)(p.first + blockIdx.x) * p.k, block0 = base / BLOCK;
    const u32 rest = (u32)(base % BLOCK), words = p.k / 8;
    const u32* const codes = (const u32*)p.codes + base / 8;
    uint4* const out = (uint4*)p.out + (u64)blockIdx.x * TERMS * words;

    auto load = [&](u32 first, u32 (&word)[AHEAD]) {
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            if (first + a * THREADS < words) word[a] = __ldg(codes + first + a * THREADS);
    };
    u32 word[AHEAD];
    load(threadIdx.x, word);
    for (int i = threadIdx.x; i < 512; i += THREADS) copies[i] = table.value[i / 32];
    float offset = 0.f;
    if (SCALE_KIND == 1) {
        for (int i = threadIdx.x; i < 256; i += THREADS) map[i] = __ldg(s.map + i);
        offset = __ldg(s.offset);
        __syncthreads();
    }
    const u32 map256 = shared_address(map), lane = threadIdx.x % 32 * 4;

    u32 top = 0;
    for (u32 b = threadIdx.x; b <= (rest + p.k - 1) / BLOCK; b += THREADS)
        top = max(top, __float_as_uint(scale_at(s, block0 + b, offset, map256)) & 0x7FFFFFFFu);
    const Fit fitted = fit(__float_as_uint(__uint_as_float(largest(top)) * table.top) & 0x7FFFFFFFu);
    if (threadIdx.x == 0) p.w_exponents[blockIdx.x] = fitted.exponent;

    for (u32 first = threadIdx.x; first < words; first += AHEAD * THREADS) {
        u32 next[AHEAD];
        load(first + AHEAD * THREADS, next);
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const u32 i = first + a * THREADS;
            if (i >= words) continue;
            const float scale = scale_at(s, block0 + (rest + 8 * i) / BLOCK, offset, map256) * fitted.scale;
            float w[8];
            u32 high[4];
#pragma unroll
            for (int j = 0; j < 8; ++j) w[j] = entry(copies, word[a], j, lane) * scale;
#pragma unroll
            for (int j = 0; j < 4; ++j) high[j] = pack_half2(w[2 * j], w[2 * j + 1]);
            out[i] = make_uint4(high[0], high[1], high[2], high[3]);
#if TERMS == 2
            u32 low[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                low[j] = pack_half2(w[2 * j] - half_to_float(high[j]), w[2 * j + 1] - half_to_float(high[j] >> 16));
            out[words + i] = make_uint4(low[0], low[1], low[2], low[3]);
#endif
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) word[a] = next[a];
    }
}
