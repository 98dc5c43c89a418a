// What the kernels for codebook weights are given, whatever they multiply with.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

struct Codebook {
    u16 high[16];    // fp16(codebook * factor)
    u16 low[16];     // fp16 of 2^11 times what `high` misses; used where TERMS is 2
    float inverse;   // 1 / factor: multiplies the sums
};

struct Scales {
    const void* values;     // fp32 absmax, q8 or E8M0, by SCALE_KIND
    const float* outer;     // nested: absmax of each 256 blocks
    const float* map;       // nested: the 256 values of q8
    const float* offset;    // nested: one number, added to each scale
    int shift;              // log2 of units (of BLOCK weights) that share a scale
    int aligned;            // whether K is in whole stages, and bytes of scales can be read by 4
};

#define METHOD __device__ __forceinline__
#define DEVICE static METHOD
