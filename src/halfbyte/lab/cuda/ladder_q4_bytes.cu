// Rung 1: the format, spelled out. Each load asks for what one C++ object is: a byte of codes, one fp16 number.
//
// A block of threads takes one row, a thread every THREADS-th block of 32 weights. For each of the 16 code bytes it
// loads the byte and the two values of x that belong to it: with the scale, 49 loads for 32 weights.
//
// Look at what a warp asks for, too: neighbouring threads work on neighbouring blocks, so one load of a code byte
// reaches over 32 places 16 bytes apart, and one load of x over 32 places 64 bytes apart.
#include "ladder.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
ladder_q4_bytes(const byte* __restrict__ codes, const half_bits* __restrict__ scales,
                const half_bits* __restrict__ x, half_bits* __restrict__ y, int k) {
    const int blocks = k / BLOCK;
    const byte* row_codes = codes + (size_t)blockIdx.x * blocks * CODE_BYTES;
    const half_bits* row_scales = scales + (size_t)blockIdx.x * blocks;
    float sum = 0;
    #pragma unroll 1
    for (int b = threadIdx.x; b < blocks; b += THREADS) {
        const float scale = widen(row_scales[b]);                           // 1 load of 16 bits
        float dot = 0;
        #pragma unroll
        for (int j = 0; j < CODE_BYTES; ++j) {
            const int code = row_codes[b * CODE_BYTES + j];                 // 16 loads of 8 bits
            const float x0 = widen(x[b * BLOCK + 2 * j]);                   // 16 loads of 16 bits
            const float x1 = widen(x[b * BLOCK + 2 * j + 1]);               // 16 loads of 16 bits
            dot += ((code & 15) - ZERO) * x0 + ((code >> 4) - ZERO) * x1;
        }
        sum += scale * dot;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) y[blockIdx.x] = narrow(sum);
}
