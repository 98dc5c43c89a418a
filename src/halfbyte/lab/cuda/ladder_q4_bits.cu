// Rung 5: numbers made from bits. All else is rung 4.
//
// Up to here a weight costs a shift, a mask, a subtraction and a conversion from int to float: four instructions, and the
// units that execute them serve half a warp a clock or less. But a float between 2^23 and 2^24 is an integer in its low
// 23 bits, so a code needs no conversion, only the right exponent above it:
//
//   word & 0x0f00 | 0x4b000000   is the float 2^23 + 256 * code: one instruction; one more subtracts 2^23 + 256 * 8
//
// A code is left where it lies in the word, so it comes out 16, 256 or 4096 times too large: products of each of the four
// places have a sum of their own, which is divided once at the end of a block. All of this is exact.
//
// Macro: ROWS, rows that a warp takes at once. Dynamic shared memory: x, 2 k bytes.
#include "ladder.cuh"

#define PLACES 4  // codes of 16 bits

// (code - ZERO) * 16^place, of the code of `word` that `mask`, 15 << 4 place, leaves.
__device__ inline float scaled_code(unsigned word, unsigned mask, int place) {
    const float offset = 8388608.f + (ZERO << 4 * place);
    return __uint_as_float((word & mask) | 0x4b000000) - offset;
}

extern "C" __global__ void __launch_bounds__(THREADS)
ladder_q4_bits(const byte* __restrict__ codes, const half_bits* __restrict__ scales,
               const half_bits* __restrict__ x, half_bits* __restrict__ y, int k, int n) {
    extern __shared__ uint4 x_shared[];
    const int blocks = k / BLOCK, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < 4 * blocks; i += THREADS)
        x_shared[i % 4 * blocks + i / 4] = reinterpret_cast<const uint4*>(x)[i];
    __syncthreads();

    // An instruction has room for one constant, and the exponent takes it. k >> 31 is 0, but the compiler does not know,
    // so it keeps the masks in registers; else it would make them anew at almost every use.
    unsigned masks[PLACES];
    #pragma unroll
    for (int place = 0; place < PLACES; ++place) masks[place] = 15u << (4 * place + (k >> 31));

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
            float scale[ROWS], dots[ROWS][PLACES];
            #pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const uint4 packed = reinterpret_cast<const uint4*>(codes)[starts[r] + b];  // 1 load of 128 bits
                words[r][0] = packed.x, words[r][1] = packed.y, words[r][2] = packed.z, words[r][3] = packed.w;
                scale[r] = widen(scales[starts[r] + b]);                                    // 1 load of 16 bits
                #pragma unroll
                for (int place = 0; place < PLACES; ++place) dots[r][place] = 0;
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
                        const unsigned half_word = words[r][i] >> (j / 2 * 16);     // two pairs, four codes
                        const int place = j % 2 * 2;
                        dots[r][place] += scaled_code(half_word, masks[place], place) * pair.x;
                        dots[r][place + 1] += scaled_code(half_word, masks[place + 1], place + 1) * pair.y;
                    }
                }
            }
            #pragma unroll
            for (int r = 0; r < ROWS; ++r)
                sums[r] += scale[r] * (dots[r][0] + dots[r][1] / 16 + dots[r][2] / 256 + dots[r][3] / 4096);
        }
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            for (int step = 16; step > 0; step /= 2) sums[r] += __shfl_down_sync(0xffffffff, sums[r], step);
            if (lane == 0 && first + r < n) y[first + r] = narrow(sums[r]);
        }
    }
}
