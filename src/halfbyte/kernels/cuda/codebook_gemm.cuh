// What the three kernels of a multiply of many rows of x share: codebook_gemm.cu and, before and after it, _x.cu and _y.cu.
//
// K is cut into segments of `units` units (64 k). x is there as an image: fp16, and for each segment each row divided by a power of
// two of its own. Where there is more than one segment, each leaves its sums in fp32, and codebook_gemm_y.cu adds them in order.

struct Problem {
    const void* x;          // of codebook_gemm_x.cu the caller's, else the image; of codebook_gemm_y.cu segments' sums
    const void* bias;       // bf16 or fp32, or null
    void* out;              // the image; bf16 [m, n], or segments' sums; bf16 [m, n]
    long long x_stride;     // elements between rows of the caller's x
    int m, n, k;
    int bias_is_fp32;
    long long bias_stride;  // elements between rows of bias, 0 where all rows of x have the same
    int* x_powers;          // [segments, m]: x is its image times 2^power
    int units, segments;    // of K
};
