// UNITS: lanes along K. The main kernel: codes are decoded in registers, multiplied with several rows of x, and a
// block's scale is applied once to its partial sums. Each output is the same chain of operations whatever m is, how
// many threads there are and which rows are computed together.
#pragma once
#include "decode.hpp"
#include "job.hpp"

namespace halfbyte::HB_ISA {

enum Loader {
    BYTES,     // 64 bytes that follow each other
    QUARTERS,  // four records of 16 bytes of codes
    HALVES,    // half a record of 128 bytes of codes (Q4_K)
};

// One row of the weight within a panel. `codes` is where unit 0 starts.
struct Row {
    const uint8_t *codes;
    const float *scale, *offset;
};

struct Units {
    const float *x;  // at the first row of the block of rows of x
    int64_t record_bytes;
    int scales;      // a unit
    int64_t ahead;   // bytes to prefetch ahead
    Simd::Index picks[4];
    Simd::Table table;
};

template <Loader LOADER> HB_INLINE int64_t unit_place(int64_t unit, int64_t record_bytes) {
    if constexpr (LOADER == BYTES) return unit * 64;
    if constexpr (LOADER == QUARTERS) return unit * 4 * record_bytes;
    return (unit >> 1) * record_bytes + (unit & 1) * 64;
}

template <Loader LOADER> HB_INLINE const uint8_t *unit_at(const uint8_t *codes, int64_t unit, int64_t record_bytes) {
    return codes + unit_place<LOADER>(unit, record_bytes);
}

template <Loader LOADER> HB_INLINE Simd::Codes load_codes(const uint8_t *at, int64_t record_bytes) {
    if constexpr (LOADER == QUARTERS) return Simd::load_quarters(at, record_bytes);
    return Simd::load_unit(at);
}

// Sums of R rows of the weight times M rows of x: partial sums of the unit by group, totals over units.
template <Grouping GROUPING, bool OFFSETS, int R, int M> struct Sums {
    static constexpr int GROUPS = Simd::groups(GROUPING);
    static constexpr int STRIDE = 128 + (OFFSETS ? GROUPS * Simd::LANES : 0);
    Simd::F part[R][M][GROUPS];
    Simd::F total[R][M];

    template <int STEP> HB_INLINE void multiply(const Simd::Codes *codes, const Simd::Table &table, const float *x) {
        Simd::F w[R][Simd::WIDTH];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) Simd::template decode<STEP>(codes[r], table, w[r]);
#pragma GCC unroll 8
        for (int q = 0; q < Simd::WIDTH; ++q) {
            constexpr int first = STEP * Simd::WIDTH;
            const int group = Simd::group(GROUPING, first + q);
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
                const Simd::F value = Simd::load(x + m * STRIDE + (first + q) * Simd::LANES);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    part[r][m][group] = Simd::mul_add(w[r][q], value, part[r][m][group]);
            }
        }
        if constexpr (STEP + 1 < Simd::STEPS) multiply<STEP + 1>(codes, table, x);
    }

    HB_INLINE void clear() {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
                for (int g = 0; g < GROUPS; ++g) part[r][m][g] = Simd::zero();
    }

    // The offset goes first: for a single weight the fused scale then rounds scale * code + offset once.
    HB_INLINE void apply(const Row *rows, const Units &units, int64_t first_scale, const float *x) {
#pragma GCC unroll 8
        for (int g = 0; g < GROUPS; ++g)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Simd::F scale = Simd::pick(rows[r].scale + first_scale, units.picks[g]);
                const Simd::F offset =
                    OFFSETS ? Simd::pick(rows[r].offset + first_scale, units.picks[g]) : Simd::zero();
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m) {
                    if (OFFSETS)
                        total[r][m] = Simd::fused(offset, Simd::load(x + m * STRIDE + 128 + g * Simd::LANES),
                                                  total[r][m]);
                    total[r][m] = Simd::fused(scale, part[r][m][g], total[r][m]);
                }
            }
    }
};

// Adds units [begin, end) of R rows to their totals in `sums`, [R][M][LANES].
template <Loader LOADER, Grouping GROUPING, bool OFFSETS, int R, int M>
void span(const Row *rows, const Units &units, int64_t begin, int64_t end, float *sums) {
    Sums<GROUPING, OFFSETS, R, M> s;
    const Simd::Table table = units.table;
    const int64_t record_bytes = units.record_bytes;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) s.total[r][m] = Simd::load(sums + (r * M + m) * Simd::LANES);
    const float *x = units.x + begin * M * s.STRIDE;
    for (int64_t u = begin; u < end; ++u, x += M * s.STRIDE) {
        Simd::Codes codes[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const uint8_t *at = unit_at<LOADER>(rows[r].codes, u, record_bytes);
            codes[r] = load_codes<LOADER>(at, record_bytes);
            Simd::prefetch(at + units.ahead);
        }
        s.clear();
        s.template multiply<0>(codes, table, x);
        s.apply(rows, units, u * units.scales, x);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) Simd::store(sums + (r * M + m) * Simd::LANES, s.total[r][m]);
}

using SpanFn = void (*)(const Row *, const Units &, int64_t, int64_t, float *);

template <Loader LOADER, Grouping GROUPING, bool OFFSETS> SpanFn span_of(int m) {
    if (m == 1) return span<LOADER, GROUPING, OFFSETS, Simd::rows(1), 1>;
    if (m == 2) return span<LOADER, GROUPING, OFFSETS, Simd::rows(2), 2>;
    if (m == 4) return span<LOADER, GROUPING, OFFSETS, Simd::rows(4), 4>;
    return span<LOADER, GROUPING, OFFSETS, Simd::rows(Simd::MAX_M), Simd::MAX_M>;
}

inline Loader loader_of(const HbWeight &w) { return w.elements == 2 ? BYTES : w.elements == 32 ? QUARTERS : HALVES; }

// The instance for a format, null where none was compiled.
inline SpanFn span_for(const HbWeight &w, int grouping, int m) {
    const bool offsets = w.offset_kind != HB_NO_OFFSET;
    const Loader loader = loader_of(w);
    if (loader == BYTES && !offsets && grouping == PLAIN) return span_of<BYTES, PLAIN, false>(m);
    if (loader == BYTES && !offsets && grouping == FINE) return span_of<BYTES, FINE, false>(m);
    if (loader == QUARTERS && !offsets && grouping == PLAIN) return span_of<QUARTERS, PLAIN, false>(m);
    if (loader == QUARTERS && offsets && grouping == PLAIN) return span_of<QUARTERS, PLAIN, true>(m);
    if (loader == HALVES && offsets && grouping == SPLIT) return span_of<HALVES, SPLIT, true>(m);
    return nullptr;
}

// The element of a unit that a byte's nibble holds.
inline int element_at(const HbWeight &w, int byte, int nibble) {
    const int half = w.span / 2;
    return byte / half * w.span + byte % half + half * (nibble ^ (w.high_first ? 1 : 0));
}

// Whether lanes meet one block a group; fills job.picks.
inline bool try_grouping(const HbWeight &w, Job &job, Grouping grouping) {
    bool seen[4][16] = {};
    for (int v = 0; v < 128 / Simd::LANES; ++v)
        for (int lane = 0; lane < Simd::LANES; ++lane) {
            const int group = Simd::group(grouping, v), block = job.order[v * Simd::LANES + lane] / job.block;
            if (seen[group][lane] && job.picks[group][lane] != block) return false;
            seen[group][lane] = true;
            job.picks[group][lane] = block;
        }
    job.grouping = grouping;
    return span_for(w, grouping, 1) != nullptr;
}

// Tries to serve the call with this path: false for rows that start inside a block of 16 or a byte.
inline bool plan_units(Job &job) {
    const HbWeight &w = *job.weight;
    const bool known = w.elements == 2 ? w.record_bytes == 1 && w.span == 2
                     : w.elements == 32 ? w.span == 32 && w.k % 32 == 0
                                        : w.elements == 256 && w.span == 64 && w.k % 256 == 0;
    if (w.layout != HB_RECORDS || !known) return false;
    int block = 128;
    while (block > 8 && (w.blocksize % block || w.k % block)) block /= 2;
    if (block < 16) return false;
    job.block = block;
    for (int v = 0; v < 128 / Simd::LANES; ++v)
        for (int lane = 0; lane < Simd::LANES; ++lane) {
            int byte = 0, nibble = 0;
            Simd::place(v, lane, &byte, &nibble);
            job.order[v * Simd::LANES + lane] = element_at(w, byte, nibble);
        }
    if (!try_grouping(w, job, PLAIN) && !try_grouping(w, job, SPLIT) && !try_grouping(w, job, FINE)) return false;
    job.path = UNITS;
    job.units = int32_t(ceil_div(w.k, 128));
    job.row_bytes = w.k / w.elements * w.record_bytes;
    job.row_blocks = w.k % w.blocksize ? 0 : w.k / w.blocksize;
    job.stride = 128 + (w.offset_kind == HB_NO_OFFSET ? 0 : Simd::groups(Grouping(job.grouping)) * Simd::LANES);
    return true;
}

}  // namespace halfbyte::HB_ISA
