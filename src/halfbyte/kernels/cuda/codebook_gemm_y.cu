// The end of codebook_gemm.cu where K is cut: the segments' sums, added in order, plus bias; one rounding to bf16.
//
// A block takes 256 threads' part of a column group of a tile after another, as codebook_gemm.cu's threads had it.
// Macros: ROW_GROUPS, OVERLAP as there.

#define X_TYPE 1
#define SPLIT 1
#define ROWS (64 * ROW_GROUPS)
#define THREADS 256
#define PARTS (2 * ROWS / THREADS)

#include "codebook_types.cuh"
#include "codebook_gemm.cuh"
#include "codebook_shared.cuh"
#include "codebook_gemm_out.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) codebook_gemm_y(const __grid_constant__ Problem p) {
    next_kernel_may_start();
    previous_kernel_done();
    const int row_tiles = (p.n + ROWS - 1) / ROWS, groups = (p.m + 7) / 8;
    const long long each = (long long)row_tiles * groups * (2 * ROWS);
    for (int item = blockIdx.x; item < row_tiles * groups * PARTS; item += gridDim.x) {
        const int thread = item % PARTS * THREADS + threadIdx.x, group = item / PARTS % groups, row_tile = item / PARTS / groups;
        const float4* const sums = sums_at(p.x, p, 0, row_tile, group, thread);
        float sum[4] = {};
#pragma unroll 4
        for (int segment = 0; segment < p.segments; ++segment) {
            const float4 four = __ldcg(sums + segment * each);
            sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
        }
        write_outputs(p, row_tile * ROWS, 8 * group, thread, sum);
    }
}
