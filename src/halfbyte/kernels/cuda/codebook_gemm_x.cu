// The image of bf16 x for codebook_gemm.cu: fp16, tile after tile of COLUMNS rows, unit after unit (64 k) of a tile COLUMNS rows of 128
// bytes, k in the order in which codes are decoded, chunks of 16 bytes swizzled by row as wgmma expects. Each row of a segment of K
// is divided by a power of two that brings its largest element below 2^15, so what is lost lies 2^31 below it. Rows of the last tile
// beyond M stay as they are: what is there meets no output.
//
// A block takes a row of a segment after another. Macros: COLUMNS, BLOCK, OVERLAP as there, THREADS.

#define UNIT 64
#define X_TYPE 1
#define SPLIT 1

#include "codebook_types.cuh"
#include "codebook_gemm.cuh"
#include "codebook_shared.cuh"
#include "codebook_numbers.cuh"

DEVICE u32 largest(u32 mine) {    // of all threads of a block
    __shared__ u32 tops[THREADS / 32];
    const u32 warp = __reduce_max_sync(~0u, mine);
    __syncthreads();    // the last ones have been read
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = warp;
    __syncthreads();
    u32 top = tops[0];
#pragma unroll
    for (int i = 1; i < THREADS / 32; ++i) top = max(top, tops[i]);
    return top;
}

extern "C" __global__ void __launch_bounds__(THREADS, 16) codebook_gemm_x(const __grid_constant__ Problem p) {
    next_kernel_may_start();
    previous_kernel_done();
    const int units = p.k / UNIT, part = threadIdx.x & 7;
    // k = 16 q + 4 step + 2 high (+ 1), or within a block of 32: 32 half + 8 q + 4 (step & 1) + 2 high
    const int q = BLOCK == 64 ? part / 2 : part & 3, step0 = BLOCK == 64 ? 2 * (part & 1) : 2 * (part / 4);
    for (int item = blockIdx.x; item < p.m * p.segments; item += gridDim.x) {
        const int row = item % p.m, segment = item / p.m, begin = segment * p.units * 8, end = min(units * 8, begin + p.units * 8);
        const uint4* const x = (const uint4*)((const u16*)p.x + row * p.x_stride);
        u32 top = 0;
#pragma unroll 4
        for (int i = begin + threadIdx.x; i < end; i += THREADS) {
            const uint4 raw = __ldcg(x + i);
            top = magnitude(magnitude(magnitude(magnitude(top, raw.x), raw.y), raw.z), raw.w);
        }
        const int field = max((int)(largest(top) >> 23), 15);
        const float scale = __uint_as_float((u32)(268 - field) << 23);
        if (threadIdx.x == 0) p.x_powers[(long long)segment * p.m + row] = field - 141;
        u8* const image = (u8*)p.out + ((u64)(row / COLUMNS) * units * COLUMNS + row % COLUMNS) * 128 + q * 4;
#pragma unroll 4
        for (int i = begin + threadIdx.x; i < end; i += THREADS) {    // eight threads a unit
            const uint4 raw = __ldcg(x + i);
            const u32 word[4] = {raw.x, raw.y, raw.z, raw.w};
            u8* const unit = image + (u64)(i / 8) * COLUMNS * 128;
#pragma unroll
            for (int w = 0; w < 4; ++w) *(u32*)(unit + ((2 * (step0 + w / 2) + w % 2 ^ row & 7) << 4)) = fitted_bf16x2(word[w], scale);
        }
    }
}
