// fp16, bf16 and fp8 to fp32 and back, bit for bit, whatever the processor has.
#pragma once
#include <cstdint>
#include <cstring>

#include "abi.hpp"
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace halfbyte::HB_ISA {

#define HB_INLINE inline __attribute__((always_inline))

HB_INLINE float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

HB_INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

template <class T> HB_INLINE T read(const void *from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

HB_INLINE float bf16_to_float(uint16_t half) { return as_float(uint32_t(half) << 16); }

HB_INLINE float fp16_to_float(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#elif defined(__aarch64__)
    return float(read<__fp16>(&half));
#else
    uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7FFF;
    uint32_t normal = (rest << 13) + (112u << 23);
    uint32_t small = as_bits(float(rest) * 0x1p-24f);
    uint32_t huge = (rest << 13) | 0x7F800000;
    return as_float(sign | (rest >= 0x7C00 ? huge : rest < 0x0400 ? small : normal));
#endif
}

HB_INLINE float half_to_float(uint16_t half, int32_t dtype) {
    return dtype == HB_BF16 ? bf16_to_float(half) : fp16_to_float(half);
}

// OCP fp8 E4M3: no infinities, NaN is all ones.
HB_INLINE float e4m3_to_float(uint8_t byte) {
    uint32_t sign = uint32_t(byte & 0x80) << 24, rest = byte & 0x7F;
    uint32_t normal = (rest << 20) + (120u << 23);
    uint32_t small = as_bits(float(rest) * 0x1p-9f);
    return as_float(sign | (rest == 0x7F ? 0x7FC00000 : rest < 8 ? small : normal));
}

// OCP MX E8M0: 2^(e - 127), NaN for 255; e = 0 is the subnormal 2^-127.
HB_INLINE float e8m0_to_float(uint8_t e) {
    return as_float(e == 0 ? 0x00400000 : e == 255 ? 0x7FC00000 : uint32_t(e) << 23);
}

HB_INLINE uint16_t float_to_bf16(float value) {
    uint32_t bits = as_bits(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return uint16_t(bits >> 16) | 0x40;  // a quiet NaN stays one
    return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

HB_INLINE uint16_t float_to_fp16(float value) {
#if defined(__F16C__)
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    const __fp16 rounded = __fp16(value);
    return read<uint16_t>(&rounded);
#else
    uint32_t bits = as_bits(value), sign = (bits >> 16) & 0x8000, rest = bits & 0x7FFFFFFF;
    if (rest > 0x7F800000) return uint16_t(sign | 0x7E00);
    if (rest >= 0x477FF000) return uint16_t(sign | 0x7C00);  // 65520 and above round to infinity
    if (rest < 0x38800000) {                                  // subnormal: let an fp32 addition round at 2^-24
        return uint16_t(sign | (as_bits(as_float(rest) + 0.5f) - 0x3F000000));
    }
    uint32_t odd = (rest >> 13) & 1;
    return uint16_t(sign | ((rest + 0xFFF + odd - (112u << 23)) >> 13));
#endif
}

HB_INLINE float load_float(const void *from, int64_t index, int32_t dtype) {
    if (dtype == HB_FP32) return read<float>(static_cast<const char *>(from) + index * 4);
    return half_to_float(read<uint16_t>(static_cast<const char *>(from) + index * 2), dtype);
}

HB_INLINE void store_float(void *to, int64_t index, float value, int32_t dtype) {
    if (dtype == HB_FP32) {
        std::memcpy(static_cast<char *>(to) + index * 4, &value, 4);
        return;
    }
    uint16_t half = dtype == HB_BF16 ? float_to_bf16(value) : float_to_fp16(value);
    std::memcpy(static_cast<char *>(to) + index * 2, &half, 2);
}

HB_INLINE float bias_at(const HbCall &call, int64_t row_of_x, int64_t n) {
    return call.bias ? load_float(call.bias, row_of_x * call.bias_stride + n, call.bias_dtype) : 0;
}

HB_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
HB_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
HB_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace halfbyte::HB_ISA
