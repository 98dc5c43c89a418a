// What every rung of the ladder shares: the format, half precision without a header, and the sum of a row.
//
// Planar Q4: 32 weights of a row make a block. Its codes are 16 bytes, two weights a byte, the first one in the low
// four bits; its scale is one fp16 number. Codes and scales lie in arrays of their own, rows in order:
//
//   weight k of the block = scale * (code k - 8)        codes [N, K / 2] uint8, scales [N, K / 32] fp16
//
// Macro: WARPS, the warps of a block of threads.
#pragma once

typedef unsigned char byte;
typedef unsigned short half_bits;  // an fp16 number as it lies in memory

#define BLOCK 32        // weights that share a scale
#define CODE_BYTES 16   // bytes of their codes
#define ZERO 8          // the code of a weight of 0
#define THREADS (32 * WARPS)

#ifdef __CUDACC_RTC__
__device__ inline float widen(half_bits value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
    return result;
}

__device__ inline half_bits narrow(float value) {
    half_bits result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}
#endif

// The two fp16 numbers of a 32-bit word, first the one that lies lower in memory.
__device__ inline float2 widen2(unsigned pair) {
    return make_float2(widen((half_bits)(pair & 0xffff)), widen((half_bits)(pair >> 16)));
}

// Adds `sum` over all threads of the block, always in the same order; thread 0 gets the result.
__device__ inline float block_sum(float sum) {
    __shared__ float of_warp[WARPS];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffff, sum, step);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0;
    if (threadIdx.x == 0)
        for (int warp = 0; warp < WARPS; ++warp) total += of_warp[warp];
    return total;
}
