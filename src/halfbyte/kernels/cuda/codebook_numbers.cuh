// Numbers on their way in and out of kernels that multiply in fp16: what two kernels convert alike has the same bits.

DEVICE u32 pack_half2(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

DEVICE float half_to_float(u32 bits) {
    float f;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(bits & 0xFFFF));
    return f;
}

DEVICE u32 max_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

DEVICE u32 scale_bf16x2(u32 a, u32 scale) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(scale), "r"(0x80008000u));
    return d;
}

DEVICE u32 scaled_bf16x2(u32 raw, u32 scale) {
    const u32 scaled = scale_bf16x2(raw, scale | scale >> 16);
    return pack_half2(__uint_as_float(scaled << 16), __uint_as_float(scaled & 0xFFFF0000u));
}

// Two bf16 numbers times a power of two, as fp16.
DEVICE u32 fitted_bf16x2(u32 raw, float scale) {
    return pack_half2(__uint_as_float(raw << 16) * scale, __uint_as_float(raw & 0xFFFF0000u) * scale);
}

// Times a power of two, in two steps, as it alone may be beyond fp32.
DEVICE float times_power(float sum, int exponent) {
    const int half = exponent >> 1;
    return sum * __uint_as_float((u32)(half + 127) << 23) * __uint_as_float((u32)(exponent - half + 127) << 23);
}

// A power of two for a row's elements in a unit, and its inverse, as bits of fp32. `top` is the largest magnitude that this
// lane has seen, as bits of fp32; the row is spread over `LANES` lanes. fp32 x: the largest element comes to 2^14. bf16 x: to
// between 2^-9 and 2^15, in steps of 2^24, so that it is 1 for nearly all activations; of bf16's 8 bits some are lost below
// 2^-17, which is at most 2^-16 of the largest.
struct PowerOfTwo {
    u32 scale, inverse;
};
template <int LANES>
DEVICE PowerOfTwo power_for(u32 top) {
    if (LANES == 32)
        top = __reduce_max_sync(~0u, top);
    else
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) top = max(top, __shfl_xor_sync(~0u, top, step));
    const u32 exponent = max(top >> 23, 15u);
    if (X_TYPE == 2) return {(268u - exponent) << 23, (exponent - 14u) << 23};
    const u32 steps = top == 0 ? 5 : (261u - exponent) / 24;    // 5 where nothing needs to be done
    return {(7u + 24u * steps) << 23, (247u - 24u * steps) << 23};
}

DEVICE u32 magnitude(u32 top, u32 word) {    // the larger of `top` and the elements of a word of x
    if (X_TYPE == 2) return max(top, word & 0x7FFFFFFFu);
    const u32 pair = max_bf16x2(word & 0x7FFF7FFFu, word & 0x7FFF7FFFu);
    return max(top, max(pair & 0xFFFF0000u, pair << 16));
}

DEVICE float bias_of(const Problem& p, int n) {
    if (X_TYPE == 2 || p.bias_is_fp32) return __ldg((const float*)p.bias + n);
    const u32 bits = __ldg((const u16*)p.bias + n);
    return X_TYPE == 1 ? __uint_as_float(bits << 16) : half_to_float(bits);
}

// Writes an output: its sum times what its table was divided by, plus bias, plus what adapters add (-0: nothing); one rounding
// for all, in every kernel alike.
DEVICE void store(const Problem& p, int row, int n, float sum, float inverse, float added) {
    const long long at = (long long)row * p.n + n;
    const float value = __fadd_rn(p.bias ? fmaf(sum, inverse, bias_of(p, n)) : __fmul_rn(sum, inverse), added);
#if X_TYPE == 2
    ((float*)p.out)[at] = value;
#else
    u16 bits;
    if (X_TYPE == 1)
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    else
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    ((u16*)p.out)[at] = bits;
#endif
}
