// out[M, N] = x[M, K] * W[N, K]^T for 9 rows of x and more on sm_90a, W a 4-bit codebook weight read where the checkpoint left it.
//
// A block takes tiles of ROWS rows of W, a cluster of CLUSTER blocks shares K. One thread copies a stage after another into a
// ring of STAGES slots: 256 weights a row of codes, their fp32 scales (side warps write them where they need decoding), and
// the stage's part of x, which codebook_wgmma_x.cu has laid out in fp16 as wgmma reads it. Each warpgroup multiplies 64 rows,
// and of a stage's four units (64 weights of a row) 4 / UNIT_GROUPS:
//
//   codes of 64 rows x 64 k --table--> A fragments in registers --\
//   COLUMNS rows of x x 64 k, in shared memory ------------------- + 4 wgmma --> fp32 sums of one scale block
//                                                          chain += scale * sums
//
// The order of summation is that of codebook_mma.cu, so a row of x has the same bits in both: K is cut into RANKS ranks of
// four pieces; in a piece the units r, r + 4, r + 8 ... are a chain each (there a warp); the four chains of a piece are added,
// then the pieces of a rank, then the ranks. Sums of pieces wait in shared memory until all of the cluster's are there; where
// all tiles' stages are spread over the blocks (SPREAD), in memory until all of the tile's are.
//
// Macros, set by codebook_wgmma.py:
//   ROW_GROUPS      64-row groups of a tile          UNIT_GROUPS    warpgroups that share a stage's units: 1, 2 or 4
//   COLUMNS         rows of x, a multiple of 8       STAGES         slots of the ring
//   CLUSTER         blocks that share K              RANKS          of K; a block has 4 * RANKS / CLUSTER pieces
//   X_TYPE          0 fp16, 1 bf16 (also of out)     BLOCK          32 or 64: k between two scales
//   SCALE_KIND      0 fp32, 1 nested, 2 E8M0         SCALE_SIDE     whether side warps bring the scales
//   HIGH_FIRST      element 2j is the high nibble    OVERLAP        starts before the previous kernel has ended
//   SPREAD          whether all tiles' stages are spread evenly over blocks, which then are no cluster's
//   TABLE_PITCH     bytes between entries of the table, 128 or 256: then one PRMT makes an address
//   ADAPTERS        whether they add to the outputs: 1 by side warps, 2 by those that multiply, at the end of a tile
//   PRODUCER_REGISTERS, CONSUMER_REGISTERS           of a thread

#define UNIT 64
#define TEAM 4                                   // units in a stage
#define TERMS 1
#define SPLIT CLUSTER                            // as codebook_shared.cuh calls it
#define WARPGROUPS (ROW_GROUPS * UNIT_GROUPS)    // that multiply
#define CONSUMERS (128 * WARPGROUPS)             // their threads
#define WARPS (4 * WARPGROUPS)
#define THREADS (CONSUMERS + 128)
#define ROWS (64 * ROW_GROUPS)
#define UNITS (4 / UNIT_GROUPS)                  // of a stage that a warpgroup multiplies
#define SUMS (COLUMNS / 2)                       // of a thread: of 64 rows of W and all columns
#define SUBS (UNIT / BLOCK)
#define STAGE_BLOCKS (TEAM * SUBS)
#define PIECES (4 * RANKS / CLUSTER)             // of K that a block has
#define ENTRIES (SPREAD ? 0 : PIECES <= 2 ? PIECES : PIECES / 4)    // sums it keeps: a piece's, or a rank's where it has whole ranks
#define SIDE_WARPS 2
#define EARLY (CODE_BYTES < 16384 ? 4 : COLUMNS == 32 ? 1 : 2)    // slots whose weights are sent for before x is there
#define AT_FIRST (EARLY < STAGES ? EARLY : STAGES)
// whether registers hold the fragments of two units, so that one is decoded while the other is multiplied
#define AHEAD (UNITS * SUMS + SUMS + 32 + 24 <= CONSUMER_REGISTERS)
// whether codes are fetched a unit before they are decoded: measured to be faster there
#define FETCH_AHEAD (COLUMNS == 64 && UNITS == 4 && SUBS == 1 && CLUSTER == 1 && !SPREAD && !SCALE_SIDE && !ADAPTERS)
#define SCALES_OF_STAGE (UNITS == 4 && SUBS == 1 && AHEAD && !SCALE_SIDE)    // whether a thread loads the scales of a stage at once

#define TABLE_AT 1024                            // where a block's own shared memory begins, as the table's addresses have it
#define TABLE_BYTES (256 * TABLE_PITCH)
#define CODE_BYTES (ROWS * 128)
#define X_SLOT (COLUMNS * 512)
#define SCALE_PITCH (4 * STAGE_BLOCKS)
#define SCALE_BYTES (ROWS * SCALE_PITCH)
#define UNSCALE_BYTES (X_TYPE == 1 ? COLUMNS * 16 + 16 : 0)
#define SUM_BYTES (ROWS * COLUMNS * 4)
#define CODES_AT TABLE_BYTES
#define X_AT (CODES_AT + STAGES * CODE_BYTES)
#define SCALES_AT (X_AT + STAGES * X_SLOT)
#define UNSCALE_AT (SCALES_AT + STAGES * SCALE_BYTES)
#define ENTRIES_AT (UNSCALE_AT + STAGES * UNSCALE_BYTES)
#define PASSED_AT (ENTRIES_AT + ENTRIES * SUM_BYTES)
#define MAP256_AT (PASSED_AT + (UNIT_GROUPS - 1) * SUM_BYTES)
#define BARRIERS_AT (MAP256_AT + (SCALE_KIND == 1 ? 1024 : 0))
#define SLOT_FULL(slot) (16 * (slot))            // from BARRIERS_AT; "empty" is 8 further
#define SUMS_FULL (16 * STAGES)                  // the cluster's sums are there; "free" is 8 further: they were read

// SPREAD: barriers of turns, what they gave is written; of all of them, others were told; notes, whose tiles are to be finished
#define MOST_TURNS 8
#define TURNS_AT (BARRIERS_AT + 16 * (STAGES + 1))
#define TOLD_AT (TURNS_AT + 8 * MOST_TURNS)
#define NOTES_AT (TOLD_AT + 8)

// adapters: items of the block's rows of x; how many there are, whether all are plain, how many tiles are done; they are there
#define EXPAND_COLUMNS (COLUMNS / CLUSTER)
#if ADAPTERS == 1
#define EXPAND_ROWS ROWS
#define EXPAND_WARPS (SCALE_SIDE ? 1 : 3)        // the copying warpgroup's last
#define EXPAND_PAIR (PRODUCER_REGISTERS >= 64 && !SCALE_SIDE ? 2 : 1)
#define ADDED_AT (BARRIERS_AT + 16 * (STAGES + 1))    // what they add to a tile's outputs; then barriers: it is there, it was read
#define ADDED_FULL_AT (ADDED_AT + EXPAND_BYTES)
#define LISTED 15                                // a barrier of threads: who takes which adapter
#else
#define EXPAND_TILES (ROWS / 16)
#define EXPAND_WARPS WARPS
#define ADAPTERS_WARP (SPREAD && !SCALE_SIDE ? WARPS + 1 : WARPS + 3)
#define ITEMS_AT (BARRIERS_AT + 16 * (STAGES + 1) + 128 * SPREAD)
#define ITEM_COUNT_AT (ITEMS_AT + EXPAND_COLUMNS * EXPAND_ITEM_BYTES)
#define LISTED_AT (ITEM_COUNT_AT + 16)
#endif

// barriers of threads: 1 all consumers; then for each row group, what was passed is there, and was read
#define PASSED(group) (2 + (group))
#define TAKEN(group) (2 + ROW_GROUPS + (group))

#include "codebook_types.cuh"
#include "adapters_types.cuh"
#include "codebook_shared.cuh"
#include "codebook_wgmma_walk.cuh"
#include "codebook_numbers.cuh"
#include "codebook_decode.cuh"
#include "codebook_scales.cuh"
#include "codebook_wgmma.cuh"
#if ADAPTERS
#include "adapters_items.cuh"
#endif
#if ADAPTERS == 1
#include "adapters_expand.cuh"
#elif ADAPTERS == 2
#include "adapters_outputs.cuh"
#endif

// ---- single instructions

DEVICE void threads_sync(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
DEVICE void threads_arrive(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// ---- what a block has to do

// A place in the ring: the slot, and the parity of its turn.
struct Place {
    u32 slot, turn;
    METHOD void step() {
        if (++slot == STAGES) slot = 0, turn ^= 1;
    }
};

// ---- the copying thread

DEVICE void copy_weight(const Maps& maps, const Walk& walk, u32 base, u32 slot) {
    const u32 full = base + BARRIERS_AT + SLOT_FULL(slot);
    expect_bytes(full, CODE_BYTES + (SCALE_SIDE ? 0 : SCALE_BYTES) + X_SLOT + UNSCALE_BYTES);
    copy_tile(&maps.codes, walk.unit() * (UNIT / 2), walk.tile() * ROWS, base + CODES_AT + slot * CODE_BYTES, full);
    if (!SCALE_SIDE) copy_tile(&maps.scales, walk.unit() * SUBS, walk.tile() * ROWS, base + SCALES_AT + slot * SCALE_BYTES, full);
}

DEVICE void copy_x(const Problem& p, const Walk& walk, u32 base, u32 slot) {
    const u32 full = base + BARRIERS_AT + SLOT_FULL(slot), stage = walk.unit() / TEAM, stages = (p.k / UNIT + TEAM - 1) / TEAM;
    bulk_copy(p.x + (u64)stage * X_SLOT, base + X_AT + slot * X_SLOT, X_SLOT, full);
    if (X_TYPE == 1) bulk_copy(p.x + (u64)stages * X_SLOT + stage * UNSCALE_BYTES, base + UNSCALE_AT + slot * UNSCALE_BYTES, UNSCALE_BYTES, full);
}

// Weights of the first slots are sent for while the previous kernels end, x when it is there: not of all slots, as x would
// wait behind them.
DEVICE void copy_first(const Maps& maps, const Cut& cut, u32 base) {
    Walk walk(cut);
    for (u32 slot = 0; slot < AT_FIRST && !walk.done(cut); ++slot, walk.step(cut)) copy_weight(maps, walk, base, slot);
}

DEVICE void copy_rest(const Maps& maps, const Problem& p, const Cut& cut, u32 base) {
    Walk walk(cut);
    for (u32 slot = 0; slot < AT_FIRST && !walk.done(cut); ++slot, walk.step(cut)) copy_x(p, walk, base, slot);
    Place place = {AT_FIRST % STAGES, 1u ^ AT_FIRST / STAGES};
    for (; !walk.done(cut); walk.step(cut), place.step()) {
        barrier_wait(base + BARRIERS_AT + SLOT_FULL(place.slot) + 8, place.turn);
        copy_weight(maps, walk, base, place.slot);
        copy_x(p, walk, base, place.slot);
    }
}

// ---- side warps

#if SCALE_SIDE
// Decode the scales of a stage, each lane some rows, with those of the next on their way.
DEVICE void bring_scales(const Scales& scales, const Problem& p, const Cut& cut, u32 base) {
    constexpr int lanes = 32 * SIDE_WARPS, rows = ROWS / lanes;
    const int lane = this_thread() - CONSUMERS - 32, blocks = p.k / BLOCK;
    const float offset = SCALE_KIND == 1 ? __ldg(scales.offset) : 0.f;
    const u32 map256 = base + MAP256_AT;
    RawScales raw[rows];
    Walk walk(cut);
    Place place = {0, 1};
    auto load = [&] {
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            const int row = walk.tile() * ROWS + lanes * r + lane;
            if (scales.aligned && row < p.n) load_scales(scales, (long long)row * blocks + walk.unit() * SUBS, raw[r]);
        }
    };
    if (!walk.done(cut)) load();
    while (!walk.done(cut)) {
        const u32 full = base + BARRIERS_AT + SLOT_FULL(place.slot), to = base + SCALES_AT + place.slot * SCALE_BYTES;
        barrier_wait(full + 8, place.turn);
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            const int row = lanes * r + lane;
#pragma unroll
            for (int c = 0; c < SUBS; ++c) {
                float scale[4];
                if (scales.aligned)
#pragma unroll
                    for (int j = 0; j < 4; ++j) scale[j] = walk.tile() * ROWS + row < p.n ? scale_of(raw[r], 4 * c + j, offset, map256) : 0.f;
                else
                    read_scales(scales, p, walk.tile() * ROWS + row, walk.unit() * SUBS + 4 * c, offset, map256, scale);
                sts128(to + scale_chunk(row, c), __float_as_uint(scale[0]), __float_as_uint(scale[1]), __float_as_uint(scale[2]), __float_as_uint(scale[3]));
            }
        }
        __syncwarp();
        if ((lane & 31) == 0) barrier_arrive(full);
        walk.step(cut), place.step();
        if (!walk.done(cut)) load();
    }
}
#endif

// ---- the multiplying warpgroups

#include "codebook_wgmma_multiplier.cuh"
#if SPREAD
#include "codebook_wgmma_spread.cuh"
#endif

// Where a sum of a tile is in shared memory: a thread's own lie 128 floats apart.
DEVICE u32 sum_at(u32 base, int row_group, int i, int thread) { return base + ((row_group * SUMS + i) * 128 + (thread & 127)) * 4; }

// Adds a piece's four chains, which lie with UNIT_GROUPS warpgroups; the last of these puts the sum into its entry, or where it meets
// those of other blocks.
DEVICE void add_chains(u32 base, int piece, bool first, const float (&chain)[UNITS][SUMS], float* meeting) {
    const int thread = this_thread(), row_group = thread / 128 / UNIT_GROUPS, unit_group = thread / 128 % UNIT_GROUPS;
    constexpr int threads = 128 * UNIT_GROUPS;
    const bool last = unit_group == UNIT_GROUPS - 1;
    auto mine = [&](int i) {
        float sum = chain[0][i];
#pragma unroll
        for (int u = 1; u < UNITS; ++u) sum += chain[u][i];
        return sum;
    };
    if (!last) {
        if (!first) threads_sync(TAKEN(row_group), threads);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sts32(sum_at(base + PASSED_AT + unit_group * SUM_BYTES, row_group, i, thread), __float_as_uint(mine(i)));
        threads_arrive(PASSED(row_group), threads);
        return;
    }
    if (UNIT_GROUPS > 1) threads_sync(PASSED(row_group), threads);
    auto whole = [&](int i) {
        if (UNIT_GROUPS == 1) return mine(i);
        float sum = __uint_as_float(lds32(sum_at(base + PASSED_AT, row_group, i, thread)));
#pragma unroll
        for (int g = 1; g < UNIT_GROUPS - 1; ++g) sum += __uint_as_float(lds32(sum_at(base + PASSED_AT + g * SUM_BYTES, row_group, i, thread)));
#pragma unroll
        for (int u = 0; u < UNITS; ++u) sum += chain[u][i];
        return sum;
    };
#if SPREAD
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) {
        const float four[4] = {whole(i), whole(i + 1), whole(i + 2), whole(i + 3)};
        store4(meeting + ((row_group * SUMS + i) * 128 + 4 * (thread & 127)), four);
    }
#else
    const u32 entries = base + ENTRIES_AT + (PIECES <= 2 ? piece : piece / 4) * SUM_BYTES;
    const bool adds = PIECES > 2 && piece % 4 > 0;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        const float sum = whole(i);
        const u32 at = sum_at(entries, row_group, i, thread);
        sts32(at, __float_as_uint(adds ? __uint_as_float(lds32(at)) + sum : sum));
    }
#endif
    if (UNIT_GROUPS > 1) threads_arrive(TAKEN(row_group), threads);
}

#if !SPREAD
DEVICE float sum_of(u32 base, int block, int entry, u32 offset) {
    const u32 at = base + ENTRIES_AT + entry * SUM_BYTES + offset;
    float value;
#if CLUSTER > 1
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(at_rank(at, block)) : "memory");
#else
    value = __uint_as_float(lds32(at));
#endif
    return value;
}

// Where an output's sum is, in each block and entry alike.
DEVICE u32 sum_offset(int row, int column) {
    const int in8 = row & 7, g = in8 & 1 ? (in8 + 7) / 2 : in8 / 2;    // row_of(g) == in8
    const int lane_of = (row >> 4 & 3) * 32 + g * 4 + (column >> 1 & 3), index = column / 8 * 4 + (row >> 3 & 1) * 2 + (column & 1);
    return sum_at(0, row / 64, index, lane_of);
}

// Its sums of all pieces of K, which lie with the cluster's blocks, added.
DEVICE float total_of(u32 base, u32 offset) {
    constexpr int each = CLUSTER * ENTRIES / RANKS;
    float total = 0.f;
#pragma unroll
    for (int s = 0; s < RANKS; ++s) {
        float of_rank = 0.f;
#pragma unroll
        for (int e = 0; e < each; ++e) of_rank += sum_of(base, (s * each + e) / ENTRIES, (s * each + e) % ENTRIES, offset);
        total = s == 0 ? of_rank : total + of_rank;
    }
    return total;
}

#if ADAPTERS == 2
// Puts what sums of pieces and adapters make of the block's share of a tile's outputs into its own first entry. Not inlined, as it
// would cost the main loop registers.
static __device__ __noinline__ void add_adapters(const float* shrunk, int width, int b_type, u32 base, int m0, int row0, int n) {
    barrier_wait(base + LISTED_AT, 0);
    const Outputs outputs(shrunk, width, b_type, m0, row0, n);
    const u32 row = sum_offset(threadIdx.x / 32 % EXPAND_TILES * 16 + (threadIdx.x >> 2 & 7), 0);
    outputs.expand(base + ITEMS_AT, lds32(base + ITEM_COUNT_AT), lds32(base + ITEM_COUNT_AT + 4), [&](int column, int i, float added) {
        const u32 offset = row + sum_offset(8 * i, m0 + column);
        sts32(base + ENTRIES_AT + offset, __float_as_uint(total_of(base, offset) + added));
    });
    threads_sync(1, CONSUMERS);
}
#endif

// Writes a block's share of a tile's outputs.
DEVICE void finish(const Problem& p, u32 base, int tile, int rank, int thread, float inverse) {
    constexpr int outputs = ROWS * COLUMNS / CLUSTER;
#if ADAPTERS == 2
    add_adapters(p.expand.shrunk, p.expand.width, p.expand.b_type, base, rank * EXPAND_COLUMNS, tile * ROWS, p.n);
#endif
#pragma unroll 4
    for (int i = rank * outputs + thread; i < (rank + 1) * outputs; i += CONSUMERS) {
        const int row = i % ROWS, column = i / ROWS, n = tile * ROWS + row;
        if (n >= p.n || column >= p.m) continue;
        const u32 offset = sum_offset(row, column);
        float total = ADAPTERS == 2 ? __uint_as_float(lds32(base + ENTRIES_AT + offset)) : total_of(base, offset);
#if ADAPTERS == 1
        total += added_to(base + ADDED_AT, column - rank * EXPAND_COLUMNS, row);
#endif
        store(p, column, n, total, inverse, -0.f);
    }
}

// What the main loop does not need is worked out anew after it, so that it has the registers.
DEVICE int tile_of(u32 round) { return this_block() / CLUSTER + round * (gridDim.x / CLUSTER); }
#endif

#if SPREAD
DEVICE void multiply(const Problem& p, const Shares& shares, u32 base, float inverse) {
    const Multiplier multiplier(base, this_thread() / 128 / UNIT_GROUPS, this_thread() / 128 % UNIT_GROUPS, this_thread());
    Place place = {0, 0};
#pragma unroll 1
    for (int turn = 0; turn < Turn::count(shares, this_block()); ++turn) {
        const auto now = [&] { return Turn(shares, this_block(), turn); };
        float chain[UNITS][SUMS] = {};
        if (now().begun(shares)) take_over(p, shares, chain);
        multiplier.stages(now().stages(), chain, place, base + BARRIERS_AT);
        if (now().whole(shares)) {
            const bool first = turn == 0 || (turn == 1 && !Turn(shares, this_block(), 0).whole(shares));
            add_chains(base, 0, first, chain, sums_of(p, shares, now().piece));
        } else {
            hand_over(p, shares, chain);
        }
        written(base, turn);
    }
    barrier_wait(base + TOLD_AT, 0);
#pragma unroll 1
    for (int turn = 0; turn < Turn::count(shares, this_block()); ++turn)
        if (lds32(base + NOTES_AT + 4 * turn)) finish_tile(p, shares, base, Turn(shares, this_block(), turn).tile(), inverse);
}
#else
DEVICE void multiply(const Problem& p, u32 base, float inverse) {
    const u32 barriers = base + BARRIERS_AT;
#if CLUSTER > 1
    const u32 sums_full = barriers + SUMS_FULL, sums_free = sums_full + 8;
#endif
    const Multiplier multiplier(base, this_thread() / 128 / UNIT_GROUPS, this_thread() / 128 % UNIT_GROUPS, this_thread());
    Place place = {0, 0};
#pragma unroll 1
    for (u32 round = 0; tile_of(round) * ROWS < p.n; ++round) {
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece) {
            float chain[UNITS][SUMS] = {};
            multiplier.stages(piece_of(p, this_block() % CLUSTER, piece).stages, chain, place, barriers);
#if CLUSTER > 1
            if (round > 0 && piece == 0) cluster_barrier_wait(sums_free, (round - 1) & 1);
#endif
            add_chains(base, piece, round == 0 && piece == 0, chain, nullptr);
        }
        threads_sync(1, CONSUMERS);
        const int thread = this_thread();
#if CLUSTER > 1
        if (round == 0) cluster_wait();    // all blocks' barriers are ready
        if (thread < CLUSTER) remote_arrive(at_rank(sums_full, thread));
        cluster_barrier_wait(sums_full, round & 1);
#endif
#if ADAPTERS == 1
        barrier_wait(base + ADDED_FULL_AT, round & 1);
#endif
        finish(p, base, tile_of(round), this_block() % CLUSTER, thread, inverse);
        threads_sync(1, CONSUMERS);
#if ADAPTERS == 1
        if (thread == 0) barrier_arrive(base + ADDED_FULL_AT + 8);
#elif ADAPTERS == 2
        if (thread == 0) sts32(base + ITEM_COUNT_AT + 8, round + 1);
#endif
#if CLUSTER > 1
        if (thread < CLUSTER) remote_arrive(at_rank(sums_free, thread));
        if (tile_of(round + 1) * ROWS >= p.n) cluster_barrier_wait(sums_free, round & 1);    // others read here
#endif
    }
}
#endif

#if ADAPTERS == 1
// The adapters' warps: tile after tile, what they add to the block's share of its outputs.
DEVICE void bring_adapters(const Problem& p, u32 base, int tile, int rank, int warp, float inverse) {
    const u32 added = base + ADDED_AT, full = base + ADDED_FULL_AT;
    const int m0 = rank * EXPAND_COLUMNS;
    previous_kernel_done();    // the index and h are read
    const int items = list_items(p.expand, m0, p.m, p.n, inverse, added + EXPAND_ITEMS_AT);    // all the same
    threads_sync(LISTED, 32 * EXPAND_WARPS);
    for (int ahead = tile; warp == 0 && ahead * ROWS < p.n; ahead += gridDim.x / CLUSTER)
        send_for_items(p.expand, added + EXPAND_ITEMS_AT, items, ahead * ROWS, ROWS, p.n, 0);
#pragma unroll 1
    for (u32 round = 0; tile * ROWS < p.n; ++round, tile += gridDim.x / CLUSTER) {
        if (round > 0) barrier_wait_long(full + 8, (round - 1) & 1);
        expand(p.expand, added, items, m0, tile * ROWS, ROWS, p.n, warp);
        __syncwarp();
        if ((this_thread() & 31) == 0) barrier_arrive(full);
    }
}
#elif ADAPTERS == 2
// The adapters' warp: lists who takes what, and sends for each tile's part of B while it is multiplied.
DEVICE void bring_adapters(const Problem& p, const Cut& cut, u32 base, int tile, int rank, float inverse) {
    const int lane = this_thread() & 31;
    previous_kernel_done();    // the index and h are read
    asm volatile("fence.acq_rel.gpu;" ::: "memory");    // h and B come by way of the L1
    const int items = list_items(p.expand, rank * EXPAND_COLUMNS, p.m, p.n, inverse, base + ITEMS_AT);
    __syncwarp();
    const bool plain = all_plain(p.expand, base + ITEMS_AT, items);
    if (lane == 0) sts32(base + ITEM_COUNT_AT, items), sts32(base + ITEM_COUNT_AT + 4, plain);
    __syncwarp();
    if (lane == 0) barrier_arrive(base + LISTED_AT);
#if SPREAD
    for (int turn = 0; turn < Turn::count(cut, this_block()); ++turn)
        send_for_items(p.expand, base + ITEMS_AT, items, Turn(cut, this_block(), turn).tile() * ROWS, ROWS, p.n, 0);
#else
    for (u32 round = 0; tile * ROWS < p.n; ++round, tile += gridDim.x / CLUSTER) {
        while (lds32(base + ITEM_COUNT_AT + 8) < round) asm volatile("nanosleep.u32 200;");
        send_for_items(p.expand, base + ITEMS_AT, items, tile * ROWS, ROWS, p.n, 16384);
    }
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
codebook_wgmma(const __grid_constant__ Maps maps, const __grid_constant__ Codebook codebook, const __grid_constant__ Scales scales,
#if SPREAD
               const __grid_constant__ Shares cut,
#endif
               const __grid_constant__ Problem p) {
#if !SPREAD
    const Cut& cut = p;
#endif
    extern __shared__ __align__(1024) u8 shared[];
    if ((shared_address(shared) & 0xFFFFFFu) != TABLE_AT) __trap();    // no device known puts a block's shared memory elsewhere
    const u32 base = CLUSTER == 1 ? TABLE_AT : shared_address(shared);    // in a cluster its high bits tell the block
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER;
    next_kernel_may_start();
    if (warp == WARPS) {    // sets the barriers up and is off before the others have set up their part
        if (lane == 0) {
            const u32 barriers = base + BARRIERS_AT;
            expect_map(&maps.codes);
            for (int slot = 0; slot < STAGES; ++slot) {
                barrier_init(barriers + SLOT_FULL(slot), 1 + SCALE_SIDE * SIDE_WARPS);
                barrier_init(barriers + SLOT_FULL(slot) + 8, WARPS);
            }
#if SPREAD
            for (int turn = 0; turn < MOST_TURNS; ++turn) barrier_init(base + TURNS_AT + 8 * turn, WARPS);
            barrier_init(base + TOLD_AT, 1);
#endif
            barrier_init(barriers + SUMS_FULL, CLUSTER);
            barrier_init(barriers + SUMS_FULL + 8, CLUSTER);
#if ADAPTERS == 1
            barrier_init(base + ADDED_FULL_AT, EXPAND_WARPS);
            barrier_init(base + ADDED_FULL_AT + 8, 1);
#elif ADAPTERS == 2
            barrier_init(base + LISTED_AT, 1);
            sts32(base + ITEM_COUNT_AT + 8, 0);
#endif
            barriers_visible();
        }
        __syncwarp();
        if (elected()) copy_first(maps, cut, base);
        __syncwarp();
    }
    constexpr int builders = WARPS >= 16 ? 16 : WARPS >= 8 ? 8 : 4;
    if (warp < builders) build_table<builders>(codebook, base, warp, lane);
#if SCALE_KIND == 1
    for (int i = thread; i < 256; i += THREADS) sts32(base + MAP256_AT + 4 * i, __float_as_uint(__ldg(scales.map + i)));
#endif
    __syncthreads();
    cluster_arrive();
    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (warp == WARPS) {
#if ADAPTERS
            wait_for_signal(p.expand);
            asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
            if (elected()) {
#if !ADAPTERS
                previous_kernel_done();    // from here on x is read, and out written by those who get it
#endif
                copy_rest(maps, p, cut, base);
            }
            __syncwarp();
#if ADAPTERS
            signal_seen(p.expand);
#endif
        }
#if ADAPTERS == 1
        if (warp >= THREADS / 32 - EXPAND_WARPS) {
            bring_adapters(p, base, tile, rank, warp - (THREADS / 32 - EXPAND_WARPS), codebook.inverse);
            __syncwarp();
        }
#elif ADAPTERS == 2
        if (warp == ADAPTERS_WARP) {
            bring_adapters(p, cut, base, tile, rank, codebook.inverse);
            __syncwarp();
        }
#endif
#if SPREAD
        if (warp == WARPS + 3) {
            if (elected()) tell(p, cut, base);
            __syncwarp();
        }
#endif
#if SCALE_SIDE
        if (warp > WARPS && warp <= WARPS + SIDE_WARPS) bring_scales(scales, p, cut, base);
#endif
        cluster_wait();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
#if SPREAD
        multiply(p, cut, base, codebook.inverse);
#else
        multiply(p, base, codebook.inverse);
#endif
    }
}
