// Rows of true values, for any layout: unpack the codes to bytes, look them up, scale. Serves large M, where torch
// multiplies, and the shapes that the other kernels do not (rows that start inside a byte or a block).
#pragma once
#include "scales.hpp"

namespace halfbyte::HB_ISA {

// Codes of weights [first, first + count) along the flattened [n, k] of byte records.
inline void unpack_records(const HbWeight &w, int64_t first, int64_t count, uint8_t *out) {
    const int half = w.span / 2;
    int64_t i = 0;
    if (w.elements == 2) {
        const uint8_t *in = bytes(w.codes);
        const int swap = w.high_first ? 4 : 0;
        for (; i < count && (first + i) & 1; ++i) out[i] = (in[(first + i) / 2] >> (4 - swap)) & 15;
        in += (first + i) / 2;
        const int64_t pairs = (count - i) / 2;
        for (int64_t j = 0; j < pairs; ++j) {
            out[i + 2 * j] = (in[j] >> swap) & 15;
            out[i + 2 * j + 1] = (in[j] >> (4 - swap)) & 15;
        }
        i += pairs * 2;
        if (i < count) out[i] = (in[pairs] >> swap) & 15;
        return;
    }
    while (i < count) {  // a run lies in one half of a span, where bytes follow each other
        const int64_t at = first + i, inside = at % w.elements;
        const int64_t in_span = inside % w.span, in_half = in_span % half;
        const int shift = ((in_span >= half) != (w.high_first != 0)) ? 4 : 0;
        const uint8_t *in = bytes(w.codes) + at / w.elements * w.record_bytes + w.record_start + inside / w.span * half;
        const int64_t run = smaller(half - in_half, count - i);
        for (int64_t j = 0; j < run; ++j) out[i + j] = (in[in_half + j] >> shift) & 15;
        i += run;
    }
}

// Codes [rows, k] of a word layout.
inline void unpack_words(const HbWeight &w, int64_t row, int64_t rows, uint8_t *out) {
    const uint8_t *in = bytes(w.codes);
    if (w.layout == HB_WORDS_K) {
        for (int64_t j = 0; j < w.k / 8; ++j)
            for (int64_t r = 0; r < rows; ++r) {
                const uint32_t word = read<uint32_t>(in + (j * w.n + row + r) * 4);
                uint8_t *to = out + r * w.k + j * 8;
                for (int i = 0; i < 8; ++i) to[i] = (word >> (4 * w.order[i])) & 15;
            }
        return;
    }
    for (int64_t j = 0; j < w.k; ++j)
        for (int64_t r = 0; r < rows; ++r) {
            const uint32_t word = read<uint32_t>(in + (j * (w.n / 8) + (row + r) / 8) * 4);
            out[r * w.k + j] = (word >> (4 * w.order[(row + r) & 7])) & 15;
        }
}

// `count` weights of one block: one rounding each.
HB_INLINE void scale_codes(const uint8_t *codes, int64_t count, const float *codebook, float scale, float offset,
                           bool has_offset, float *out) {
    int64_t i = 0;
#if defined(__AVX512F__)
    const __m512 table = _mm512_loadu_ps(codebook), scales = _mm512_set1_ps(scale), offsets = _mm512_set1_ps(offset);
    for (; i + 16 <= count; i += 16) {
        const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i *>(codes + i));
        const __m512 values = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(narrow), table);
        _mm512_storeu_ps(out + i, has_offset ? _mm512_fmadd_ps(values, scales, offsets) : _mm512_mul_ps(values, scales));
    }
#endif
    if (has_offset) {
        for (; i < count; ++i) out[i] = float(double(codebook[codes[i]]) * scale + double(offset));
    } else {
        for (; i < count; ++i) out[i] = codebook[codes[i]] * scale;
    }
}

inline int64_t decode_rows_floats(const HbWeight &w, int64_t rows) {
    const int64_t tile = w.layout == HB_RECORDS ? 1 : rows;
    return 2 * (w.k / w.blocksize + 2) * tile + w.k * tile / 4 + 64;
}

inline int64_t decode_floats(const HbWeight &w, int64_t rows) {
    return decode_rows_floats(w, rows) + w.k * (w.layout == HB_RECORDS ? 1 : rows);
}

// fp32 [rows, k], `stride` floats apart. scratch: decode_rows_floats(w, rows).
inline void decode_rows(const HbWeight &w, int64_t row, int64_t rows, float *out, int64_t stride, float *scratch) {
    const int64_t k = w.k, size = w.blocksize, most = ceil_div(k, size) + 1;
    float *scale = scratch, *offset = scale + most * (w.layout == HB_RECORDS ? 1 : rows);
    uint8_t *codes = reinterpret_cast<uint8_t *>(offset + most * (w.layout == HB_RECORDS ? 1 : rows));
    const bool has_offset = w.offset_kind != HB_NO_OFFSET;
    if (w.layout != HB_RECORDS) {
        unpack_words(w, row, rows, codes);
        for (int64_t g = 0; g < k / size; ++g) read_group(w, g, row, rows, scale + g * rows, offset + g * rows);
    }
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t first = (row + r) * k;
        if (w.layout != HB_RECORDS) {
            for (int64_t g = 0; g < k / size; ++g)
                scale_codes(codes + r * k + g * size, size, w.codebook, scale[g * rows + r], offset[g * rows + r],
                            has_offset, out + r * stride + g * size);
            continue;
        }
        const int64_t begin = first / size, end = ceil_div(first + k, size);
        unpack_records(w, first, k, codes);
        read_scales(w, begin, end - begin, scale, offset);
        for (int64_t b = begin; b < end; ++b) {
            const int64_t from = larger(b * size, first) - first, to = smaller((b + 1) * size, first + k) - first;
            scale_codes(codes + from, to - from, w.codebook, scale[b - begin], has_offset ? offset[b - begin] : 0,
                        has_offset, out + r * stride + from);
        }
    }
}

// Isa::decode: fp32, or a bf16 term and the bf16 of what it leaves, side by side: 17 bits or more of each weight.
inline void decode(const HbWeight &w, int64_t row, int64_t rows, void *out, int64_t stride, bool split,
                   float *scratch) {
    if (!split) return decode_rows(w, row, rows, static_cast<float *>(out), stride, scratch);
    const int64_t step = w.layout == HB_RECORDS ? 1 : rows;
    float *wide = scratch + decode_rows_floats(w, step);
    for (int64_t done = 0; done < rows; done += step) {
        decode_rows(w, row + done, step, wide, w.k, scratch);
        for (int64_t r = 0; r < step; ++r) {
            uint16_t *high = static_cast<uint16_t *>(out) + (done + r) * stride, *low = high + w.k;
            for (int64_t i = 0; i < w.k; ++i) {
                const float value = wide[r * w.k + i];
                high[i] = float_to_bf16(value);
                low[i] = float_to_bf16(value - bf16_to_float(high[i]));
            }
        }
    }
}

}  // namespace halfbyte::HB_ISA
