// TILES: bf16 activations on AMX. Thirty-two rows of the weight are decoded to bf16 tables (two terms where one does not
// hold the codebook: 17 bits or more of each value), multiplied by up to 64 rows of x from one decode, and a block's
// scale is applied to its fp32 sums. A row's bits do not depend on the other rows: each is a column of its own.
#pragma once
#include "kernel.hpp"

namespace halfbyte::HB_ISA {

constexpr int TILE_ROWS = 16, PANEL_ROWS = 2 * TILE_ROWS;
constexpr int STEP_K = 32, UNIT_STEPS = 4;  // a step is the K of one tile multiply, a quarter of a unit
constexpr int STEP_VALUES = PANEL_ROWS * STEP_K, TERM_VALUES = UNIT_STEPS * STEP_VALUES;

// How the codes of a unit become the steps' vectors: by 32-byte halves or by 16-byte quarters, with a shift by lane.
struct Unpack {
    bool quarters;
    int64_t stride;       // bytes between quarters
    __m512i shift[2];     // of the first and second step of a half; quarters use the first
    __m512i high, low;    // tables of 32 words: the codebook twice, as vpermw looks at five bits
    bool two;             // whether the second term is needed
};

HB_INLINE int shift_at(bool quarters, bool halves, int step, int i) {
    if (quarters) return 4 * (i / 8);
    return halves ? 8 * (i / 16) + 4 * (step & 1) : 4 * (i / 16) + 8 * (step & 1);
}

inline void tables(const float *codebook, Unpack &u) {
    alignas(64) uint16_t high[32], low[32];
    u.two = false;
    for (int i = 0; i < 32; ++i) {
        const float value = codebook[i & 15];
        high[i] = float_to_bf16(value);
        low[i] = float_to_bf16(value - bf16_to_float(high[i]));
        u.two |= low[i] != 0;
    }
    u.high = _mm512_load_si512(high);
    u.low = _mm512_load_si512(low);
}

inline Unpack unpack_of(const Job &job) {
    const HbWeight &w = *job.weight;
    const bool halves = loader_of(w) == HALVES;
    Unpack u;
    u.quarters = job.block == 32 && !halves;
    u.stride = loader_of(w) == QUARTERS ? w.record_bytes : 16;
    for (int step = 0; step < 2; ++step) {
        alignas(64) uint16_t shift[32];
        for (int i = 0; i < 32; ++i) shift[i] = uint16_t(shift_at(u.quarters, halves, step, i));
        u.shift[step] = _mm512_load_si512(shift);
    }
    tables(w.codebook, u);
    return u;
}

// The element of the unit at place i of a step, from the same shifts.
inline int element_of(const Job &job, bool quarters, int step, int i) {
    const HbWeight &w = *job.weight;
    const int shift = shift_at(quarters, loader_of(w) == HALVES, step, i);
    const int word = quarters ? 8 * step + i % 8 : 16 * (step / 2) + i % 16;
    return element_at(w, 2 * word + shift / 8, shift / 4 % 2);
}

// Takes a call that UNITS serves over, where the tiles can.
inline bool plan_tiles(Job &job) {
    const HbWeight &w = *job.weight;
    const int64_t m = job.call->m;
    if (job.path != UNITS || job.call->dtype != HB_BF16 || job.block < 32 || m > 64) return false;
    if (job.block > 64) job.block = 64;
    if (loader_of(w) == BYTES && job.block == 32 && w.span != 2) return false;
    const bool quarters = job.block == 32 && loader_of(w) != HALVES;
    for (int step = 0; step < UNIT_STEPS; ++step)
        for (int i = 0; i < STEP_K; ++i) job.order[step * STEP_K + i] = element_of(job, quarters, step, i);
    const int64_t columns = m <= 16 ? m : 16, tiles = ceil_div(m, 16), scales = 128 / job.block;
    job.path = TILES;
    // several panels a task: a panel prefetches the next one, which has to be this thread's
    job.panel = PANEL_ROWS * larger(1, smaller(4, w.n / (PANEL_ROWS * 8 * larger(1, job.call->threads))));
    job.tasks = ceil_div(w.n, job.panel);
    job.x_rows = columns * tiles;
    job.stride = int32_t(columns);
    job.x_floats = tiles * job.units * (UNIT_STEPS * 16 * columns + scales * 16);
    const int64_t special = ceil_div(w.k, 128) * 128 + decode_rows_floats(w, 1);
    job.scratch_floats = larger(panel_floats(job) + 16 + 2 * TERM_VALUES + 4 * PANEL_ROWS * 16 + 4 * 256 + 64, special);
    return true;
}

// One row of x into its column of the steps' tiles, [tile][step][pair of k][column][2], and its sums by block.
inline void prepare_tiles(const Job &job, int64_t row, float *x) {
    const HbWeight &w = *job.weight;
    const int64_t padded = int64_t(job.units) * 128, columns = job.stride, scales = 128 / job.block;
    if (row < job.call->m) {
        const uint32_t most = widen(*job.call, row, w.k, padded, x);
        normalise(most, w.k, x, job.factor + row, job.special + row);
    } else {
        std::memset(x, 0, padded * 4);
    }
    const int64_t tile = row / 16, column = row % 16, tiles = job.x_rows / columns;
    uint16_t *out = reinterpret_cast<uint16_t *>(job.x) + tile * padded * columns + column * 2;
    float *sums = job.x + tiles * job.units * UNIT_STEPS * 16 * columns + tile * job.units * scales * 16 + column;
    for (int64_t u = 0; u < job.units; ++u, x += 128) {
        for (int i = 0; i < 128; i += 2, out += columns * 2) {
            out[0] = float_to_bf16(x[job.order[i]]);
            out[1] = float_to_bf16(x[job.order[i + 1]]);
        }
        if (w.offset_kind == HB_NO_OFFSET) continue;
        for (int64_t b = 0; b < scales; ++b, sums += 16) {
            float sum = 0;
            for (int64_t i = 0; i < job.block; ++i) sum += x[b * job.block + i];
            *sums = sum;
        }
    }
}

// One row's unit: four vectors of the first term and, where needed, of the second, `STEP_VALUES` apart.
template <bool QUARTERS_, bool TWO>
HB_INLINE void unpack_unit(const Unpack &u, const uint8_t *at, uint16_t *high, uint16_t *low) {
#pragma GCC unroll 4
    for (int step = 0; step < UNIT_STEPS; ++step) {
        const __m512i codes =
            QUARTERS_ ? _mm512_broadcast_i32x4(Simd::quarter(at + step * u.stride))
                      : _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at + step / 2 * 32)));
        const __m512i index = _mm512_srlv_epi16(codes, u.shift[QUARTERS_ ? 0 : step & 1]);
        _mm512_store_si512(high + step * STEP_VALUES, _mm512_permutexvar_epi16(index, u.high));
        if (TWO) _mm512_store_si512(low + step * STEP_VALUES, _mm512_permutexvar_epi16(index, u.low));
    }
}

// Tile registers: 0..3 sums of two tiles of rows by two blocks, four chains, as each multiply waits for the last one of
// its chain; 4 and 5 the weight's two terms; 6 and 7 x by block.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
    explicit TileConfig(int columns) {
        for (int i = 0; i < 8; ++i) {
            rows[i] = TILE_ROWS;
            bytes[i] = uint16_t(i == 4 || i == 5 ? 64 : columns * 4);
        }
    }
};

// The intrinsics print their register's name, so it has to be a literal; GCC's do not say that they read memory.
HB_INLINE void memory_barrier() { __asm__ volatile("" ::: "memory"); }

template <int SUM, bool TWO> HB_INLINE void multiply_tile(const uint16_t *high) {
    _tile_loadd(4, high, 2 * STEP_K);
    if constexpr (SUM == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (SUM == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (SUM == 2) _tile_dpbf16ps(2, 4, 6);
    if constexpr (SUM == 3) _tile_dpbf16ps(3, 4, 7);
    if constexpr (TWO) _tile_loadd(5, high + TERM_VALUES, 2 * STEP_K);
    if constexpr (SUM == 0 && TWO) _tile_dpbf16ps(0, 5, 6);
    if constexpr (SUM == 1 && TWO) _tile_dpbf16ps(1, 5, 7);
    if constexpr (SUM == 2 && TWO) _tile_dpbf16ps(2, 5, 6);
    if constexpr (SUM == 3 && TWO) _tile_dpbf16ps(3, 5, 7);
}

HB_INLINE void clear_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

HB_INLINE void store_tiles(float *to) {
    _tile_stored(0, to, 64);
    _tile_stored(1, to + 256, 64);
    _tile_stored(2, to + 512, 64);
    _tile_stored(3, to + 768, 64);
    memory_barrier();
}

struct TilePanel {
    const Job &job;
    Panel panel;
    Unpack unpack;
    int64_t columns, tiles, scales, tile_values;
    const uint16_t *x;
    const float *sums_of_x;
    uint16_t *decoded;  // two buffers of [term][step][row][32]: one is filled while the other is multiplied
    float *sums;        // [tile of x][row][16]
    float *block_sums;  // [tile register][16][16]
    const uint8_t *ahead;  // the next panel's codes, and how many bytes of them to prefetch a unit
    int64_t ahead_a_unit;

    TilePanel(const Job &job, int64_t task, float *scratch) : job(job), panel(job, task, scratch, span_for) {
        unpack = unpack_of(job);
        columns = job.stride;
        tiles = job.x_rows / columns;
        scales = 128 / job.block;
        tile_values = int64_t(job.units) * 128 * columns;
        x = reinterpret_cast<const uint16_t *>(job.x);
        sums_of_x = job.x + tiles * tile_values / 2;
        float *rest = scratch + ceil_div(panel_floats(job), 16) * 16;
        decoded = reinterpret_cast<uint16_t *>(rest);
        sums = rest + 2 * TERM_VALUES;
        block_sums = sums + 4 * PANEL_ROWS * 16;
    }

    template <bool QUARTERS_, bool TWO> void decode_unit(int64_t u) {
        uint16_t *high = decoded + (u & 1) * 2 * TERM_VALUES, *low = high + TERM_VALUES;
        const int64_t record_bytes = job.weight->record_bytes;
        const Loader loader = loader_of(*job.weight);
        const int64_t place = loader == BYTES ? u * 64
                            : loader == QUARTERS ? u * 4 * record_bytes
                                                 : (u >> 1) * record_bytes + (u & 1) * 64;
        const bool last = u + 1 == job.units;
        for (int64_t i = u * ahead_a_unit; i < (u + 1) * ahead_a_unit; i += 64) Simd::prefetch(ahead + i);
        for (int r = 0; r < PANEL_ROWS; ++r) {
            const int64_t row = smaller(r, panel.count - 1);
            const uint8_t *at = panel.rows[row].codes + place;
            if (last && row >= panel.staged_from) at = panel.staged + row * STAGED;
            unpack_unit<QUARTERS_, TWO>(unpack, at, high + r * STEP_K, low + r * STEP_K);
        }
    }

    // Adds two blocks' sums, in order, to the totals of 32 rows for one tile of x.
    void add_blocks(int64_t tile, int64_t scale) {
        const bool offsets = job.weight->offset_kind != HB_NO_OFFSET;
        const float *of_x = sums_of_x + (tile * job.units * scales + scale) * 16;
        const int64_t stride = scale_stride(job);
        float *total = sums + tile * PANEL_ROWS * 16;
#pragma GCC unroll 4
        for (int r = 0; r < PANEL_ROWS; ++r) {
            const float *block = block_sums + r / 16 * 512 + r % 16 * 16;
            const float *factor = panel.scales + r * stride + scale, *offset = panel.offsets + r * stride + scale;
            __m512 sum = _mm512_load_ps(total + r * 16);
            if (offsets) sum = _mm512_fmadd_ps(_mm512_set1_ps(offset[0]), _mm512_loadu_ps(of_x), sum);
            sum = _mm512_fmadd_ps(_mm512_set1_ps(factor[0]), _mm512_load_ps(block), sum);
            if (offsets) sum = _mm512_fmadd_ps(_mm512_set1_ps(offset[1]), _mm512_loadu_ps(of_x + 16), sum);
            sum = _mm512_fmadd_ps(_mm512_set1_ps(factor[1]), _mm512_load_ps(block + 256), sum);
            _mm512_store_ps(total + r * 16, sum);
        }
    }

    template <bool TWO> void multiply_unit(int64_t u) {
        const uint16_t *high = decoded + (u & 1) * 2 * TERM_VALUES;
        const int64_t steps = job.block / STEP_K;
        memory_barrier();
        for (int64_t tile = 0; tile < tiles; ++tile)
            for (int64_t pair = 0; pair < scales; pair += 2) {
                const uint16_t *mine = x + tile * tile_values + u * UNIT_STEPS * STEP_K * columns;
                clear_tiles();
                for (int64_t step = pair * steps; step < (pair + 1) * steps; ++step) {
                    _tile_loadd(6, mine + step * STEP_K * columns, columns * 4);
                    _tile_loadd(7, mine + (step + steps) * STEP_K * columns, columns * 4);
                    const uint16_t *first = high + step * STEP_VALUES, *second = first + steps * STEP_VALUES;
                    multiply_tile<0, TWO>(first);
                    multiply_tile<1, TWO>(second);
                    multiply_tile<2, TWO>(first + TILE_ROWS * STEP_K);
                    multiply_tile<3, TWO>(second + TILE_ROWS * STEP_K);
                }
                store_tiles(block_sums);
                add_blocks(tile, u * scales + pair);
            }
    }

    template <bool QUARTERS_, bool TWO> void multiply() {
        decode_unit<QUARTERS_, TWO>(0);
        for (int64_t u = 0; u < job.units; ++u) {
            if (u + 1 < job.units) decode_unit<QUARTERS_, TWO>(u + 1);
            multiply_unit<TWO>(u);
        }
    }

    void finish() {
        const HbCall &call = *job.call;
        for (int64_t m = 0; m < call.m; ++m)
            for (int64_t r = 0; r < panel.count; ++r) {
                const int64_t row = panel.first + r;
                const float y = sums[(m / 16 * PANEL_ROWS + r) * 16 + m % 16] * job.factor[m];
                store_float(call.out, m * call.out_stride + row, y + bias_at(call, m, row), HB_BF16);
            }
    }

    // prefetch: whether this thread computes the next panel too.
    void run(bool prefetch) {
        const HbWeight &w = *job.weight;
        const int64_t panel_bytes = PANEL_ROWS * w.k / w.elements * w.record_bytes;
        ahead = panel.rows[0].codes + panel_bytes;
        ahead_a_unit = prefetch ? ceil_div(panel_bytes / job.units, 64) * 64 : 0;
        for (int64_t r = 0; r < panel.rounded; r += 4) panel.read_scales_of(r, 4);
        const int64_t stride = scale_stride(job);
        for (int64_t r = panel.rounded; r < PANEL_ROWS; ++r) {
            std::memset(panel.scales + r * stride, 0, stride * 4);
            if (w.offset_kind != HB_NO_OFFSET) std::memset(panel.offsets + r * stride, 0, stride * 4);
        }
        std::memset(sums, 0, 4 * PANEL_ROWS * 16 * 4);
        const TileConfig config{int(columns)};
        _tile_loadconfig(&config);
        if (unpack.quarters)
            unpack.two ? multiply<true, true>() : multiply<true, false>();
        else
            unpack.two ? multiply<false, true>() : multiply<false, false>();
        _tile_release();
        finish();
    }
};

}  // namespace halfbyte::HB_ISA
