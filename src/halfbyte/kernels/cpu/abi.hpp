// The plain C interface of the library; cpu_linear.py mirrors these structs with ctypes.
#pragma once
#include <cstdint>

extern "C" {

enum HbDtype : int32_t { HB_FP32 = 0, HB_BF16 = 1, HB_FP16 = 2 };

enum HbLayout : int32_t {
    HB_RECORDS = 0,  // byte records along the flattened [N, K] (bitsandbytes, MXFP4, NVFP4, GGUF)
    HB_WORDS_K = 1,  // int32 words of eight along K: GPTQ's [K/8, N]
    HB_WORDS_N = 2,  // int32 words of eight along N: AWQ's [K, N/8]
};

enum HbScale : int32_t {
    HB_ABSMAX = 0,       // scales: fp32 a block
    HB_NESTED = 1,       // map[scales[b]] * second[b >> 8] + *constant
    HB_HALF = 2,         // fp16 in the record, at scale_start
    HB_KQUANT = 3,       // Q4_K: fp16 times 6 bits, in the record
    HB_E8M0 = 4,         // scales: 2^(e - 127)
    HB_E8M0_RECORD = 5,  // the same at the record's head
    HB_E4M3 = 6,         // scales: fp8 times *constant
    HB_GROUP = 7,        // scales: 16-bit [K/group, N]
};

enum HbOffset : int32_t {
    HB_NO_OFFSET = 0,
    HB_HALF_OFFSET = 1,    // fp16 in the record, at offset_start
    HB_KQUANT_OFFSET = 2,  // Q4_K's minus fp16 times 6 bits
    HB_GROUP_ZERO = 3,     // -scale * (zero + zero_plus_one), zeros in int32 words along N
};

// A packed weight [n, k]: pointers into the checkpoint's own bytes and what they mean.
struct HbWeight {
    int64_t n, k;
    const void *codes;
    const void *scales;    // see HbScale
    const float *second;   // nested_absmax
    const float *map;      // nested_quant_map
    const float *constant; // nested_offset or global_scale
    const void *zeros;     // qzeros
    float codebook[16];
    int32_t order[8];      // weight i of a word sits at bits 4 * order[i]
    int32_t zero_order[8];
    int32_t layout;
    int32_t elements, record_bytes, record_start, span, high_first;  // see RecordLayout
    int32_t blocksize;
    int32_t scale_kind, scale_start, scale_dtype;
    int32_t offset_kind, offset_start, zero_plus_one;
};

// One multiply: out [m, n] = x [m, k] (unit stride along k, any stride between rows) times the weight's transpose,
// plus, if there is one, bias [n], or with a bias_stride a bias [m, n]: what adapters add.
struct HbCall {
    const void *x;
    const void *bias;
    void *out;
    int64_t m, x_stride, out_stride;  // strides in elements
    int32_t dtype, bias_dtype, threads;
    int64_t bias_stride;  // elements between the biases of two rows of x; 0: one bias for all
};

// LoRA adapters, first half: h [m, width] = the rows of A that belong to each row's adapter, times x. Sums in fp32.
struct HbShrink {
    const void *x;         // [m, k], as in HbCall
    const void *a;         // rows of k elements
    const int32_t *spans;  // [slots][2]: an adapter's first row in `a`, and how many
    const int32_t *index;  // [m]: each row's slot, -1 for none; null: slot 0 for all
    float *h;              // zero where an adapter has fewer rows than width
    int64_t m, k, x_stride, width, slots, rows_of_a;
    int32_t dtype, a_dtype, threads;
};

// Second half: out [m, n] = bias + scaling * B h, B [n, rank] of each row's adapter; the bias alone where there is none.
struct HbExpand {
    const float *h;        // [m, width]
    const void *b;         // an adapter's B is [n, stride], from element first * n on
    const int32_t *table;  // [slots][4]: the first column of h, rank, first, stride
    const float *scalings; // [slots]
    const int32_t *index;  // as in HbShrink
    const void *bias;      // [n], or null
    float *out;
    int64_t m, n, width, slots, elements_of_b;
    int32_t b_dtype, bias_dtype, threads;
};

}  // extern "C"
