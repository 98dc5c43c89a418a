// The end of a multiply: fp32 sums of a chunk's rows and a slab's columns [m, rows], rows apart by x_stride, times the powers of two
// that their fp16 matrices were divided by, plus bias; one rounding.
//
// Macros: THREADS, X_TYPE (of the output: 0 for fp16, 1 for bf16), WIDE (columns that a thread takes: 8 where outputs lie at multiples
// of 16 bytes, else 1).

#define OVERLAP 0
#define SPLIT 1
#define TERMS 1

#include "codebook_types.cuh"
#include "codebook_prefill.cuh"
#include "codebook_shared.cuh"
#include "codebook_numbers.cuh"

DEVICE u32 rounded(float value) {
    u16 bits;
#if X_TYPE == 1
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}

DEVICE float bias_at(const Problem& p, long long at) {
    if (p.bias_is_fp32) return __ldg((const float*)p.bias + at);
    const u32 bits = __ldg((const u16*)p.bias + at);
    return X_TYPE == 1 ? __uint_as_float(bits << 16) : half_to_float(bits);
}

extern "C" __global__ void __launch_bounds__(THREADS) codebook_prefill_y(const __grid_constant__ Problem p) {
    const int groups = p.rows / WIDE, count = p.m * groups;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) {
        const int row = i / groups, column = i % groups * WIDE;
        const float* const sums = (const float*)p.x + row * p.x_stride + column;
        u16* const out = (u16*)p.out + (u64)row * p.n + p.first + column;
        const int x_exponent = __ldg(p.x_exponents + row);
        float sum[WIDE];
        int exponent[WIDE];
#if WIDE == 8
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float4 four = __ldcs((const float4*)sums + j);
            sum[4 * j] = four.x, sum[4 * j + 1] = four.y, sum[4 * j + 2] = four.z, sum[4 * j + 3] = four.w;
            const int4 those = __ldg((const int4*)(p.w_exponents + column) + j);
            exponent[4 * j] = those.x, exponent[4 * j + 1] = those.y, exponent[4 * j + 2] = those.z, exponent[4 * j + 3] = those.w;
        }
#else
        sum[0] = __ldcs(sums), exponent[0] = __ldg(p.w_exponents + column);
#endif
        u32 bits[WIDE];
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            const float value = times_power(sum[j], x_exponent + exponent[j]);
            bits[j] = rounded(p.bias ? value + bias_at(p, row * p.bias_stride + p.first + column + j) : value);
        }
#if WIDE == 8
        *(uint4*)out = make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16, bits[6] | bits[7] << 16);
#else
        *out = bits[0];
#endif
    }
}
