// What the three kernels around a dense multiply share (codebook_prefill.cu, _x.cu, _y.cu): their problem, and powers of two.
//
// y = x W^T goes through fp16 matrices whose rows are scaled by powers of two: of x [chunk, TERMS K], of W [slab, TERMS K]. TERMS is
// 1 where 11 bits of a weight do, or 2: then a row of W's holds what fp16 keeps of it and what that misses, and a row of x's holds
// x twice.

struct Problem {
    const void* x;
    const void* bias;
    void* out;
    long long x_stride;     // elements between rows of x
    int m, n, k;
    int bias_is_fp32;
    int first, rows;        // the slab: rows first to first + rows of W
    long long bias_stride;  // elements between rows of bias, 0 where all rows of x have the same
    const void* codes;
    int* w_exponents;       // [rows] of the slab: W is its fp16 matrix times 2^exponent
    int* x_exponents;       // [m] of the chunk
};

// The power of two that brings numbers up to `top` (bits of a magnitude in fp32) below 2^15, and what undoes it. Where `top` is
// infinite or no number, so is the row's result, whatever the others come to.
struct Fit {
    float scale;
    int exponent;
};
DEVICE Fit fit(u32 top) {
    const int field = max((int)(top >> 23), 15);
    return {__uint_as_float((u32)(268 - field) << 23), field - 141};
}

DEVICE u32 largest(u32 mine) {    // of all threads of a block
    __shared__ u32 tops[32];
    const u32 warp = __reduce_max_sync(~0u, mine);
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = warp;
    __syncthreads();
    u32 top = tops[0];
    for (int i = 1; i < THREADS / 32; ++i) top = max(top, tops[i]);
    return top;
}
