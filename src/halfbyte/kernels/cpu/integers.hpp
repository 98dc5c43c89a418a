// INTEGERS: bf16 activations on AVX-512 with VNNI. The codebook as 16-bit integers and x as 14-bit ones meet in
// `vpdpwssd`, two weights a lane and instruction; sums over the eight weights of a lane are exact in int32, and from
// there on it is UNITS. A codebook of whole numbers is exact, NF4 keeps 16 bits. x has one power of two a lane and unit:
// what is rounded is at most 2^-13 of the largest of eight values, so that the error is about 2e-4 of the row of x, at
// worst 3.5e-4, whatever is in it (the contract leaves 7.6e-4 for bf16 outputs, and too little for fp16).
#pragma once
#include <cmath>

#include "kernel.hpp"

namespace halfbyte::HB_ISA {

constexpr int WORDS = 4;       // vectors of 16-bit weights a unit
constexpr int X_EXPONENT = 12; // the largest of a lane's eight in [2^12, 2^13): 8 * 32767 * 255 * 2^5 < 2^31
constexpr int64_t FEWEST_N = 128;  // fewer outputs: fp32, as a rounding or two that go the other way would show in them

// The codebook times `divisor` as integers, 32 words, as vpermw looks at five bits: exact where a power of two makes it
// so, else the multiple with the smallest relative errors. A model has one or two codebooks; a search takes 0.1 ms.
inline float integer_table(const float *codebook, float *table) {
    struct Known {
        float codebook[16], table[16], divisor = 0;
    };
    thread_local Known known[4];
    thread_local int oldest = 0;
    for (const Known &each : known) {
        if (each.divisor == 0 || std::memcmp(each.codebook, codebook, 64) != 0) continue;
        std::memcpy(table, each.table, 64);
        return each.divisor;
    }
    const __m512 values = _mm512_loadu_ps(codebook);
    const float most = _mm512_reduce_max_ps(_mm512_abs_ps(values));
    const __mmask16 nonzero = _mm512_cmp_ps_mask(values, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    const auto error_of = [&](float divisor) {
        const __m512 wide = _mm512_mul_ps(values, _mm512_set1_ps(divisor));
        const __m512 lost = _mm512_sub_ps(_mm512_roundscale_ps(wide, 0), wide);
        return _mm512_reduce_add_ps(_mm512_abs_ps(_mm512_maskz_div_ps(nonzero, lost, wide)));
    };
    float divisor = 1;
    while (most * divisor * 2 <= 32767) divisor *= 2;
    while (most * divisor > 32767) divisor /= 2;
    float least = error_of(divisor);
    for (int top = 32767; top > 16383 && least > 0; --top) {
        const float error = error_of(float(top) / most);
        if (error >= least) continue;
        least = error;
        divisor = float(top) / most;
    }
    Known &kept = known[oldest++ & 3];
    std::memcpy(kept.codebook, codebook, 64);
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps(divisor))));
    _mm512_storeu_si512(kept.table, _mm512_broadcast_i64x4(words));
    kept.divisor = divisor;
    std::memcpy(table, kept.table, 64);
    return divisor;
}

// Takes a call that UNITS serves over. Lane l holds bytes 4l to 4l + 3, as there: `picks` stay.
inline void plan_integers(Job &job) {
    const HbWeight &w = *job.weight;
    if (job.path != UNITS || job.call->dtype != HB_BF16 || w.n < FEWEST_N) return;
    job.path = INTEGERS;
    job.divisor = std::frexp(integer_table(w.codebook, job.table), &job.exponent);
    for (int v = 0; v < WORDS; ++v)
        for (int word = 0; word < 32; ++word) job.order[v * 32 + word] = element_at(w, 2 * word + v / 2, v % 2);
    job.stride += Simd::LANES - 64;  // half as many floats for x, and the lanes' scales
    job.x_floats = job.x_rows * job.units * job.stride;
    const int64_t special = w.k + decode_rows_floats(w, 1);
    job.scratch_floats = larger(job.scratch_floats, special);
}

// A unit of x, 128 floats, as [4 vectors of words][scales by lane][sums by group and lane].
inline void write_integers(const Job &job, const float *x, const __m512i *places, float *out) {
    const Grouping grouping = Grouping(job.grouping);
    __m512 values[2 * WORDS], most = _mm512_setzero_ps();
    for (int i = 0; i < 2 * WORDS; ++i) {
        values[i] = _mm512_i32gather_ps(places[i], x, 4);
        most = _mm512_max_ps(most, _mm512_abs_ps(values[i]));
    }
    // lanes of zeros, and values too small to matter, keep the arithmetic among normal numbers
    const __m512 exponent = _mm512_max_ps(_mm512_getexp_ps(most), _mm512_set1_ps(-96));
    const __m512 up = _mm512_sub_ps(_mm512_set1_ps(X_EXPONENT), exponent);
    const __m512 scale = _mm512_scalef_ps(_mm512_set1_ps(1), _mm512_sub_ps(_mm512_setzero_ps(), up));
    _mm512_storeu_ps(out + 64, _mm512_scalef_ps(scale, _mm512_set1_ps(float(-job.exponent))));
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int v = 0; v < WORDS; ++v) {
        const __m512i even = _mm512_cvtps_epi32(_mm512_scalef_ps(values[2 * v], up));
        const __m512i odd = _mm512_cvtps_epi32(_mm512_scalef_ps(values[2 * v + 1], up));
        _mm512_storeu_si512(out + 16 * v, _mm512_mask_blend_epi16(0xAAAAAAAA, even, _mm512_slli_epi32(odd, 16)));
        __m512i &sum = sums[Simd::group(grouping, v)];
        sum = _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
    }
    if (job.weight->offset_kind == HB_NO_OFFSET) return;
    const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(job.divisor));
    for (int g = 0; g < Simd::groups(grouping); ++g)
        _mm512_storeu_ps(out + 80 + 16 * g, _mm512_mul_ps(_mm512_cvtepi32_ps(sums[g]), factor));
}

// As prepare() for UNITS. A row with NaN or infinities is zero here and computed by run_special.
inline void prepare_integers(const Job &job, int64_t row, float *x) {
    const int64_t padded = int64_t(job.units) * 128, start = row / Simd::MAX_M * Simd::MAX_M;
    const int64_t rows = block_rows(job.call->m - start, Simd::MAX_M);
    bool zero = row >= job.call->m;
    if (!zero) {
        const uint32_t most = widen(*job.call, row, job.weight->k, padded, x);
        normalise(most, job.weight->k, x, job.factor + row, job.special + row);
        zero = job.special[row];
    }
    if (zero) std::memset(x, 0, padded * 4);
    __m512i places[2 * WORDS];  // by vector: of each lane's first, then of its second word
    const __m512i twice = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    for (int i = 0; i < 2 * WORDS; ++i) places[i] = _mm512_i32gather_epi32(twice, job.order + i / 2 * 32 + i % 2, 4);
    float *out = job.x + start * job.units * job.stride + (row - start) * job.stride;
    for (int u = 0; u < job.units; ++u, x += 128, out += rows * job.stride) write_integers(job, x, places, out);
}

// Sums of R rows of the weight times M rows of x over a unit, exact; see Sums.
template <Loader LOADER, Grouping GROUPING, bool OFFSETS, int R, int M> struct IntegerSums {
    static constexpr int GROUPS = Simd::groups(GROUPING);
    static constexpr int STRIDE = 80 + (OFFSETS ? GROUPS * Simd::LANES : 0);
    __m512i part[R][M][GROUPS];
    __m512 total[R][M];

    template <int V> HB_INLINE void multiply(const __m512i *codes, __m512i table, const float *x) {
        __m512i w[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            w[r] = _mm512_permutexvar_epi16(V ? _mm512_srli_epi16(codes[r], 4 * V) : codes[r], table);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const __m512i value = _mm512_loadu_si512(x + m * STRIDE + V * 16);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                __m512i &sum = part[r][m][Simd::group(GROUPING, V)];
                sum = _mm512_dpwssd_epi32(V < GROUPS ? _mm512_setzero_si512() : sum, w[r], value);
            }
        }
        if constexpr (V + 1 < WORDS) multiply<V + 1>(codes, table, x);
    }

    HB_INLINE void apply(const Row *rows, const Units &units, int64_t first_scale, const float *x) {
#pragma GCC unroll 8
        for (int g = 0; g < GROUPS; ++g)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m512 scale = Simd::pick(rows[r].scale + first_scale, units.picks[g]);
                const __m512 offset =
                    OFFSETS ? Simd::pick(rows[r].offset + first_scale, units.picks[g]) : Simd::zero();
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m) {
                    const float *lanes = x + m * STRIDE + 64;
                    if (OFFSETS) total[r][m] = Simd::fused(offset, Simd::load(lanes + 16 + g * 16), total[r][m]);
                    const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(part[r][m][g]), Simd::load(lanes));
                    total[r][m] = Simd::fused(scale, sum, total[r][m]);
                }
            }
    }
};

// As span(), for INTEGERS.
template <Loader LOADER, Grouping GROUPING, bool OFFSETS, int R, int M>
void integer_span(const Row *rows, const Units &units, int64_t begin, int64_t end, float *sums) {
    IntegerSums<LOADER, GROUPING, OFFSETS, R, M> s;
    const __m512i table = _mm512_castps_si512(units.table);
    const int64_t record_bytes = units.record_bytes;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) s.total[r][m] = Simd::load(sums + (r * M + m) * Simd::LANES);
    const float *x = units.x + begin * M * s.STRIDE;
    for (int64_t u = begin; u < end; ++u, x += M * s.STRIDE) {
        __m512i codes[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const uint8_t *at = unit_at<LOADER>(rows[r].codes, u, record_bytes);
            codes[r] = load_codes<LOADER>(at, record_bytes);
            Simd::prefetch(at + units.ahead);
        }
        s.template multiply<0>(codes, table, x);
        s.apply(rows, units, u * units.scales, x);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) Simd::store(sums + (r * M + m) * Simd::LANES, s.total[r][m]);
}

template <Loader LOADER, Grouping GROUPING, bool OFFSETS> SpanFn integer_span_of(int m) {
    if (m == 1) return integer_span<LOADER, GROUPING, OFFSETS, Simd::rows(1), 1>;
    if (m == 2) return integer_span<LOADER, GROUPING, OFFSETS, Simd::rows(2), 2>;
    if (m == 4) return integer_span<LOADER, GROUPING, OFFSETS, Simd::rows(4), 4>;
    return integer_span<LOADER, GROUPING, OFFSETS, Simd::rows(Simd::MAX_M), Simd::MAX_M>;
}

// As span_for.
inline SpanFn integer_span_for(const HbWeight &w, int grouping, int m) {
    const bool offsets = w.offset_kind != HB_NO_OFFSET;
    const Loader loader = loader_of(w);
    if (loader == BYTES && grouping == PLAIN) return integer_span_of<BYTES, PLAIN, false>(m);
    if (loader == BYTES && grouping == FINE) return integer_span_of<BYTES, FINE, false>(m);
    if (loader == QUARTERS && !offsets) return integer_span_of<QUARTERS, PLAIN, false>(m);
    if (loader == QUARTERS) return integer_span_of<QUARTERS, PLAIN, true>(m);
    return integer_span_of<HALVES, SPLIT, true>(m);
}

}  // namespace halfbyte::HB_ISA
