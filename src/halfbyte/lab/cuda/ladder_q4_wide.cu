// Rung 3: x in loads of 128 bits as well, eight values at a time. 1 scale + 1 for the codes + 4 for x = 6 loads.
#include "ladder.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
ladder_q4_wide(const byte* __restrict__ codes, const half_bits* __restrict__ scales,
               const half_bits* __restrict__ x, half_bits* __restrict__ y, int k) {
    const int blocks = k / BLOCK;
    const uint4* row_codes = reinterpret_cast<const uint4*>(codes) + (size_t)blockIdx.x * blocks;
    const half_bits* row_scales = scales + (size_t)blockIdx.x * blocks;
    const uint4* x_eights = reinterpret_cast<const uint4*>(x);
    float sum = 0;
    #pragma unroll 1
    for (int b = threadIdx.x; b < blocks; b += THREADS) {
        const float scale = widen(row_scales[b]);                           // 1 load of 16 bits
        const uint4 packed = row_codes[b];                                  // 1 load of 128 bits
        const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
        float dot = 0;
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 eight = x_eights[b * 4 + i];                        // 4 loads of 128 bits
            const unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
            #pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int code = words[i] >> (8 * j) & 255;
                const float2 pair = widen2(pairs[j]);
                dot += ((code & 15) - ZERO) * pair.x + ((code >> 4) - ZERO) * pair.y;
            }
        }
        sum += scale * dot;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) y[blockIdx.x] = narrow(sum);
}
