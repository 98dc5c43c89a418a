// x, laid out for codebook_wgmma.cu: see codebook_wgmma_image.cuh.
//
// Its blocks are so small that they fit beside those of codebook_wgmma.cu: they wait there for the kernel before, and the
// weights that are multiplied next are already being fetched while x is laid out.
//
// Macros: COLUMNS, BLOCK, X_TYPE, OVERLAP as there.

#define UNIT 64
#define X_BYTES 2
#define SPLIT 1

#include "codebook_types.cuh"

struct Problem {
    const void* x;
    const void* bias;
    void* out;              // the image
    long long x_stride;     // elements between rows of x
    int m;
    int n;                  // counters behind the image, to be set to 0
    int k;
    int bias_is_fp32;
};

#include "codebook_shared.cuh"
#include "codebook_numbers.cuh"
#include "codebook_wgmma_image.cuh"

extern "C" __global__ void __launch_bounds__(64, 16) codebook_wgmma_x(const __grid_constant__ Problem p) {
    next_kernel_may_start();
    previous_kernel_done();
    clear(p, (u8*)p.out, p.n, blockIdx.x, gridDim.x);
    lay_out<COLUMNS == 16 ? 4 : COLUMNS == 32 ? 2 : 1>(p, (u8*)p.out, blockIdx.x, gridDim.x);
}
