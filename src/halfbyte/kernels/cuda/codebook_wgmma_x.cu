// x, laid out for codebook_wgmma.cu: fp16, stage after stage (256 k), in each unit (64 k) COLUMNS rows of 128 bytes, k in the order
// in which codes are decoded, chunks of 16 bytes swizzled by row as wgmma expects; then, for bf16, stage after stage what undoes
// the powers of two by which rows of units were scaled, [4][COLUMNS] fp32, and for each unit whether any of them is not 1. Rows
// beyond M and k beyond K are zeros.
//
// Its blocks are so small that they fit beside those of codebook_wgmma.cu: they wait there for the kernel before, and the
// weights that are multiplied next are already being fetched while x is laid out.
//
// Macros: COLUMNS, BLOCK, X_TYPE, OVERLAP as there. BESIDE: it runs beside adapters_shrink.cu, the kernel right before, whose
// blocks let it start only when the kernels before them have ended: so x is there, and nobody reads the image's memory any more.

#define UNIT 64
#define X_BYTES 2
#define SPLIT 1

#include "codebook_types.cuh"

struct Problem {
    const void* x;
    const void* bias;
    void* out;              // the image
    long long x_stride;     // elements between rows of x
    int m, n, k;
    int bias_is_fp32;
};

#include "codebook_shared.cuh"
#include "codebook_numbers.cuh"

// A block takes a unit after another, eight lanes a row of it, 16 bytes each.
extern "C" __global__ void __launch_bounds__(64) codebook_wgmma_x(const __grid_constant__ Problem p) {
    next_kernel_may_start();
#if !BESIDE
    previous_kernel_done();
#endif
    const int stages = (p.k / UNIT + 3) / 4, part = threadIdx.x & 7;
    float* const undos = (float*)((u8*)p.out + (u64)stages * COLUMNS * 512);
    // k = 16 q + 4 step + 2 high (+ 1), or within a block of 32: 32 half + 8 q + 4 (step & 1) + 2 high
    const int q = BLOCK == 64 ? part / 2 : part & 3, step0 = BLOCK == 64 ? 2 * (part & 1) : 2 * (part / 4);
    for (int unit = blockIdx.x; unit < 4 * stages; unit += gridDim.x) {
        u8* image = (u8*)p.out + (u64)unit * COLUMNS * 128;
        float* undo = undos + unit / 4 * (COLUMNS * 4 + 4);
        u32 word[COLUMNS / 8][4] = {};
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; ++i) {
            const int row = 8 * i + (threadIdx.x >> 3);
            if (row >= p.m || unit >= p.k / UNIT) continue;
            const u8* from = (const u8*)p.x + row * p.x_stride * 2 + (u64)unit * UNIT * 2 + part * 16;
            asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(word[i][0]), "=r"(word[i][1]), "=r"(word[i][2]), "=r"(word[i][3]) : "l"(from));
        }
        bool scaled = false;
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; ++i) {
            const int row = 8 * i + (threadIdx.x >> 3);
#if X_TYPE == 1
            u32 top = 0;
#pragma unroll
            for (int w = 0; w < 4; ++w) top = max_bf16x2(top, word[i][w] & 0x7FFF7FFFu);
            const PowerOfTwo power = power_for<8>(magnitude(0, top));
#pragma unroll
            for (int w = 0; w < 4; ++w) word[i][w] = scaled_bf16x2(word[i][w], power.scale);
            if (part == 0) undo[unit % 4 * COLUMNS + row] = __uint_as_float(power.inverse);
            scaled |= power.scale != 0x3F800000u;
#endif
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int chunk = 2 * (step0 + w / 2) + w % 2;
                *(u32*)(image + row * 128 + ((chunk ^ row & 7) << 4) + q * 4) = word[i][w];
            }
        }
#if X_TYPE == 1
        scaled = __syncthreads_or(scaled);
        if (threadIdx.x == 0) *(int*)(undo + COLUMNS * 4 + unit % 4) = scaled;
#endif
    }
#if BESIDE
    previous_kernel_done();    // so that who waits for this one has waited for that one
#endif
}
