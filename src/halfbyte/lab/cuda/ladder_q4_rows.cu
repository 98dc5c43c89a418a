// Rung 4: rows split across warps, x in shared memory.
//
// As many blocks of threads as fit the card are started once. Each copies x to shared memory, then its warps walk over the
// rows of W, ROWS at a time: a value of x is read and widened once for ROWS weights, and there is no barrier in the loop.
// Global memory is asked only for what is read once: a block's codes and its scale, 2 loads for 32 weights.
//
// x is kept as [4][K / 32] pieces of eight values, so that neighbouring lanes, which work on neighbouring blocks, read
// neighbouring 16 bytes. In x's own order they would be 64 bytes apart and meet in the same banks.
//
// Macro: ROWS, rows that a warp takes at once. Dynamic shared memory: x, 2 k bytes.
#include "ladder.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
ladder_q4_rows(const byte* __restrict__ codes, const half_bits* __restrict__ scales,
               const half_bits* __restrict__ x, half_bits* __restrict__ y, int k, int n) {
    extern __shared__ uint4 x_shared[];
    const int blocks = k / BLOCK, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < 4 * blocks; i += THREADS)
        x_shared[i % 4 * blocks + i / 4] = reinterpret_cast<const uint4*>(x)[i];
    __syncthreads();

    const int warp = blockIdx.x * WARPS + threadIdx.x / 32;
    for (int first = warp * ROWS; first < n; first += gridDim.x * WARPS * ROWS) {
        size_t starts[ROWS];                                                // the first block of each row; past the
        float sums[ROWS];                                                   // last row, that row again
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            starts[r] = (size_t)min(first + r, n - 1) * blocks;
            sums[r] = 0;
        }
        #pragma unroll 1
        for (int b = lane; b < blocks; b += 32) {
            unsigned words[ROWS][4];
            float scale[ROWS], dots[ROWS];
            #pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const uint4 packed = reinterpret_cast<const uint4*>(codes)[starts[r] + b];  // 1 load of 128 bits
                words[r][0] = packed.x, words[r][1] = packed.y, words[r][2] = packed.z, words[r][3] = packed.w;
                scale[r] = widen(scales[starts[r] + b]);                                    // 1 load of 16 bits
                dots[r] = 0;
            }
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 eight = x_shared[i * blocks + b];               // 4 loads of 128 bits, shared, for ROWS rows
                const unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
                #pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 pair = widen2(pairs[j]);
                    #pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
                        const int code = words[r][i] >> (8 * j) & 255;
                        dots[r] += ((code & 15) - ZERO) * pair.x + ((code >> 4) - ZERO) * pair.y;
                    }
                }
            }
            #pragma unroll
            for (int r = 0; r < ROWS; ++r) sums[r] += scale[r] * dots[r];
        }
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            for (int step = 16; step > 0; step /= 2) sums[r] += __shfl_down_sync(0xffffffff, sums[r], step);
            if (lane == 0 && first + r < n) y[first + r] = narrow(sums[r]);
        }
    }
}
