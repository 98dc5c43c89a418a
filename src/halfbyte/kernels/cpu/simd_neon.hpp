// NEON (aarch64): the fp32 codebook as four planes of 16 bytes. One TBL per plane looks up 16 codes, and transposes
// (TRN) put the bytes of each value together; they leave lane l with a byte from the l-th quarter of its 16, so that
// even blocks of 16 weights meet their lanes alike in every vector and four groups serve all formats.
#pragma once
#include <arm_neon.h>

#include "halves.hpp"

namespace halfbyte::HB_ISA {

enum Grouping { PLAIN, SPLIT, FINE };  // see simd_portable.hpp

struct Simd {
    static constexpr int LANES = 4, STEPS = 8, WIDTH = 4, MAX_M = 4;
    static constexpr int rows(int) { return 1; }  // two would spill

    using F = float32x4_t;
    using Index = uint8x16_t;
    struct Codes { uint8x16_t piece[4]; };
    struct Table {
        uint8x16_t plane[4];
        uint8x16x4_t whole;
    };

    static HB_INLINE F zero() { return vdupq_n_f32(0); }
    static HB_INLINE F load(const float *from) { return vld1q_f32(from); }
    static HB_INLINE void store(float *to, F value) { vst1q_f32(to, value); }
    static HB_INLINE F set(float value) { return vdupq_n_f32(value); }
    static HB_INLINE F strided(const float *from, int32_t stride) {
        const F value = {from[0], from[stride], from[2 * stride], from[3 * stride]};
        return value;
    }
    static HB_INLINE F mul_add(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static HB_INLINE F fused(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static HB_INLINE float sum(F v) { return vaddvq_f32(v); }

    static HB_INLINE Table table(const float *codebook) {
        Table table;
        for (int p = 0; p < 4; ++p) {
            uint8_t plane[16];
            for (int i = 0; i < 16; ++i) plane[i] = uint8_t(as_bits(codebook[i]) >> (8 * p));
            table.plane[p] = vld1q_u8(plane);
            table.whole.val[p] = vreinterpretq_u8_f32(vld1q_f32(codebook + 4 * p));
        }
        return table;
    }
    // The bytes of the chosen scales among eight, for one TBL.
    static HB_INLINE Index index(const int32_t *lanes) {
        const uint32x4_t spread = vmulq_n_u32(vreinterpretq_u32_s32(vld1q_s32(lanes)), 0x04040404u);
        return vreinterpretq_u8_u32(vaddq_u32(spread, vdupq_n_u32(0x03020100u)));
    }
    static HB_INLINE F pick(const float *scales, Index index) {
        const uint8x16x2_t eight = {
            {vreinterpretq_u8_f32(vld1q_f32(scales)), vreinterpretq_u8_f32(vld1q_f32(scales + 4))}};
        return vreinterpretq_f32_u8(vqtbl2q_u8(eight, index));
    }

    static HB_INLINE Codes load_unit(const uint8_t *from) { return load_quarters(from, 16); }
    static HB_INLINE Codes load_quarters(const uint8_t *from, int64_t stride) {
        return {{vld1q_u8(from), vld1q_u8(from + stride), vld1q_u8(from + 2 * stride), vld1q_u8(from + 3 * stride)}};
    }
    // Step s decodes nibble s % 2 of the 16 bytes of piece s / 2; its vector q holds bytes q, q + 4, q + 8, q + 12.
    static constexpr void place(int vector, int lane, int *byte, int *nibble) {
        const int step = vector / WIDTH, q = vector % WIDTH;
        *byte = 16 * (step / 2) + 4 * lane + q;
        *nibble = step % 2;
    }
    static constexpr int groups(Grouping) { return 4; }
    static constexpr int group(Grouping grouping, int vector) {
        const int step = vector / WIDTH;
        return grouping == SPLIT ? step / 4 * 2 + step % 2 : step / 2;
    }
    template <int STEP> static HB_INLINE void decode(const Codes &codes, const Table &table, F *out) {
        const uint8x16_t piece = codes.piece[STEP / 2];
        const uint8x16_t code = STEP % 2 ? vshrq_n_u8(piece, 4) : vandq_u8(piece, vdupq_n_u8(15));
        const uint8x16_t p0 = vqtbl1q_u8(table.plane[0], code), p1 = vqtbl1q_u8(table.plane[1], code);
        const uint8x16_t p2 = vqtbl1q_u8(table.plane[2], code), p3 = vqtbl1q_u8(table.plane[3], code);
        const auto even = [](uint8x16_t a, uint8x16_t b) { return vreinterpretq_u16_u8(vtrn1q_u8(a, b)); };
        const auto odd = [](uint8x16_t a, uint8x16_t b) { return vreinterpretq_u16_u8(vtrn2q_u8(a, b)); };
        const uint16x8_t low0 = even(p0, p1), low1 = odd(p0, p1), high0 = even(p2, p3), high1 = odd(p2, p3);
        out[0] = vreinterpretq_f32_u16(vtrn1q_u16(low0, high0));
        out[1] = vreinterpretq_f32_u16(vtrn1q_u16(low1, high1));
        out[2] = vreinterpretq_f32_u16(vtrn2q_u16(low0, high0));
        out[3] = vreinterpretq_f32_u16(vtrn2q_u16(low1, high1));
    }

    // Word layouts: piece[0] holds four words; one TBL over the 64 bytes of the codebook looks up a nibble of each.
    static HB_INLINE Codes load_words(const uint8_t *from, int count) {
        Codes codes{};
        if (count == LANES) {
            codes.piece[0] = vld1q_u8(from);
        } else {
            uint8_t some[16] = {};
            std::memcpy(some, from, 4 * count);
            codes.piece[0] = vld1q_u8(some);
        }
        return codes;
    }
    template <int NIBBLE> static HB_INLINE F lookup(const Codes &codes, const Table &table) {
        const uint32x4_t words = vreinterpretq_u32_u8(codes.piece[0]);
        // four times the code: the offset of its entry, then of each of its bytes
        const uint32x4_t at = NIBBLE ? vshrq_n_u32(words, NIBBLE ? 4 * NIBBLE - 2 : 1) : vshlq_n_u32(words, 2);
        const uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100u), vandq_u32(at, vdupq_n_u32(0x3C)), 0x01010101u);
        return vreinterpretq_f32_u8(vqtbl4q_u8(table.whole, vreinterpretq_u8_u32(bytes)));
    }
    static HB_INLINE void prefetch(const uint8_t *from) { __builtin_prefetch(from, 0, 2); }
};

}  // namespace halfbyte::HB_ISA
