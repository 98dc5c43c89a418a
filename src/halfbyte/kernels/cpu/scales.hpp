// The only place where formats differ: how a block's scale and offset become fp32.
// Every product and sum is one fp32 rounding, as in formats/codecs.py; compile without contraction.
#pragma once
#include "halves.hpp"

namespace halfbyte::HB_ISA {

HB_INLINE const uint8_t *bytes(const void *pointer) { return static_cast<const uint8_t *>(pointer); }

inline void read_nested(const HbWeight &w, int64_t first, int64_t count, float *scale) {
    const uint8_t *codes = bytes(w.scales);
    const float offset = *w.constant;
    for (int64_t done = 0; done < count;) {
        const int64_t block = first + done, run = smaller(count - done, 256 - (block & 255));
        const float second = w.second[block >> 8];
        for (int64_t i = 0; i < run; ++i) scale[done + i] = w.map[codes[block + i]] * second + offset;
        done += run;
    }
}

// The eight 6-bit scales and minima of a Q4_K record, four bytes at a time (ggml, get_scale_min_k4): of the first
// four, bits 0..5 of a byte each; of the last four, a nibble each below the top two bits of those bytes.
HB_INLINE void six_bits(const uint8_t *record, uint8_t *scale, uint8_t *minimum) {
    const uint32_t low = read<uint32_t>(record + 4), mid = read<uint32_t>(record + 8);
    const uint32_t last = read<uint32_t>(record + 12);
    const uint32_t scales[2] = {low & 0x3F3F3F3F, (last & 0x0F0F0F0F) | ((low >> 2) & 0x30303030)};
    const uint32_t minima[2] = {mid & 0x3F3F3F3F, ((last >> 4) & 0x0F0F0F0F) | ((mid >> 2) & 0x30303030)};
    std::memcpy(scale, scales, 8);
    std::memcpy(minimum, minima, 8);
}

// Rows start on records, so whole records are asked for.
inline void read_kquant(const HbWeight &w, int64_t first, int64_t count, float *scale, float *offset) {
    const uint8_t *record = bytes(w.codes) + first / 8 * w.record_bytes;
    for (int64_t i = 0; i < count; i += 8, record += w.record_bytes) {
        uint8_t scales[8], minima[8];
        six_bits(record, scales, minima);
        const float d = fp16_to_float(read<uint16_t>(record)), minimum = fp16_to_float(read<uint16_t>(record + 2));
        for (int j = 0; j < 8; ++j) scale[i + j] = d * float(scales[j]);
        for (int j = 0; j < 8; ++j) offset[i + j] = -(minimum * float(minima[j]));
    }
}

// The fp16 at byte `start` of each record: two bytes after it belong to the record, so a gather of dwords may read them.
HB_INLINE void read_record_halves(const HbWeight &w, int64_t first, int64_t count, int start, float *out) {
    const uint8_t *record = bytes(w.codes) + first * w.record_bytes + start;
    int64_t i = 0;
#if defined(__AVX512F__)
    const __m512i steps = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                             _mm512_set1_epi32(w.record_bytes));
    for (; i + 16 <= count; i += 16) {
        const __m512i dwords = _mm512_i32gather_epi32(steps, record + i * w.record_bytes, 1);
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(dwords)));
    }
#endif
    for (; i < count; ++i) out[i] = fp16_to_float(read<uint16_t>(record + i * w.record_bytes));
}

// Floats, then zeros up to `padded`, a multiple of 16. They are few: memcpy would take longer to decide how than to copy.
HB_INLINE void copy_padded(const uint8_t *from, int64_t count, int64_t padded, float *to) {
#if defined(__AVX512F__)
    for (int64_t i = 0; i < padded; i += 16) {
        const int64_t rest = larger(0, smaller(count - i, 16));
        _mm512_storeu_ps(to + i, _mm512_maskz_loadu_ps(__mmask16((1u << rest) - 1), from + i * 4));
    }
#else
    std::memcpy(to, from, count * 4);
    for (int64_t i = count; i < padded; ++i) to[i] = 0;
#endif
}

// Scales and, where the format has them, offsets of blocks [first, first + count) along the flattened [n, k].
inline void read_scales(const HbWeight &w, int64_t first, int64_t count, float *scale, float *offset) {
    const uint8_t *in = bytes(w.scales) + first;
    switch (w.scale_kind) {
        case HB_ABSMAX: std::memcpy(scale, bytes(w.scales) + first * 4, count * 4); break;
        case HB_NESTED: read_nested(w, first, count, scale); break;
        case HB_HALF: read_record_halves(w, first, count, w.scale_start, scale); break;
        case HB_KQUANT: read_kquant(w, first, count, scale, offset); break;
        case HB_E8M0:
            for (int64_t i = 0; i < count; ++i) scale[i] = e8m0_to_float(in[i]);
            break;
        case HB_E8M0_RECORD:
            for (int64_t i = 0; i < count; ++i) scale[i] = e8m0_to_float(bytes(w.codes)[(first + i) * w.record_bytes]);
            break;
        case HB_E4M3:
            for (int64_t i = 0; i < count; ++i) scale[i] = e4m3_to_float(in[i]) * *w.constant;
            break;
        default: break;  // HB_GROUP belongs to word layouts, see read_group
    }
    if (w.offset_kind == HB_HALF_OFFSET) read_record_halves(w, first, count, w.offset_start, offset);
}

// Scales and offsets of columns [n0, n0 + count) of one group of a word layout (GPTQ, AWQ).
inline void read_group(const HbWeight &w, int64_t group, int64_t n0, int64_t count, float *scale, float *offset) {
    const uint8_t *scales = bytes(w.scales) + (group * w.n + n0) * 2;
    const uint8_t *zeros = bytes(w.zeros) + group * (w.n / 8) * 4;
    for (int64_t i = 0; i < count; ++i) scale[i] = half_to_float(read<uint16_t>(scales + i * 2), w.scale_dtype);
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t word = read<uint32_t>(zeros + (n0 + i) / 8 * 4);
        const uint32_t zero = ((word >> (4 * w.zero_order[(n0 + i) & 7])) & 0xF) + uint32_t(w.zero_plus_one);
        offset[i] = -scale[i] * float(zero);
    }
}

// One row's scales as if blocks had `block` weights: a power of two that divides both k and the format's blocksize,
// so that every row starts on a block. Replicates in place, from the last one down. Returns how many there are.
// row_blocks: see Job.
inline int64_t read_row_scales(const HbWeight &w, int64_t row, int64_t row_blocks, int block, float *scale,
                               float *offset) {
    if (row_blocks && block == w.blocksize) {  // without a division
        read_scales(w, row * row_blocks, row_blocks, scale, offset);
        return row_blocks;
    }
    const int64_t first = row * w.k, count = w.k / block;
    const int64_t begin = first / w.blocksize, end = ceil_div(first + w.k, w.blocksize);
    read_scales(w, begin, end - begin, scale, offset);
    const int64_t phase = first - begin * w.blocksize;
    for (int64_t i = count; i-- > 0;) {
        const int64_t source = (phase + i * block) / w.blocksize;
        scale[i] = scale[source];
        if (w.offset_kind != HB_NO_OFFSET) offset[i] = offset[source];
    }
    return count;
}

}  // namespace halfbyte::HB_ISA
