// Rung 2: the same bytes in fewer requests. A block's 16 code bytes come in one load of 128 bits, x in pairs of 32 bits.
//
// Nothing else changes: same threads, same order, same products. 1 scale + 1 for the codes + 16 for x = 18 loads for 32
// weights. A warp's load of codes now covers 512 bytes without a gap; its loads of x are still 64 bytes apart.
#include "ladder.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
ladder_q4_codes(const byte* __restrict__ codes, const half_bits* __restrict__ scales,
                const half_bits* __restrict__ x, half_bits* __restrict__ y, int k) {
    const int blocks = k / BLOCK;
    const uint4* row_codes = reinterpret_cast<const uint4*>(codes) + (size_t)blockIdx.x * blocks;
    const half_bits* row_scales = scales + (size_t)blockIdx.x * blocks;
    const unsigned* x_pairs = reinterpret_cast<const unsigned*>(x);
    float sum = 0;
    #pragma unroll 1
    for (int b = threadIdx.x; b < blocks; b += THREADS) {
        const float scale = widen(row_scales[b]);                           // 1 load of 16 bits
        const uint4 packed = row_codes[b];                                  // 1 load of 128 bits
        const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
        float dot = 0;
        #pragma unroll
        for (int j = 0; j < CODE_BYTES; ++j) {
            const int code = words[j / 4] >> (8 * (j % 4)) & 255;           // byte j, first the lowest of a word
            const float2 pair = widen2(x_pairs[b * CODE_BYTES + j]);        // 16 loads of 32 bits
            dot += ((code & 15) - ZERO) * pair.x + ((code >> 4) - ZERO) * pair.y;
        }
        sum += scale * dot;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) y[blockIdx.x] = narrow(sum);
}
