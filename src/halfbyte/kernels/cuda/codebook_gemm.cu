// out[M, N] = x[M, K] * W[N, K]^T for many rows of bf16 x on sm_90a, W a 4-bit codebook weight read where the checkpoint left it and
// decoded on its way to the tensor cores.
//
// A block takes tiles of ROWS rows of W and COLUMNS rows of x, and of each a segment of K. Each warpgroup multiplies 64 rows of W:
//
//   codes --bulk copy--> ring --table--> fp16 pairs x scale of their block --> A: registers --\
//   image of x --bulk copy--> ring ----------------------------------------> B: shared memory -+ wgmma: fp32 sums of all of K
//
// Unlike codebook_wgmma.cu it scales weights, not sums: with many rows of x there are more sums than weights. So a weight is
// rounded to fp16 three times (entry, scale, product), which bf16 outputs can bear and fp16 ones cannot; and sums are added by the
// tensor cores, so a row's bits are not those that it has in a smaller batch.
//
// fp16 holds scales as long as they lie within a range: those of a row of W are divided by a power of two, that of the first stage's
// largest. Side warps, which bring the scales, raise it where a later one is 2^11 above (and the sums so far are then divided to
// match), so nothing overflows, and what is lost is 2^-24 of a row's largest weights.
//
// Macros, set by codebook_gemm.py:
//   ROW_GROUPS      64-row groups of a tile          COLUMNS        rows of x of a tile: 64, 128 or 256
//   CODE_SLOTS      stages (256 k) of codes in a ring      X_SLOTS  units (64 k) of x in a ring, a multiple of 4
//   BLOCK           32 or 64: k between two scales   HIGH_FIRST     element 2j is the high nibble
//   SCALE_KIND      0 fp32, 1 nested, 2 E8M0         SCALE_COPIED   whether bulk copies bring fp32 scales
//   TABLE_PITCH     bytes from an entry of the table to the next: 128, or 256 where there is room
//   OVERLAP         starts before the previous kernel has ended
//   PRODUCER_REGISTERS, CONSUMER_REGISTERS           of a thread

#define UNIT 64
#define TEAM 4                                   // units in a stage
#define TERMS 1
#define SPLIT 1
#define X_TYPE 1
#define SCALE_SIDE 1
#define ROWS (64 * ROW_GROUPS)
#define WARPS (4 * ROW_GROUPS)                   // that multiply
#define CONSUMERS (32 * WARPS)                   // their threads
#define THREADS (CONSUMERS + 128)
#define SUMS (COLUMNS / 2)                       // of a thread
#define SUBS (UNIT / BLOCK)
#define STAGE_BLOCKS (TEAM * SUBS)
#define SIDE_WARPS 2
#define STEPS 2                                  // of 16 k, decoded while as many are multiplied

#define TABLE_AT 1024                            // where a block's own shared memory begins, as the table's addresses have it
#define CODE_BYTES (ROWS * 128)
#define X_BYTES (COLUMNS * 128)
#define SCALE_PITCH (4 * STAGE_BLOCKS)           // a scale is there twice, as the two halves of a word
#define SCALE_BYTES (ROWS * SCALE_PITCH)
#define CODES_AT (TABLE_AT + 256 * TABLE_PITCH)
#define X_AT (CODES_AT + CODE_SLOTS * CODE_BYTES)
#define SCALES_AT (X_AT + X_SLOTS * X_BYTES)
#define POWERS_AT (SCALES_AT + CODE_SLOTS * SCALE_BYTES)
#define MAP256_AT (POWERS_AT + CODE_SLOTS * ROWS * 4)
#define BARRIERS_AT (MAP256_AT + (SCALE_KIND == 1 ? 1024 : 0))
#define CODES_FULL(slot) (BARRIERS_AT + 16 * (slot))            // "empty" is 8 further
#define X_FULL(slot) (BARRIERS_AT + 16 * (CODE_SLOTS + (slot)))
#define SCALES_FULL(slot) (BARRIERS_AT + 16 * (CODE_SLOTS + X_SLOTS) + 8 * (slot))    // as they were copied

#include "codebook_types.cuh"
#include "codebook_gemm.cuh"
#include "codebook_shared.cuh"
#include "codebook_numbers.cuh"
#include "codebook_decode.cuh"
#include "codebook_gemm_out.cuh"
#include "codebook_scales.cuh"
#include "codebook_wgmma.cuh"

struct Maps {
    TensorMap codes, scales;
};

// ---- what a block has to do

// A place in a ring: the slot, and the parity of its turn.
template <int SLOTS>
struct Place {
    u32 slot, turn;
    METHOD void step() {
        if (++slot == SLOTS) slot = 0, turn ^= 1;
    }
};

DEVICE int blocks() {
    int n;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(n));
    return n;
}

// Tiles of x fastest, so that blocks at work on the same rows of W find them in the L2.
struct Item {
    int column_tile, segment, row_tile, unit, end;

    METHOD Item(const Problem& p, int round) {
        const u32 number = this_block() + round * blocks(), column_tiles = (u32)(p.m + COLUMNS - 1) / COLUMNS, rest = number / column_tiles;
        column_tile = number % column_tiles, segment = rest % (u32)p.segments, row_tile = rest / (u32)p.segments;
        unit = segment * p.units, end = min(p.k / UNIT, unit + p.units);
    }
    METHOD bool exists(const Problem& p) const { return row_tile * ROWS < p.n; }
};

// ---- the copying threads. What they copy are whole stages: at the end of K codes and scales are zeros there, and x is any.

DEVICE void copy_codes(const Maps& maps, const Problem& p) {
    Place<CODE_SLOTS> place = {0, 1};
    for (int round = 0;; ++round) {
        const Item item(p, round);
        if (!item.exists(p)) return;
        for (int unit = item.unit; unit < item.end; unit += TEAM, place.step()) {
            barrier_wait(CODES_FULL(place.slot) + 8, place.turn);
            if (SCALE_COPIED) {
                expect_bytes(SCALES_FULL(place.slot), SCALE_BYTES);
                copy_tile(&maps.scales, unit * SUBS, item.row_tile * ROWS, SCALES_AT + place.slot * SCALE_BYTES, SCALES_FULL(place.slot));
            }
            expect_bytes(CODES_FULL(place.slot), CODE_BYTES);
            copy_tile(&maps.codes, unit * (UNIT / 2), item.row_tile * ROWS, CODES_AT + place.slot * CODE_BYTES, CODES_FULL(place.slot));
        }
    }
}

DEVICE void copy_x(const Problem& p) {
    Place<X_SLOTS> place = {0, 1};
    for (int round = 0;; ++round) {
        const Item item(p, round);
        if (!item.exists(p)) return;
        const u8* from = (const u8*)p.x + ((u64)item.column_tile * (p.k / UNIT) + item.unit) * X_BYTES;
        for (int unit = item.unit; unit < (item.end + TEAM - 1) / TEAM * TEAM; ++unit, place.step()) {
            barrier_wait(X_FULL(place.slot) + 8, place.turn);
            expect_bytes(X_FULL(place.slot), X_BYTES);
            bulk_copy(from, X_AT + place.slot * X_BYTES, X_BYTES, X_FULL(place.slot));
            if (unit + 1 < item.end) from += X_BYTES;
        }
    }
}

// ---- side warps

DEVICE u32 twice_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits * 0x10001u;
}

// Brings the scales of a row in a stage into its slot, in fp32.
DEVICE void bring_row(const Scales& scales, const Problem& p, u32 to, int row, int n, int unit, float offset) {
    if (scales.aligned) {
        RawScales raw;
        load_scales(scales, (long long)min(n, p.n - 1) * (p.k / BLOCK) + unit * SUBS, raw);
#pragma unroll
        for (int j = 0; j < STAGE_BLOCKS; ++j) sts32(to + scale_chunk(row, j / 4) + j % 4 * 4, __float_as_uint(scale_of(raw, j, offset, MAP256_AT)));
        return;
    }
#pragma unroll 1
    for (int j = 0; j < STAGE_BLOCKS; ++j) {
        const int block = unit * SUBS + j;
        float scale = 0.f;
        if (n < p.n && block < p.k / BLOCK) scale = scale_of_block(scales, (long long)n * (p.k / BLOCK) + block, offset, MAP256_AT);
        sts32(to + scale_chunk(row, j / 4) + j % 4 * 4, __float_as_uint(scale));
    }
}

// Converts a row's scales where they lie, to fp16, with the row's power of two; `before`: where that of the stage before is, or 0.
DEVICE void convert_row(u32 to, int row, u32 powers, u32 before) {
    u32 scale[SUBS][4], top = 0;
#pragma unroll
    for (int c = 0; c < SUBS; ++c) lds128(to + scale_chunk(row, c), scale[c][0], scale[c][1], scale[c][2], scale[c][3]);
#pragma unroll
    for (int j = 0; j < STAGE_BLOCKS; ++j) top = max(top, scale[j / 4][j % 4] & 0x7FFFFFFFu);
    const u32 field = min(max(top >> 23, 1u), 254u), last = before ? lds32(before + 4 * row) : 0, power = last == 0 || field > last + 11 ? field : last;
    const float divide = __uint_as_float((255 - power) << 23);    // the largest comes to between 2 and 4
#pragma unroll
    for (int j = 0; j < STAGE_BLOCKS; ++j) scale[j / 4][j % 4] = twice_half(__uint_as_float(scale[j / 4][j % 4]) * divide);
#pragma unroll
    for (int c = 0; c < SUBS; ++c) sts128(to + scale_chunk(row, c), scale[c][0], scale[c][1], scale[c][2], scale[c][3]);
    sts32(powers + 4 * row, power);
}

// Convert the scales of a stage, each lane those of some rows.
DEVICE void bring_scales(const Scales& scales, const Problem& p) {
    constexpr int at_once = PRODUCER_REGISTERS > 32 ? 4 : 1;    // rows
    Place<CODE_SLOTS> place = {0, 1};
#pragma unroll 1
    for (int round = 0;; ++round) {
        const Item item(p, round);
        if (!item.exists(p)) return;
        u32 before = 0;
#pragma unroll 1
        for (int unit = item.unit; unit < item.end; unit += TEAM, place.step()) {
            const u32 to = SCALES_AT + place.slot * SCALE_BYTES, powers = POWERS_AT + place.slot * ROWS * 4;
            if (SCALE_COPIED)
                barrier_wait(SCALES_FULL(place.slot), place.turn ^ 1);
            else
                barrier_wait(CODES_FULL(place.slot) + 8, place.turn);
            const float offset = SCALE_KIND == 1 ? __ldg(scales.offset) : 0.f;    // read anew, as registers are few
#pragma unroll(at_once)
            for (int row = this_thread() - CONSUMERS - 32; row < ROWS; row += 32 * SIDE_WARPS) {
                if (!SCALE_COPIED) bring_row(scales, p, to, row, item.row_tile * ROWS + row, unit, offset);
                convert_row(to, row, powers, before);
            }
            before = powers;
            __syncwarp();
            if ((this_thread() & 31) == 0) barrier_arrive(CODES_FULL(place.slot));
        }
    }
}

// ---- the multiplying warpgroups

DEVICE u32 times_half2(u32 a, u32 b) {
    u32 d;
    asm volatile("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

struct Multiplier {
    u32 codes, scales, powers, bank;    // addresses of this thread, from which a slot's are counted
    int row8;                           // of eight: all that swizzling looks at

    METHOD Multiplier() {
        const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, q = lane & 3, row = 16 * warp + row_of(lane >> 2);
        row8 = row_of(lane >> 2);
        codes = CODES_AT + row * 128 + (BLOCK == 64 ? (q & 1) * 8 : q * 4) + (((BLOCK == 64 ? q >> 1 : 0) ^ row & 7) << 4);
        scales = SCALES_AT + row * SCALE_PITCH;
        powers = POWERS_AT + row * 4;
        bank = lane * 4;
    }

    // This thread's codes and scales of unit u of a stage: of two rows, in halves or scale blocks.
    METHOD void load(u32 slot, int u, u32 (&word)[2][2], u32 (&scale)[2][SUBS]) const {
        load_codes((codes ^ (2 * u) << 4) + slot * CODE_BYTES, word);
#pragma unroll
        for (int sub = 0; sub < SUBS; ++sub) {
            const int block = u * SUBS + sub;
            const u32 at = scales + slot * SCALE_BYTES + scale_chunk(row8, block >> 2) - row8 * SCALE_PITCH + (block & 3) * 4;
#pragma unroll
            for (int h = 0; h < 2; ++h) scale[h][sub] = lds32(at + h * 8 * SCALE_PITCH);
        }
    }

    // A fragments of some of its steps.
    METHOD void weights(int first, const u32 (&word)[2][2], const u32 (&scale)[2][SUBS], u32 (&a)[STEPS][4]) const {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            decode<TABLE_AT>(word, first + s, bank, a[s]);
#pragma unroll
            for (int i = 0; i < 4; ++i) a[s][i] = times_half2(a[s][i], scale[i & 1][SUBS == 2 ? (first + s) >> 1 : 0]);
        }
    }
};

DEVICE void start(u32 slot, int first, const u32 (&a)[STEPS][4], float (&sum)[SUMS]) {
    const u32 b = descriptor(X_AT + slot * X_BYTES);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < STEPS; ++s) wgmma(sum, a[s], b + 2 * (first + s), 1);
    wgmma_commit();
}

DEVICE void settled(float (&sum)[SUMS]) {    // after a wait for wgmma: they are there only now
#pragma unroll
    for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

// Where powers of two of this thread's rows were raised, its sums so far (at first none) are divided to match.
DEVICE void follow(u32 (&power)[2], const u32 (&now)[2], float (&sum)[SUMS]) {
    if (power[0] == now[0] && power[1] == now[1]) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float divide = __uint_as_float((u32)max(0, (int)(127 + power[h] - now[h])) << 23);
#pragma unroll
        for (int i = 0; i < SUMS; ++i)
            if ((i >> 1 & 1) == h) sum[i] *= divide;
        power[h] = now[h];
    }
}

// Undoes the powers of two of a tile's sums and writes outputs, or where K is cut, sums as codebook_gemm_y.cu reads them.
DEVICE void finish(const Problem& p, const Item& item, const u32 (&power)[2], float (&sum)[SUMS], float inverse) {
    const int thread = threadIdx.x, column0 = item.column_tile * COLUMNS;
    previous_kernel_done();
    int x_powers[COLUMNS / 32];    // of a column each, all on their way at once
#pragma unroll
    for (int i = 0; i < COLUMNS / 32; ++i) x_powers[i] = __ldcg(p.x_powers + (long long)item.segment * p.m + min(column0 + 32 * i + (thread & 31), p.m - 1));
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
        const int column = column0 + 8 * j;
        if (column >= p.m) return;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int x_power = __shfl_sync(~0u, x_powers[j / 4], 8 * (j % 4) + 2 * (thread & 3) + c) - 128;
#pragma unroll
            for (int h = 0; h < 2; ++h) sum[4 * j + 2 * h + c] = times_power(sum[4 * j + 2 * h + c] * inverse, (int)power[h] + x_power);
        }
        if (p.segments == 1)
            write_outputs(p, item.row_tile * ROWS, column, thread, *(const float(*)[4])&sum[4 * j]);
        else
            *sums_at(p.out, p, item.segment, item.row_tile, column / 8, thread) = make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
    }
}

DEVICE void multiply(const Problem& p, float inverse) {
    const Multiplier multiplier;
    Place<CODE_SLOTS> codes = {0, 0};
    Place<X_SLOTS / TEAM> x = {0, 0};    // of stages
    const bool leader = (threadIdx.x & 31) == 0;
#pragma unroll 1
    for (int round = 0;; ++round) {
        const Item item(p, round);
        if (!item.exists(p)) return;
        float sum[SUMS] = {};
        u32 power[2] = {};
#pragma unroll 1
        for (int unit = item.unit; unit < item.end; unit += TEAM, codes.step(), x.step()) {
            barrier_wait(CODES_FULL(codes.slot), codes.turn);
            const u32 at = multiplier.powers + codes.slot * ROWS * 4, now[2] = {lds32(at), lds32(at + 32)}, x0 = x.slot * TEAM;
            follow(power, now, sum);
            u32 a[2][STEPS][4], word[2][2], scale[2][SUBS];
            multiplier.load(codes.slot, 0, word, scale);
            multiplier.weights(0, word, scale, a[0]);
#pragma unroll
            for (int batch = 0; batch < TEAM * 4 / STEPS; ++batch) {    // one is multiplied while the next is decoded
                const int u = batch * STEPS / 4, first = batch * STEPS % 4, last = TEAM * 4 / STEPS - 1;
                if (first == 0) barrier_wait(X_FULL(x0 + u), x.turn);
                start(x0 + u, first, a[batch % 2], sum);
                if (first + STEPS == 4 && u + 1 < TEAM) multiplier.load(codes.slot, u + 1, word, scale);
                if (batch == last) break;
                if (batch > 0) wgmma_wait<1>();
                if (first == 0 && u > 0 && leader) barrier_arrive(X_FULL(x0 + u - 1) + 8);
                multiplier.weights((first + STEPS) % 4, word, scale, a[(batch + 1) % 2]);
            }
            __syncwarp();    // all have read
            if (leader) barrier_arrive(CODES_FULL(codes.slot) + 8);
            wgmma_wait<0>();
            settled(sum);
            if (leader) barrier_arrive(X_FULL(x0 + TEAM - 1) + 8);
        }
        finish(p, item, power, sum, inverse);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
codebook_gemm(const __grid_constant__ Maps maps, const __grid_constant__ Codebook codebook, const __grid_constant__ Scales scales, const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) u8 shared[];
    if (shared_address(shared) != TABLE_AT) __trap();    // no device known puts a block's shared memory elsewhere
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    next_kernel_may_start();
    if (thread == CONSUMERS) {
        expect_map(&maps.codes);
        for (int slot = 0; slot < CODE_SLOTS; ++slot) {
            barrier_init(CODES_FULL(slot), 1 + SIDE_WARPS);
            barrier_init(CODES_FULL(slot) + 8, WARPS);
            barrier_init(SCALES_FULL(slot), 1);
        }
        for (int slot = 0; slot < X_SLOTS; ++slot) {
            barrier_init(X_FULL(slot), 1);
            barrier_init(X_FULL(slot) + 8, WARPS);
        }
        barriers_visible();
    }
    if (warp < WARPS) build_table<WARPS>(codebook, TABLE_AT, warp, lane);
#if SCALE_KIND == 1
    for (int i = thread; i < 256; i += THREADS) sts32(MAP256_AT + 4 * i, __float_as_uint(__ldg(scales.map + i)));
#endif
    __syncthreads();
    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (warp == WARPS) {
            if (elected()) copy_codes(maps, p);
            __syncwarp();
        } else if (warp <= WARPS + SIDE_WARPS) {
            bring_scales(scales, p);
        } else {
            if (elected()) {
                previous_kernel_done();    // from here on x is read, and out written by those who get it
                copy_x(p);
            }
            __syncwarp();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        multiply(p, codebook.inverse);
    }
}
