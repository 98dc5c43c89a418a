// AVX-512: the codebook fits one register, so one vpermps looks up sixteen codes and ignores all higher bits.
#pragma once
#include <immintrin.h>

#include "halves.hpp"

namespace halfbyte::HB_ISA {

enum Grouping { PLAIN, SPLIT, FINE };  // see simd_portable.hpp

struct Simd {
    static constexpr int LANES = 16, STEPS = 8, WIDTH = 1, MAX_M = 8;
    static constexpr int rows(int m) { return m <= 4 ? 4 : 2; }

    using F = __m512;
    using Codes = __m512i;
    using Index = __m512i;
    using Table = __m512;

    static HB_INLINE F zero() { return _mm512_setzero_ps(); }
    static HB_INLINE F load(const float *from) { return _mm512_loadu_ps(from); }
    static HB_INLINE void store(float *to, F value) { _mm512_storeu_ps(to, value); }
    static HB_INLINE F set(float value) { return _mm512_set1_ps(value); }
    static HB_INLINE F strided(const float *from, int32_t stride) {
        const Index lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return _mm512_i32gather_ps(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(stride)), from, 4);
    }
    static HB_INLINE F mul_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static HB_INLINE F fused(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static HB_INLINE float sum(F v) {
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }

    static HB_INLINE Table table(const float *codebook) { return _mm512_loadu_ps(codebook); }
    static HB_INLINE Index index(const int32_t *lanes) { return _mm512_loadu_si512(lanes); }
    static HB_INLINE F pick(const float *scales, Index index) {
        return _mm512_permutexvar_ps(index, _mm512_castps256_ps512(_mm256_loadu_ps(scales)));
    }

    // Lane l holds bytes 4l..4l+3; vector v is nibble v of each lane.
    static HB_INLINE Codes load_unit(const uint8_t *from) { return _mm512_loadu_si512(from); }
    static HB_INLINE __m128i quarter(const uint8_t *from) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    }
    static HB_INLINE Codes load_quarters(const uint8_t *from, int64_t stride) {
        const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(quarter(from)), quarter(from + stride), 1);
        const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(quarter(from + 2 * stride)),
                                                     quarter(from + 3 * stride), 1);
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
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

    static HB_INLINE Codes load_words(const uint8_t *from, int count) {
        return _mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), from);
    }
    template <int NIBBLE> static HB_INLINE F lookup(const Codes &codes, const Table &table) {
        return _mm512_permutexvar_ps(NIBBLE ? _mm512_srli_epi32(codes, 4 * NIBBLE) : codes, table);
    }
    static HB_INLINE void prefetch(const uint8_t *from) {
        _mm_prefetch(reinterpret_cast<const char *>(from), _MM_HINT_T1);
    }
};

}  // namespace halfbyte::HB_ISA
