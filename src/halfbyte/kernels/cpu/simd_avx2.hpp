// AVX2: the fp32 codebook as four planes of 16 bytes. One vpshufb per plane looks up 32 codes, unpacks put the bytes
// of each value together; the order that this leaves the weights in is x's to follow.
#pragma once
#include <immintrin.h>

#include "halves.hpp"

namespace halfbyte::HB_ISA {

enum Grouping { PLAIN, SPLIT, FINE };  // see simd_portable.hpp

struct Simd {
    static constexpr int LANES = 8, STEPS = 4, WIDTH = 4, MAX_M = 4;
    static constexpr int rows(int m) { return m <= 1 ? 2 : 1; }

    using F = __m256;
    using Index = __m256i;
    struct Codes { __m256i half[2]; };
    struct Table {
        __m256i plane[4];
        __m256 low, high;  // entries 0..7 and 8..15
    };

    static HB_INLINE F zero() { return _mm256_setzero_ps(); }
    static HB_INLINE F load(const float *from) { return _mm256_loadu_ps(from); }
    static HB_INLINE void store(float *to, F value) { _mm256_storeu_ps(to, value); }
    static HB_INLINE F set(float value) { return _mm256_set1_ps(value); }
    static HB_INLINE F strided(const float *from, int32_t stride) {
        const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        return _mm256_i32gather_ps(from, _mm256_mullo_epi32(lanes, _mm256_set1_epi32(stride)), 4);
    }
    static HB_INLINE F mul_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static HB_INLINE F fused(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static HB_INLINE float sum(F v) {
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }

    static HB_INLINE Table table(const float *codebook) {
        Table table;
        for (int p = 0; p < 4; ++p) {
            alignas(16) uint8_t plane[16];
            for (int i = 0; i < 16; ++i) plane[i] = uint8_t(as_bits(codebook[i]) >> (8 * p));
            table.plane[p] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<__m128i *>(plane)));
        }
        table.low = _mm256_loadu_ps(codebook);
        table.high = _mm256_loadu_ps(codebook + 8);
        return table;
    }
    static HB_INLINE Index index(const int32_t *lanes) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(lanes));
    }
    static HB_INLINE F pick(const float *scales, Index index) {
        return _mm256_permutevar8x32_ps(_mm256_loadu_ps(scales), index);
    }

    static HB_INLINE Codes load_unit(const uint8_t *from) {
        const __m256i *in = reinterpret_cast<const __m256i *>(from);
        return {{_mm256_loadu_si256(in), _mm256_loadu_si256(in + 1)}};
    }
    static HB_INLINE Codes load_quarters(const uint8_t *from, int64_t stride) {
        auto at = [&](int i) { return reinterpret_cast<const __m128i *>(from + i * stride); };
        return {{_mm256_loadu2_m128i(at(1), at(0)), _mm256_loadu2_m128i(at(3), at(2))}};
    }
    // Step s decodes nibble s % 2 of the 32 bytes of half s / 2; its vector q holds, of each 16 bytes, bytes 4q..4q+3.
    static constexpr void place(int vector, int lane, int *byte, int *nibble) {
        const int step = vector / WIDTH, q = vector % WIDTH;
        *byte = 32 * (step / 2) + 16 * (lane / 4) + 4 * q + lane % 4;
        *nibble = step % 2;
    }
    static constexpr int groups(Grouping grouping) { return grouping == PLAIN ? 2 : 4; }
    static constexpr int group(Grouping grouping, int vector) {
        const int step = vector / WIDTH, q = vector % WIDTH;
        return grouping == PLAIN ? step / 2 : grouping == SPLIT ? step : step / 2 * 2 + q / 2;
    }
    template <int STEP> static HB_INLINE void decode(const Codes &codes, const Table &table, F *out) {
        const __m256i half = codes.half[STEP / 2];
        const __m256i code = _mm256_and_si256(STEP % 2 ? _mm256_srli_epi16(half, 4) : half, _mm256_set1_epi8(15));
        const __m256i p0 = _mm256_shuffle_epi8(table.plane[0], code), p1 = _mm256_shuffle_epi8(table.plane[1], code);
        const __m256i p2 = _mm256_shuffle_epi8(table.plane[2], code), p3 = _mm256_shuffle_epi8(table.plane[3], code);
        const __m256i low0 = _mm256_unpacklo_epi8(p0, p1), low1 = _mm256_unpackhi_epi8(p0, p1);
        const __m256i high0 = _mm256_unpacklo_epi8(p2, p3), high1 = _mm256_unpackhi_epi8(p2, p3);
        out[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low0, high0));
        out[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low0, high0));
        out[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low1, high1));
        out[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low1, high1));
    }

    // Word layouts: half[0] holds eight words; two permutes look up, the code's top bit chooses between them.
    static HB_INLINE Codes load_words(const uint8_t *from, int count) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane);
        return {{_mm256_maskload_epi32(reinterpret_cast<const int *>(from), mask), __m256i()}};
    }
    template <int NIBBLE> static HB_INLINE F lookup(const Codes &codes, const Table &table) {
        const __m256i index = NIBBLE ? _mm256_srli_epi32(codes.half[0], 4 * NIBBLE) : codes.half[0];
        const __m256i top = NIBBLE < 7 ? _mm256_slli_epi32(codes.half[0], 28 - 4 * NIBBLE) : codes.half[0];
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index),
                                _mm256_permutevar8x32_ps(table.high, index), _mm256_castsi256_ps(top));
    }
    static HB_INLINE void prefetch(const uint8_t *from) {
        _mm_prefetch(reinterpret_cast<const char *>(from), _MM_HINT_T1);
    }
};

}  // namespace halfbyte::HB_ISA
