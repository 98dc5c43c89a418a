// Rows of x as fp16, each scaled by a power of two: bf16 goes there without loss but for what lies 2^31 below its row's largest. fp16 is
// copied as it is. A block takes a row.
//
// Macros: TERMS (codebook_prefill.cuh), THREADS, X_TYPE (0 for fp16, 1 for bf16).

#define OVERLAP 0
#define SPLIT 1

#include "codebook_types.cuh"
#include "codebook_prefill.cuh"
#include "codebook_shared.cuh"
#include "codebook_numbers.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) codebook_prefill_x(const __grid_constant__ Problem p) {
    const uint4* const x = (const uint4*)((const u16*)p.x + blockIdx.x * p.x_stride);
    uint4* const out = (uint4*)p.out + (u64)blockIdx.x * (TERMS * p.k / 8);
    const int words = p.k / 8;
    Fit fitted = {1.f, 0};
#if X_TYPE == 1
    u32 top = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < words; i += THREADS) {
        const uint4 raw = __ldg(x + i);
        top = magnitude(magnitude(magnitude(magnitude(top, raw.x), raw.y), raw.z), raw.w);
    }
    fitted = fit(largest(top));
#endif
    if (threadIdx.x == 0) p.x_exponents[blockIdx.x] = fitted.exponent;
#pragma unroll 4
    for (int i = threadIdx.x; i < words; i += THREADS) {
        uint4 raw = __ldg(x + i);
#if X_TYPE == 1
        raw = make_uint4(fitted_bf16x2(raw.x, fitted.scale), fitted_bf16x2(raw.y, fitted.scale),
                         fitted_bf16x2(raw.z, fitted.scale), fitted_bf16x2(raw.w, fitted.scale));
#endif
#pragma unroll
        for (int term = 0; term < TERMS; ++term) out[term * words + i] = raw;
    }
}
