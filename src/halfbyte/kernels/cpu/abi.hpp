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
// plus bias [n] if there is one.
struct HbCall {
    const void *x;
    const void *bias;
    void *out;
    int64_t m, x_stride, out_stride;  // strides in elements
    int32_t dtype, bias_dtype, threads;
};

}  // extern "C"
