// A control, not a rung: loads as narrow as rung 1's, and more of them, but neighbouring threads ask for neighbouring
// bytes. It tells the width of a load from the spread of a warp's 32 addresses, which rung 2 changes together.
//
// A thread takes one code byte at a time, THREADS bytes apart, and everything that byte needs: its scale, the byte, two
// values of x. Four loads for two weights are 64 for 32, where rung 1 has 49.
#include "ladder.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
ladder_q4_adjacent(const byte* __restrict__ codes, const half_bits* __restrict__ scales,
                   const half_bits* __restrict__ x, half_bits* __restrict__ y, int k) {
    const byte* row_codes = codes + (size_t)blockIdx.x * (k / 2);
    const half_bits* row_scales = scales + (size_t)blockIdx.x * (k / BLOCK);
    float sum = 0;
    #pragma unroll 16
    for (int i = threadIdx.x; i < k / 2; i += THREADS) {
        const float scale = widen(row_scales[i / CODE_BYTES]);              // 1 load of 16 bits
        const int code = row_codes[i];                                      // 1 load of 8 bits
        const float x0 = widen(x[2 * i]), x1 = widen(x[2 * i + 1]);         // 2 loads of 16 bits
        sum += scale * (((code & 15) - ZERO) * x0 + ((code >> 4) - ZERO) * x1);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) y[blockIdx.x] = narrow(sum);
}
