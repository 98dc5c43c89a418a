// TILES: bf16 activations on AMX. Sixteen rows of the weight are decoded to bf16 tiles (two terms where one does not
// hold the codebook: 17 bits or more of each value), multiplied by up to 128 rows of x from one decode, and a block's
// scale is applied to its fp32 sums. A row's bits do not depend on the other rows: each is a column of its own.
#pragma once
#include "kernel.hpp"

namespace halfbyte::HB_ISA {

constexpr int TILE_ROWS = 16, GROUPS = 2, PANEL_ROWS = GROUPS * TILE_ROWS;
constexpr int STEP_K = 32, UNIT_STEPS = 4;  // a step is the K of one tile multiply, a quarter of a unit
constexpr int TILE_BYTES = TILE_ROWS * 2 * STEP_K, TILE_FLOATS = TILE_ROWS * 16;
constexpr int PAGE = 4096;
constexpr int MOST_TILES = 8;  // of x

// How the codes of a unit become the steps' tiles: by 32-byte halves or by 16-byte quarters, with a shift by lane.
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

// How rows of x lie in tiles: one tile of 1, 4 or 16 columns, or several of 16.
struct Shape {
    int64_t columns, tiles, blocks;  // blocks: of the whole K
    bool offsets;

    explicit Shape(const Job &job)
        : columns(job.stride), tiles(job.x_rows / job.stride), blocks(int64_t(job.units) * 128 / job.block),
          offsets(job.weight->offset_kind != HB_NO_OFFSET) {}

    // [step][tile][pair of k][column][2], then by block and tile the columns' sums of x, on each lane that adds to them
    uint8_t *operand(const Job &job, int64_t step, int64_t tile) const {
        return reinterpret_cast<uint8_t *>(job.x) + (step * tiles + tile) * TILE_ROWS * columns * 4;
    }
    float *sums_of_x(const Job &job, int64_t block, int64_t tile) const {
        return job.x + job.units * UNIT_STEPS * tiles * TILE_ROWS * columns + (block * tiles + tile) * 16;
    }
    int64_t floats(const Job &job) const {
        return job.units * UNIT_STEPS * tiles * TILE_ROWS * columns + (offsets ? blocks * tiles * 16 : 0);
    }
};

// Scratch of a panel beyond Panel's: whole pages of decoded tiles and of a unit's sums, then the totals.
inline int64_t pages(const Job &job) { return job.x_rows > 16 ? 2 * GROUPS + UNIT_STEPS : 4; }

// Takes a call that UNITS serves over, where the tiles can.
inline void plan_tiles(Job &job) {
    const HbWeight &w = *job.weight;
    const int64_t m = job.call->m;
    if (job.path != UNITS || job.call->dtype != HB_BF16 || job.block < 32 || m > 16 * MOST_TILES) return;
    if (job.block > 64) job.block = 64;
    if (loader_of(w) == BYTES && job.block == 32 && w.span != 2) return;
    const bool quarters = job.block == 32 && loader_of(w) != HALVES;
    for (int step = 0; step < UNIT_STEPS; ++step)
        for (int i = 0; i < STEP_K; ++i) job.order[step * STEP_K + i] = element_of(job, quarters, step, i);
    job.path = TILES;
    job.panel = PANEL_ROWS;
    job.tasks = ceil_div(w.n, job.panel);
    job.stride = m == 1 ? 1 : m <= 4 ? 4 : 16;
    job.x_rows = ceil_div(m, job.stride) * job.stride;
    const Shape shape(job);
    job.x_floats = shape.floats(job);
    const int64_t special = ceil_div(w.k, 128) * 128 + decode_rows_floats(w, 1);
    const int64_t totals = GROUPS * shape.tiles * TILE_ROWS * shape.columns;
    job.scratch_floats = larger(panel_floats(job) + (pages(job) + 1) * PAGE / 4 + totals, special);
}

// The largest magnitude of bf16 words, 32 at a time.
inline uint32_t largest_word(const uint16_t *words, int64_t count) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 32)
        most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(words + i), _mm512_set1_epi16(0x7FFF)));
    const __m512i even = _mm512_and_si512(most, _mm512_set1_epi32(0xFFFF));
    return _mm512_reduce_max_epu32(_mm512_max_epu32(even, _mm512_srli_epi32(most, 16)));
}

// A row of x as bf16 words, zeros up to `padded`; its factor, and whether it is special, as from widen and normalise.
inline void read_words(const Job &job, int64_t row, int64_t padded, float *x, uint16_t *words) {
    const int64_t k = job.weight->k;
    std::memcpy(words, bytes(job.call->x) + row * job.call->x_stride * 2, k * 2);
    std::memset(words + k, 0, (padded - k) * 2);
    const uint32_t most = largest_word(words, padded) << 16;
    normalise(most, 0, x, job.factor + row, job.special + row);
    if (job.factor[row] == 1) return;
    for (int64_t i = 0; i < k; ++i) x[i] = bf16_to_float(words[i]);
    normalise(most, k, x, job.factor + row, job.special + row);
    for (int64_t i = 0; i < k; ++i) words[i] = uint16_t(as_bits(x[i]) >> 16);  // what is lost is too small to matter
}

// One row of x into its column of the steps' tiles, and its sums by block.
inline void prepare_tiles(const Job &job, int64_t row, float *x) {
    const Shape shape(job);
    const int64_t padded = int64_t(job.units) * 128, tile = row / shape.columns, column = row % shape.columns;
    uint16_t *words = reinterpret_cast<uint16_t *>(x + padded);
    if (row < job.call->m)
        read_words(job, row, padded, x, words);
    else
        std::memset(words, 0, padded * 2);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i rows = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(int(shape.columns)));
    __m512i order[UNIT_STEPS];  // a step's places within its half of the unit
    for (int step = 0; step < UNIT_STEPS; ++step) {
        const auto at = [&](int half) {
            const __m512i places = _mm512_loadu_si512(job.order + step * STEP_K + 16 * half);
            return _mm512_cvtepi32_epi16(_mm512_and_si512(places, _mm512_set1_epi32(63)));
        };
        order[step] = _mm512_inserti64x4(_mm512_castsi256_si512(at(0)), at(1), 1);
    }
    for (int64_t step = 0; step < job.units * UNIT_STEPS; ++step) {
        const uint16_t *half = words + step / 2 * 64;
        const __m512i pairs = _mm512_permutex2var_epi16(_mm512_loadu_si512(half), order[step % UNIT_STEPS],
                                                        _mm512_loadu_si512(half + 32));
        uint8_t *to = shape.operand(job, step, tile) + column * 4;
        if (shape.columns == 1) _mm512_storeu_si512(to, pairs);
        else _mm512_i32scatter_epi32(to, rows, pairs, 4);
    }
    if (!shape.offsets) return;
    for (int64_t block = 0; block < shape.blocks; ++block, words += job.block) {
        float sum = 0;
        for (int64_t i = 0; i < job.block; ++i) sum += bf16_to_float(words[i]);
        for (int64_t lane = column; lane < 16; lane += shape.columns) shape.sums_of_x(job, block, tile)[lane] = sum;
    }
}

// Registers 0 to 3: sums. 2 and 3 with one tile of x, else 4 and 5: the weight's terms. The others: x.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
    explicit TileConfig(const Shape &shape) {
        const int weights = shape.tiles == 1 ? 2 : 4;
        for (int i = 0; i < 8; ++i) {
            rows[i] = TILE_ROWS;
            bytes[i] = uint16_t(i == weights || i == weights + 1 ? 2 * STEP_K : shape.columns * 4);
        }
    }
};

// The compiler's intrinsics take no template argument for a register, and GCC's do not say that they read memory.
template <int TILE> HB_INLINE void tile_clear() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(TILE)); }

template <int TILE> HB_INLINE void tile_load(const void *from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE> HB_INLINE void tile_store(void *to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

template <int SUM, int WEIGHT, int X> HB_INLINE void tile_multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(WEIGHT), "i"(X));
}

// The scales of the rows that share a vector of sums, each on its lanes.
template <int COLUMNS> HB_INLINE __m512 scales_of(const float *scale, int64_t step) {
    if constexpr (COLUMNS == 1) return Simd::strided(scale, int32_t(step));
    __m512 found = _mm512_set1_ps(*scale);
#pragma GCC unroll 4
    for (int row = 1; row < 16 / COLUMNS; ++row)
        found = _mm512_mask_broadcastss_ps(found, __mmask16(0xF << (row * COLUMNS)), _mm_load_ss(scale + row * step));
    return found;
}

// As float_to_bf16.
HB_INLINE __m512i to_bf16(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value), upper = _mm512_srli_epi32(bits, 16);
    const __m512i half = _mm512_add_epi32(_mm512_set1_epi32(0x7FFF), _mm512_and_si512(upper, _mm512_set1_epi32(1)));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(rounded, nan, upper, _mm512_set1_epi32(0x40));
}

// A panel of two groups of sixteen rows of the weight times all rows of x.
template <Loader LOADER, int BLOCK, bool TWO> struct TilePanel {
    static constexpr bool BY_QUARTERS = BLOCK == 32 && LOADER != HALVES;
    static constexpr int BLOCK_STEPS = BLOCK / STEP_K, BLOCKS = UNIT_STEPS / BLOCK_STEPS;  // a block, a unit

    const Job &job;
    const Shape shape;
    const Unpack unpack;
    Panel panel;
    uint8_t *decoded;     // tiles of the weight, then of sums as they come from the registers
    float *totals;        // by group and tile of x: [row][column]
    const float *scales;  // of each row, scale_step apart
    int64_t scale_step, record_bytes, ahead_a_unit;
    const uint8_t *ahead;  // the next panel's codes, and how many bytes of them to prefetch a unit and group

    TilePanel(const Job &job, const Unpack &unpack, int64_t task, float *scratch)
        : job(job), shape(job), unpack(unpack), panel(job, task, scratch, span_for) {
        const uintptr_t free = reinterpret_cast<uintptr_t>(scratch + panel_floats(job));
        decoded = reinterpret_cast<uint8_t *>((free + PAGE - 1) / PAGE * PAGE);
        totals = reinterpret_cast<float *>(decoded + pages(job) * PAGE);
        record_bytes = job.weight->record_bytes;
        for (int64_t r = panel.rounded; r < PANEL_ROWS; ++r) panel.rows[r] = panel.rows[panel.rounded - 1];
    }

    // ---- decode

    // A step of unit u of sixteen rows: the tiles of both terms, `apart` bytes from each other.
    template <int STEP> HB_INLINE void decode(int64_t group, int64_t u, uint8_t *to, int64_t apart) {
        if (STEP == 0)
            for (const uint8_t *end = ahead + ahead_a_unit; ahead < end; ahead += 64) Simd::prefetch(ahead);
        if (__builtin_expect(u + 1 == job.units && (group + 1) * TILE_ROWS > panel.staged_from, 0))
            return decode_staged<STEP>(group, to, apart);
        const __m512i first = unpack.high, second = unpack.low, shift = unpack.shift[BY_QUARTERS ? 0 : STEP & 1];
        const int64_t place = unit_place<LOADER>(u, record_bytes), stride = unpack.stride;
        const Row *rows = panel.rows + group * TILE_ROWS;
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; ++r) {
            const __m512i index = codes<STEP>(rows[r].codes + place, stride, shift);
            _mm512_store_si512(to + r * 2 * STEP_K, _mm512_permutexvar_epi16(index, first));
            if (TWO) _mm512_store_si512(to + apart + r * 2 * STEP_K, _mm512_permutexvar_epi16(index, second));
        }
    }

    template <int STEP> static HB_INLINE __m512i codes(const uint8_t *unit, int64_t stride, __m512i shift) {
        __m512i found;
        if constexpr (BY_QUARTERS)
            found = _mm512_broadcast_i32x4(Simd::quarter(unit + STEP * stride));
        else
            found = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(unit + STEP / 2 * 32)));
        return _mm512_srlv_epi16(found, shift);
    }

    // The same for the last unit, where reading it whole would leave the codes.
    template <int STEP> __attribute__((noinline)) void decode_staged(int64_t group, uint8_t *to, int64_t apart) {
        for (int r = 0; r < TILE_ROWS; ++r) {
            const int64_t row = smaller(group * TILE_ROWS + r, panel.rounded - 1);
            const uint8_t *at = row < panel.staged_from
                                    ? panel.rows[row].codes + unit_place<LOADER>(job.units - 1, record_bytes)
                                    : panel.staged + row * STAGED;
            const __m512i index = codes<STEP>(at, unpack.stride, unpack.shift[BY_QUARTERS ? 0 : STEP & 1]);
            _mm512_store_si512(to + r * 2 * STEP_K, _mm512_permutexvar_epi16(index, unpack.high));
            if (TWO) _mm512_store_si512(to + apart + r * 2 * STEP_K, _mm512_permutexvar_epi16(index, unpack.low));
        }
    }

    // ---- sums

    // Adds the blocks of unit u, as stored `apart` floats from each other, to a group's totals for one tile of x.
    template <int COLUMNS>
    HB_INLINE void add_unit(int64_t u, int64_t group, int64_t tile, const float *blocks, int64_t apart) {
        float *total = totals + (group * shape.tiles + tile) * TILE_ROWS * COLUMNS;
        const int64_t first = u * BLOCKS, of_row = group * TILE_ROWS * scale_step + first;
        const float *scale = scales + of_row, *offset = panel.offsets + of_row;
        const bool offsets = shape.offsets;
#pragma GCC unroll 16
        for (int i = 0; i < COLUMNS; ++i, scale += 16 / COLUMNS * scale_step, offset += 16 / COLUMNS * scale_step) {
            __m512 sum = _mm512_load_ps(total + 16 * i);
#pragma GCC unroll 4
            for (int b = 0; b < BLOCKS; ++b) {
                if (offsets)
                    sum = _mm512_fmadd_ps(scales_of<COLUMNS>(offset + b, scale_step),
                                          _mm512_loadu_ps(shape.sums_of_x(job, first + b, tile)), sum);
                sum = _mm512_fmadd_ps(scales_of<COLUMNS>(scale + b, scale_step),
                                      _mm512_load_ps(blocks + b * apart + 16 * i), sum);
            }
            _mm512_store_ps(total + 16 * i, sum);
        }
    }

    // ---- one tile of x: it stays in the tile registers while both groups of rows pass
    //
    // Step after step: the second term of the step before is multiplied, then its own first, and the step after the
    // next is decoded. Tiles can be read from memory only when their stores have left the processor's queue, so
    // what is decoded late holds the multiplies up. And loads wait for stores whose address ends in the same 12 bits:
    // first terms, second terms and sums have pages of their own, a quarter for each step, so that the quarters that
    // are read are others than those being written.

    template <int STEP> HB_INLINE uint8_t *first_term() const { return decoded + STEP * TILE_BYTES; }
    template <int STEP> HB_INLINE uint8_t *second_term() const { return decoded + PAGE + STEP * TILE_BYTES; }
    HB_INLINE float *sums(int64_t parity, int step) const {
        return reinterpret_cast<float *>(decoded + (2 + parity) * PAGE + step * TILE_BYTES);
    }

    // Registers: 0 and 1 sums, by turns; 2 and 3 the terms; 4 to 7 the unit of x.
    template <int STEP> HB_INLINE void multiply_first() {
        constexpr int SUM = STEP / BLOCK_STEPS % 2;
        if constexpr (STEP % BLOCK_STEPS == 0) tile_clear<SUM>();
        tile_load<2>(first_term<STEP>(), 2 * STEP_K);
        tile_multiply<SUM, 2, 4 + STEP>();
    }

    template <int COLUMNS, int STEP> HB_INLINE void multiply_second(int64_t parity) {
        constexpr int SUM = STEP / BLOCK_STEPS % 2;
        if constexpr (TWO) {
            tile_load<3>(second_term<STEP>(), 2 * STEP_K);
            tile_multiply<SUM, 3, 4 + STEP>();
        }
        if constexpr (STEP % BLOCK_STEPS == BLOCK_STEPS - 1) tile_store<SUM>(sums(parity, STEP), COLUMNS * 4);
    }

    template <int COLUMNS, int STEP> HB_INLINE void step(int64_t u, int64_t group, int64_t parity) {
        constexpr int BEFORE = (STEP + 3) % 4, LATER = (STEP + 2) % 4;
        const int64_t next = STEP < 2 ? group : (group + 1) % GROUPS, next_u = next < group ? u + 1 : u;
        if (group == 0) tile_load<4 + STEP>(shape.operand(job, u * UNIT_STEPS + STEP, 0), COLUMNS * 4);
        if (STEP > 0 || u + group > 0) multiply_second<COLUMNS, BEFORE>(STEP > 0 ? parity : 1 - parity);
        multiply_first<STEP>();
        if (next_u < job.units) decode<LATER>(next, next_u, first_term<LATER>(), PAGE);
    }

    template <int COLUMNS> void multiply_one() {
        std::memset(totals, 0, GROUPS * TILE_ROWS * COLUMNS * 4);
        decode<0>(0, 0, first_term<0>(), PAGE);
        decode<1>(0, 0, first_term<1>(), PAGE);
        int64_t parity = 0;
        for (int64_t u = 0; u < job.units; ++u)
            for (int64_t group = 0; group < GROUPS; ++group, parity = 1 - parity) {
                step<COLUMNS, 0>(u, group, parity);
                step<COLUMNS, 1>(u, group, parity);
                step<COLUMNS, 2>(u, group, parity);
                step<COLUMNS, 3>(u, group, parity);
                if (u + group > 0) add_one<COLUMNS>(group ? u : u - 1, 1 - group, 1 - parity);
            }
        multiply_second<COLUMNS, 3>(1 - parity);
        add_one<COLUMNS>(job.units - 1, GROUPS - 1, 1 - parity);
    }

    template <int COLUMNS> HB_INLINE void add_one(int64_t u, int64_t group, int64_t parity) {
        add_unit<COLUMNS>(u, group, 0, sums(parity, BLOCK_STEPS - 1), BLOCK_STEPS * TILE_BYTES / 4);
    }

    // ---- several tiles of x: both groups of rows times two tiles at a time, as each is read from memory
    //
    // By group two pages of decoded tiles, [step][term]; a step is decoded anew for the next unit after its last use.

    HB_INLINE uint8_t *terms(int64_t group, int step) const {
        return decoded + 2 * PAGE * group + 2 * step * TILE_BYTES;
    }
    // a pair's sums over a unit, by block, tile of x and group
    HB_INLINE float *sums_of(int block, int64_t tile, int64_t group) const {
        float *pair = reinterpret_cast<float *>(decoded + 2 * GROUPS * PAGE);
        return pair + ((block * 2 + tile % 2) * GROUPS + group) * TILE_FLOATS;
    }

    // Registers: 0 to 3 sums, by group and tile of x; 4 and 5 a group's terms; 6 and 7 two tiles of x.
    template <int TILES, int STEP, int GROUP> HB_INLINE void multiply_group(int64_t u, bool last) {
        uint8_t *weights = terms(GROUP, STEP);
        tile_load<4>(weights, 2 * STEP_K);
        tile_multiply<2 * GROUP, 4, 6>();
        if constexpr (TILES == 2) tile_multiply<2 * GROUP + 1, 4, 7>();
        if constexpr (TWO) {
            tile_load<5>(weights + TILE_BYTES, 2 * STEP_K);
            tile_multiply<2 * GROUP, 5, 6>();
            if constexpr (TILES == 2) tile_multiply<2 * GROUP + 1, 5, 7>();
        }
        if (last) decode<STEP>(GROUP, u + 1, weights, TILE_BYTES);
    }

    template <int TILES, int STEP> HB_INLINE void step_of_pair(int64_t u, int64_t tile, bool last) {
        const uint8_t *x = shape.operand(job, u * UNIT_STEPS + STEP, tile);
        tile_load<6>(x, 64);
        if constexpr (TILES == 2) tile_load<7>(x + TILE_BYTES, 64);
        multiply_group<TILES, STEP, 0>(u, last);
        multiply_group<TILES, STEP, 1>(u, last);
    }

    template <int TILES, int B> HB_INLINE void block_of_pair(int64_t u, int64_t tile, bool last) {
        tile_clear<0>();
        tile_clear<1>();
        tile_clear<2>();
        tile_clear<3>();
        step_of_pair<TILES, B * BLOCK_STEPS>(u, tile, last);
        if constexpr (BLOCK_STEPS == 2) step_of_pair<TILES, B * BLOCK_STEPS + 1>(u, tile, last);
        tile_store<0>(sums_of(B, tile, 0), 64);
        if constexpr (TILES == 2) tile_store<1>(sums_of(B, tile + 1, 0), 64);
        tile_store<2>(sums_of(B, tile, 1), 64);
        if constexpr (TILES == 2) tile_store<3>(sums_of(B, tile + 1, 1), 64);
    }

    template <int TILES> void multiply_pair(int64_t u, int64_t tile) {
        const bool last = tile + TILES == shape.tiles && u + 1 < job.units;
        block_of_pair<TILES, 0>(u, tile, last);
        block_of_pair<TILES, 1>(u, tile, last);
        if constexpr (BLOCKS == 4) {
            block_of_pair<TILES, 2>(u, tile, last);
            block_of_pair<TILES, 3>(u, tile, last);
        }
        constexpr int64_t apart = 2 * GROUPS * TILE_FLOATS;
        for (int64_t t = tile; t < tile + TILES; ++t)
            for (int64_t group = 0; group < GROUPS; ++group) add_unit<16>(u, group, t, sums_of(0, t, group), apart);
    }

    void multiply_many() {
        std::memset(totals, 0, GROUPS * shape.tiles * TILE_FLOATS * 4);
        for (int64_t group = 0; group < GROUPS; ++group) {
            decode<0>(group, 0, terms(group, 0), TILE_BYTES);
            decode<1>(group, 0, terms(group, 1), TILE_BYTES);
            decode<2>(group, 0, terms(group, 2), TILE_BYTES);
            decode<3>(group, 0, terms(group, 3), TILE_BYTES);
        }
        for (int64_t u = 0; u < job.units; ++u) {
            for (int64_t tile = 0; tile + 1 < shape.tiles; tile += 2) multiply_pair<2>(u, tile);
            if (shape.tiles % 2) multiply_pair<1>(u, shape.tiles - 1);
        }
    }

    // ---- the panel

    void finish() {
        const HbCall &call = *job.call;
        for (int64_t m = 0; m < call.m; ++m) {
            const float *from = totals + m / shape.columns * TILE_ROWS * shape.columns + m % shape.columns;
            for (int64_t group = 0; group < GROUPS; ++group, from += shape.tiles * TILE_ROWS * shape.columns) {
                alignas(64) float y[TILE_ROWS];
                const __m512 found = Simd::strided(from, int32_t(shape.columns));
                _mm512_store_ps(y, _mm512_mul_ps(found, _mm512_set1_ps(job.factor[m])));
                const int64_t row = panel.first + group * TILE_ROWS, rows = smaller(TILE_ROWS, job.weight->n - row);
                if (call.bias)
                    for (int64_t r = 0; r < rows; ++r) y[r] += bias_at(call, m, row + r);
                uint16_t *out = static_cast<uint16_t *>(call.out) + m * call.out_stride + row;
                const __mmask16 mask = __mmask16((1u << (rows > 0 ? rows : 0)) - 1);
                _mm512_mask_cvtepi32_storeu_epi16(out, mask, to_bf16(_mm512_load_ps(y)));
            }
        }
    }

    // fp32 scales of whole panels stay where they are.
    void read_scales() {
        const HbWeight &w = *job.weight;
        if (w.scale_kind == HB_ABSMAX && w.blocksize == BLOCK && w.k % 128 == 0 && panel.count == PANEL_ROWS) {
            scale_step = w.k / BLOCK;
            scales = static_cast<const float *>(w.scales) + panel.first * scale_step;
            return;
        }
        scale_step = scale_stride(job);
        scales = panel.scales;
        for (int64_t r = 0; r < panel.rounded; r += 4) panel.read_scales_of(r, 4);
    }

    // next: the panel that this thread computes after this one, or -1.
    void run(int64_t next) {
        const HbWeight &w = *job.weight;
        const int64_t row_bytes = w.k / w.elements * w.record_bytes;
        ahead = bytes(w.codes) + next * PANEL_ROWS * row_bytes;
        ahead_a_unit = next < 0 ? 0 : ceil_div(PANEL_ROWS * row_bytes, job.units * GROUPS * 64) * 64;
        if (next >= 0) panel.prefetch_scales(next * PANEL_ROWS, PANEL_ROWS);
        read_scales();
        const TileConfig config(shape);
        _tile_loadconfig(&config);
        if (shape.columns == 1) multiply_one<1>();
        if (shape.columns == 4) multiply_one<4>();
        if (shape.columns == 16 && shape.tiles == 1) multiply_one<16>();
        if (shape.tiles > 1) multiply_many();
        _tile_release();
        finish();
    }
};

template <Loader LOADER, int BLOCK> void run_panel(const Job &job, int64_t task, int64_t next, float *scratch) {
    const Unpack unpack = unpack_of(job);
    if (unpack.two) TilePanel<LOADER, BLOCK, true>(job, unpack, task, scratch).run(next);
    else TilePanel<LOADER, BLOCK, false>(job, unpack, task, scratch).run(next);
}

inline void run_tiles(const Job &job, int64_t task, int64_t next, float *scratch) {
    const Loader loader = loader_of(*job.weight);
    if (loader == BYTES && job.block == 64) run_panel<BYTES, 64>(job, task, next, scratch);
    if (loader == BYTES && job.block == 32) run_panel<BYTES, 32>(job, task, next, scratch);
    if (loader == QUARTERS) run_panel<QUARTERS, 32>(job, task, next, scratch);
    if (loader == HALVES) run_panel<HALVES, 32>(job, task, next, scratch);
    run_special(job, task, scratch);  // an infinity times two terms of opposite sign is NaN
}

}  // namespace halfbyte::HB_ISA
