// x, laid out for codebook_wgmma.cu: fp16, stage after stage (256 k), in each unit (64 k) COLUMNS rows of 128 bytes, k in the order
// in which codes are decoded, chunks of 16 bytes swizzled by row as wgmma expects; then, for bf16, what undoes the power of two
// by which a row of a unit was scaled. Rows beyond M and k beyond K are zeros. A block makes one stage.
//
// Macros: COLUMNS, BLOCK, X_TYPE, OVERLAP as there.

#define UNIT 64
#define X_BYTES 2
#define SPLIT 1

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

struct TensorMap {
    u64 opaque[16];
};

struct Problem {
    const void* x;
    const void* bias;
    void* out;              // the image
    long long x_stride;     // elements between rows of x
    int m, n, k;
    int bias_is_fp32;
};

#define METHOD __device__ __forceinline__
#define DEVICE static METHOD

#include "codebook_shared.cuh"
#include "codebook_numbers.cuh"

// Eight lanes take a row of a unit, 16 bytes each.
extern "C" __global__ void __launch_bounds__(256) codebook_wgmma_x(const __grid_constant__ Problem p) {
    next_kernel_may_start();
    previous_kernel_done();
    const int stage = blockIdx.x, stages = gridDim.x, part = threadIdx.x & 7;
    u8* image = (u8*)p.out + (u64)stage * COLUMNS * 512;
    float* undo = (float*)((u8*)p.out + (u64)stages * COLUMNS * 512) + stage * COLUMNS * 4;
#pragma unroll
    for (int i = 0; i < COLUMNS * 4; i += 32) {
        const int unit = (i + (threadIdx.x >> 3)) / COLUMNS, row = (i + (threadIdx.x >> 3)) % COLUMNS;
        u32 word[4] = {};
        if (row < p.m && 4 * stage + unit < p.k / UNIT) {
            const uint4 raw = __ldg((const uint4*)((const u8*)p.x + row * p.x_stride * 2 + (u64)(4 * stage + unit) * UNIT * 2) + part);
            word[0] = raw.x, word[1] = raw.y, word[2] = raw.z, word[3] = raw.w;
        }
#if X_TYPE == 1
        u32 top = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) top = max_bf16x2(top, word[w] & 0x7FFF7FFFu);
        const PowerOfTwo power = power_for<8>(magnitude(0, top));
#pragma unroll
        for (int w = 0; w < 4; ++w) word[w] = scaled_bf16x2(word[w], power.scale);
        if (part == 0) undo[unit * COLUMNS + row] = __uint_as_float(power.inverse);
#endif
        // k = 16 q + 4 step + 2 high (+ 1), or within a block of 32: 32 half + 8 q + 4 (step & 1) + 2 high
        const int q = BLOCK == 64 ? part / 2 : part & 3, step0 = BLOCK == 64 ? 2 * (part & 1) : 2 * (part / 4);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const int chunk = 2 * (step0 + w / 2) + w % 2;
            *(u32*)(image + (unit * COLUMNS + row) * 128 + ((chunk ^ row & 7) << 4) + q * 4) = word[w];
        }
    }
}
