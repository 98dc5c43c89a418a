// The baseline: y = W x with W in fp16, as good as a simple kernel gets.
//
// A block of threads takes one row. A thread loads eight weights and eight values of x in 128 bits each, and the 32
// threads of a warp load 512 bytes that lie side by side. Two loads for eight weights.
#include "ladder.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
ladder_fp16(const half_bits* __restrict__ weights, const half_bits* __restrict__ x, half_bits* __restrict__ y, int k) {
    const uint4* row = reinterpret_cast<const uint4*>(weights + (size_t)blockIdx.x * k);
    const uint4* xs = reinterpret_cast<const uint4*>(x);
    float sum = 0;
    #pragma unroll 4
    for (int i = threadIdx.x; i < k / 8; i += THREADS) {
        const uint4 w = row[i], v = xs[i];
        const unsigned ws[4] = {w.x, w.y, w.z, w.w}, vs[4] = {v.x, v.y, v.z, v.w};
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 a = widen2(ws[j]), b = widen2(vs[j]);
            sum += a.x * b.x + a.y * b.y;
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) y[blockIdx.x] = narrow(sum);
}
