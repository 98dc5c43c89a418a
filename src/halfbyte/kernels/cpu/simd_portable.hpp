// Sixteen lanes in plain C++ (the compilers' vector extension): every processor, and the model for the others.
//
// What each Simd promises. A unit is 64 bytes of codes: 128 weights. decode<STEP> turns a unit into STEPS * WIDTH
// vectors of fp32 codebook entries; place() says which byte and nibble each lane of each vector came from. Vectors are
// put together in groups for which a lane always meets the same block, so that a block's scale is applied once to
// the sum over the group: PLAIN where the lowest and highest nibble of a byte share a block, SPLIT where they do not
// (Q4_K), FINE for blocks of 16.
#pragma once
#include "halves.hpp"

namespace halfbyte::HB_ISA {

enum Grouping { PLAIN, SPLIT, FINE };

struct Simd {
    static constexpr int LANES = 16, STEPS = 8, WIDTH = 1, MAX_M = 4;
    static constexpr int rows(int) { return 1; }  // rows of the weight together, by rows of x together

    typedef float F __attribute__((vector_size(64)));
    typedef uint32_t I __attribute__((vector_size(64)));
    typedef double D __attribute__((vector_size(128)));
    using Codes = I;
    using Index = I;
    struct Table { float value[16]; };

    static HB_INLINE F zero() { return F{}; }
    static HB_INLINE F load(const float *from) { return read<F>(from); }
    static HB_INLINE void store(float *to, F value) { std::memcpy(to, &value, sizeof value); }
    static HB_INLINE F set(float value) { return value - F{}; }
    static HB_INLINE F strided(const float *from, int32_t stride) {
        F out;
        for (int i = 0; i < LANES; ++i) out[i] = from[i * stride];
        return out;
    }
    static HB_INLINE F mul_add(F a, F b, F c) { return a * b + c; }
    // One rounding even without FMA: the product is exact in double.
    static HB_INLINE F fused(F a, F b, F c) {
        F out;
        for (int i = 0; i < LANES; ++i) out[i] = float(double(a[i]) * double(b[i]) + double(c[i]));
        return out;
    }
    static HB_INLINE float sum(F v) {
        float half[8];
        for (int i = 0; i < 8; ++i) half[i] = v[i] + v[i + 8];
        for (int width = 4; width; width /= 2)
            for (int i = 0; i < width; ++i) half[i] += half[i + width];
        return half[0];
    }

    static HB_INLINE Table table(const float *codebook) { return read<Table>(codebook); }
    static HB_INLINE Index index(const int32_t *lanes) { return read<Index>(lanes); }
    static HB_INLINE F pick(const float *scales, Index index) {
        F out;
        for (int i = 0; i < LANES; ++i) out[i] = scales[index[i]];
        return out;
    }

    static HB_INLINE Codes load_unit(const uint8_t *from) { return read<Codes>(from); }
    static HB_INLINE Codes load_quarters(const uint8_t *from, int64_t stride) {
        Codes codes;
        for (int i = 0; i < 4; ++i) std::memcpy(reinterpret_cast<char *>(&codes) + 16 * i, from + i * stride, 16);
        return codes;
    }
    static constexpr void place(int vector, int lane, int *byte, int *nibble) {
        *byte = 4 * lane + vector / 2;
        *nibble = vector % 2;
    }
    static constexpr int groups(Grouping grouping) { return grouping == SPLIT ? 2 : 1; }
    static constexpr int group(Grouping grouping, int vector) { return grouping == SPLIT ? vector % 2 : 0; }
    template <int STEP> static HB_INLINE void decode(const Codes &codes, const Table &table, F *out) {
        *out = lookup<STEP>(codes, table);
    }

    // Word layouts: lane i holds a word of its own; `lookup` decodes one nibble of each.
    static HB_INLINE Codes load_words(const uint8_t *from, int count) {
        Codes codes{};
        std::memcpy(&codes, from, 4 * count);
        return codes;
    }
    template <int NIBBLE> static HB_INLINE F lookup(const Codes &codes, const Table &table) {
        const I index = (codes >> (4 * NIBBLE)) & 15;
        F out;
        for (int i = 0; i < LANES; ++i) out[i] = table.value[index[i]];
        return out;
    }
    static HB_INLINE void prefetch(const uint8_t *from) { __builtin_prefetch(from, 0, 2); }
};

}  // namespace halfbyte::HB_ISA
