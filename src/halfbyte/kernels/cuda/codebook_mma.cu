// out[M, N] = x[M, K] * W[N, K]^T for a few rows of x, W a 4-bit codebook weight read where the checkpoint left it.
//
// A block of threads owns a slab of rows of W (a cluster of SPLIT blocks, a share of K each; slabs differ by one tile of 16
// rows at most), takes it in passes of TILES tiles, and walks along K in stages of 256 weights a row. One warp copies codes
// and fp32 scales into a ring of STAGES slots in shared memory; where scales need decoding, a side warp or two write them
// there in fp32. Sixteen warps multiply, in teams of four: team t takes every fourth stage, and a warp of it 64 weights (a
// "unit") of all the pass's rows.
//
//   codes of 16 rows x 64 k  --table--> A fragments of 4 mma.m16n8k16 (fp16) --\
//   8 rows of x   x 64 k     ---------> B fragments --------------------------- + --> fp32 sums of one scale block
//                                                          accumulators += scale * sums
//
// K is walked in the order that suits the codes: a lane's 8 consecutive bytes are its part of four mma steps, and x
// follows. Nobody but the warp of a unit needs the unit's x, so it goes from memory straight to that warp's registers. The
// order of summation depends on N and K alone, so a row's bits do not depend on M.
//
// A block that takes half of a multiprocessor (RESIDENT 2) leaves the other half to the next launch, whose ring fills while
// this one ends. There is a block for each multiprocessor even where some have nothing to do, lest two of the next launch
// meet on one.
//
// Macros, set by codebook_mma.py:
//   TILES           16-row tiles of W in a pass             LAST        tiles of the last pass of a larger slab
//   GROUPS          groups of 8 rows of x                   X_ROWS      rows of x in a group: 1, 2, 4 or 8
//   STAGES          slots of the ring, a multiple of 4      SPLIT       blocks of a cluster, which share K
//   EARLY           of them that are sent for before x
//   X_TYPE          0 fp16, 1 bf16, 2 fp32 (also of out)    RESIDENT    blocks that fit a multiprocessor: 1 or 2
//   BLOCK           32 or 64: k between two scales          TERMS       2 keeps the table to 22 bits, else 1
//   SCALE_KIND      0 fp32, 1 nested, 2 E8M0                SCALE_SIDE  whether side warps bring the scales
//   HIGH_FIRST      element 2j is the high nibble of byte j OVERLAP     starts before the previous kernel has ended
//   ADAPTERS        whether they add to the outputs

#define UNIT 64                                  // weights of a row that a warp takes from a stage
#define TEAM 4                                   // warps of a team: units in a stage
#define TEAMS 4
#define WARPS (TEAM * TEAMS)                     // that multiply
#define COPY_WARP WARPS
#define SIDE_WARP (WARPS + 1)
#define SIDES (!SCALE_SIDE ? 0 : RESIDENT == 1 ? 2 : 1)     // side warps
#define THREADS (32 * (WARPS + 1 + SIDES + ADAPTERS))
#define ROWS (16 * TILES)                        // rows of W in a pass
#define SUBS (UNIT / BLOCK)                      // scale blocks in a unit
#define STAGE_BLOCKS (TEAM * SUBS)               // scale blocks of a row in a stage
#define X_TERMS (X_TYPE == 2 ? 2 : 1)            // fp32 x is split in two fp16 numbers
#define X_WORDS (X_TYPE == 2 ? 16 : 8)           // 32-bit words of a lane's 16 elements of x
#define X_BYTES (X_TYPE == 2 ? 4 : 2)            // of an element
#define X_STAGED (X_TYPE == 2 || GROUPS > 1)     // x is copied as it is to shared memory, else comes by way of registers
#define X_LANE_WORDS (TILES > 6 && X_ROWS == 1 ? 2 : 4)         // of x that a lane brings at once: large passes leave few registers
#define X_GROUP (X_STAGED || X_ROWS > X_LANE_WORDS ? 1 : X_LANE_WORDS / X_ROWS)    // units whose x a warp brings at once
#define X_PITCH (UNIT * X_BYTES + 16)            // of a row of a warp's x in shared memory
#define SUMS (TERMS == 2 || X_TERMS == 2 ? 2 : 1)
#define LOW_WEIGHT 0.00048828125f                // 2^-11: the second terms are kept 2^11 times larger

// Shared memory: table, ring, sums, the cluster's sums, the warps' x, nested map, barriers. The table holds a pair of fp16
// weights for each byte of codes, once for each bank, then (TERMS 2) the pairs' low terms. The ring: first all slots' codes
// [row][128 bytes], 16-byte chunks xor-swizzled by the row, then all slots' fp32 scales [row][STAGE_BLOCKS], swizzled where a
// row has two chunks.
#define TABLE_BYTES (32768 * TERMS)
// where a block's own shared memory begins, as the table's addresses have it
#if __CUDA_ARCH__ >= 900
#define TABLE_AT 1024
#else
#define TABLE_AT 0
#endif
#define CODE_BYTES (ROWS * 128)
#define SCALE_PITCH (4 * STAGE_BLOCKS)
#define SCALE_BYTES (ROWS * SCALE_PITCH)
#define CODES_AT TABLE_BYTES
#define SCALES_AT (CODES_AT + STAGES * CODE_BYTES)
// slots for scales: twice as many where two blocks share a multiprocessor, whose shared memory leaves no cache to side warps either way
#define SCALE_STAGES (SCALE_SIDE ? RESIDENT * STAGES : STAGES)
#define SUMS_AT (SCALES_AT + SCALE_STAGES * SCALE_BYTES)
#define SUM_PITCH (ROWS + 4)                     // floats of a column of sums: its writers and readers miss each other's banks
#define SUM_WARPS (X_ROWS == 1 ? WARPS : 4)      // warps whose sums are in shared memory at a time
#define WARP_SUMS (X_ROWS * SUM_PITCH)
#define PEERS_AT (SUMS_AT + SUM_WARPS * WARP_SUMS * 4)
#define OUTPUTS (GROUPS * X_ROWS * ROWS)         // of a pass
#define X_AT (PEERS_AT + (SPLIT - 1) * OUTPUTS * 4)
#define X_WARP_BYTES (GROUPS * X_GROUP * X_ROWS * X_PITCH)
#define MAP256_AT (X_AT + WARPS * X_WARP_BYTES)
#define BARRIERS_AT (MAP256_AT + (SCALE_KIND == 1 ? 1024 : 0))
#define SLOT_FULL(slot) (16 * (slot))            // from BARRIERS_AT; "empty" is 8 further
#define INBOX_FULL (16 * STAGES)
#define SCALES_FULL(slot) (16 * (STAGES + 3 + (slot)))    // where side warps bring them, as SLOT_FULL
#define ADDED_AT (BARRIERS_AT + 16 * (STAGES + 3 + SCALE_SIDE * SCALE_STAGES))    // what adapters add to a pass's outputs; its barriers follow the inbox's
#define ADDED_FULL (16 * STAGES + 16)
#define X_READABLE (16 * STAGES + 32)            // x may be read, where there are adapters; 8 further: all warps have got x of theirs
#define EXPAND_COLUMNS (GROUPS * X_ROWS)
#define EXPAND_ROWS ROWS
#define EXPAND_PAIR (RESIDENT == 1 ? 2 : 1)

#define FIRST_SLOTS (EARLY < STAGES ? EARLY : STAGES)
#define X_AWAITED (X_STAGED || X_ROWS == 8)      // whether other slots wait until x has come, else until it is asked for
#define SCALE_ROUNDS (SCALE_STAGES / TEAMS)
#define ROUNDS (STAGES / TEAMS)                  // of all teams' slots
// A barrier tells odd turns of a slot from even ones alone, so each slot must always serve the same team.
static_assert(STAGES % TEAMS == 0, "the ring holds whole rounds of teams");

#include "codebook_types.cuh"
#include "adapters_types.cuh"

struct Maps {    // for bulk copies: of a pass of TILES tiles, of one of LAST, of one of LAST - 1
    TensorMap codes[3], scales[3];
};

struct Problem {
    const u8* codes;
    const void* x;
    const void* bias;       // of x's type or fp32, or null
    void* out;
    long long x_stride;     // elements between rows of x
    int m, n, k;
    int bias_is_fp32;
    int tiles, larger;      // of W that a cluster owns; the first `larger` clusters own one more
    int units;              // units of K that a block of a cluster owns, a multiple of TEAM
    Expand expand;          // adapters
};

#include "codebook_shared.cuh"
#include "codebook_numbers.cuh"
#include "codebook_decode.cuh"
#include "codebook_scales.cuh"
// What a block has to do.
struct Share {
    u32 rank;                       // in its cluster
    int slab;                       // its first row of W
    int tiles, passes;              // of its slab
    int unit_begin, unit_end;       // of K
    int stages;                     // of a pass

    METHOD int run() const { return stages / TEAMS * TEAM; }    // units of a team, one after another
    METHOD int first_unit(int warp) const { return unit_begin + warp / TEAM * run() + warp % TEAM; }
};

DEVICE Share share_of(const Problem& p) {
    const int block = this_block(), cluster = block / SPLIT;
    Share share;
    share.rank = block % SPLIT;
    share.tiles = p.tiles + (cluster < p.larger);
    share.slab = 16 * (cluster * p.tiles + min(cluster, p.larger));
    share.passes = (share.tiles + TILES - 1) / TILES;
    share.unit_begin = share.rank * p.units, share.unit_end = min(p.k / UNIT, share.unit_begin + p.units);
    share.stages = share.unit_begin < share.unit_end ? (share.unit_end - share.unit_begin + WARPS - 1) / WARPS * TEAMS : 0;
    return share;
}

#include "codebook_mma_copies.cuh"
#include "codebook_mma_x.cuh"
#if ADAPTERS
#include "adapters_items.cuh"
#include "adapters_expand.cuh"
#endif
#include "codebook_mma_sums.cuh"

// ---- the warps' work

// A place in the ring: the slot, and how often it was used before.
template <int SLOTS>
struct Place {
    int slot, turn;
    METHOD void step(int by) {    // at most SLOTS
        slot += by;
        if (slot >= SLOTS) slot -= SLOTS, ++turn;
    }
    METHOD u32 emptied() const { return (turn & 1) ^ 1; }    // the parity to wait for
};

// The pass that a multiplying warp is about to begin, and its tiles: from the stages of its team so far, as a register more
// in the main loop would be one too many.
DEVICE int pass_of(const Problem& p, u32 round) { return round / (share_of(p).stages / TEAMS); }
DEVICE int tiles_now(const Problem& p, u32 round) {
    const Share share = share_of(p);
    return min(TILES, share.tiles - pass_of(p, round) * TILES);
}

// One multiplying warp's pass over T tiles. Its first units' x is there; at the end the next pass's is.
template <int T>
DEVICE void multiply_pass(const Problem& p, u32 base, float inverse, u32& round, Fetch& fetch) {
    const Share share = share_of(p);
    const int thread = this_thread(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, q = lane & 3, row = row_of(g), mine = warp % TEAM;
    const u32 barriers = base + BARRIERS_AT, bank = base - TABLE_AT + lane * 4;    // of the table's addresses, all but their offset
    // this warp's 32 bytes of each row: chunks 2 mine and 2 mine + 1 of a slot; its SUBS scales
    const int chunk = 2 * mine + (BLOCK == 64 ? q >> 1 : 0);
    const u32 codes_at = base + CODES_AT + row * 128 + ((chunk ^ row) << 4) + (BLOCK == 64 ? (q & 1) * 8 : q * 4);
    const u32 scales_at = base + SCALES_AT + scale_chunk(row, mine * SUBS >> 2) + (mine * SUBS & 3) * 4;

    float acc[T][GROUPS][4] = {};
    int unit = share.first_unit(warp), at = 0;    // its place among those whose x is there
    __syncwarp();
    for (const u32 end = round + share.stages / TEAMS; round < end; unit += TEAM, ++round) {
        const u32 slot = round % ROUNDS * TEAMS + (this_thread() >> 7), full = barriers + SLOT_FULL(slot);
        barrier_wait(full, round / ROUNDS & 1);
#if SCALE_SIDE
        const u32 scale_slot = round % SCALE_ROUNDS * TEAMS + (this_thread() >> 7), scales_full = barriers + SCALES_FULL(scale_slot);
        barrier_wait(scales_full, round / SCALE_ROUNDS & 1);
#else
        const u32 scale_slot = slot;
#endif
        const bool some = unit < share.unit_end;    // the last teams may have come to the end of K
        Activations x[GROUPS] = {};
        if (some) fetch.read(x, at, lane);
#if X_STAGED
        __syncwarp();
        fetch.next(p);
#endif
        if (some) multiply_unit<T>(codes_at + slot * CODE_BYTES, scales_at + scale_slot * SCALE_BYTES, bank, x, acc);
        __syncwarp();
        if (lane == 0) barrier_arrive(full + 8);
#if SCALE_SIDE
        if (lane == 0) barrier_arrive(scales_full + 8);
#endif
        if (++at == X_GROUP || round + 1 == end) {
            at = 0;
            fetch.finish();
#if !X_STAGED
            fetch.next(p);
#endif
        }
        __syncwarp();
    }
    reduce_and_store<T>(p, base, pass_of(p, round) - 1, inverse, acc);
}

// The stages of a block in their order: pass after pass, in each the teams by turns, each from the first to the last unit of
// its run of K.
struct Walk {
    int row0, tiles;    // the pass's first row of W and what is left of the slab
    int unit0, stage;    // the stage's first unit of K and number in its pass

    METHOD Walk(const Share& share) : row0(share.slab), tiles(share.tiles), unit0(share.unit_begin), stage(0) {}
    METHOD void step(const Share& share) {
        if (++stage == share.stages) stage = 0, row0 += ROWS, tiles -= TILES;
        unit0 = share.unit_begin + stage % TEAMS * share.run() + stage / TEAMS * TEAM;
    }
};

// The copying warp; one thread of it where the engine copies.
struct Copies {
    Share share;
    Walk walk;
    Place<STAGES> place;
    int left;

    METHOD Copies(const Problem& p) : share(share_of(p)), walk(share), place{0, 0}, left(share.passes * share.stages) {}

    template <bool WAIT>
    METHOD void copy(const Maps& maps, const Problem& p, u32 base, int most, int lane) {
#pragma unroll 1
        for (; left > 0 && most > 0; --left, --most, place.step(1), walk.step(share)) {
            const u32 full = base + BARRIERS_AT + SLOT_FULL(place.slot);
            if (WAIT) barrier_wait(full + 8, place.emptied());
            copy_stage(maps, p, walk.unit0 < share.unit_end ? min(TILES, walk.tiles) : 0, walk.row0, walk.unit0, base + CODES_AT + place.slot * CODE_BYTES, base + SCALES_AT + place.slot * SCALE_BYTES, full, lane);
        }
    }
};

#if SCALE_SIDE
// A side warp: decodes stages' scales, a lane some rows, with those of the next stages on their way. Two stages at a time, as
// one warp alone would wait too long for each (their number is even); with two warps each takes every other pair.
DEVICE void bring_scales(const Scales& scales, const Problem& p, u32 base, int side) {
    constexpr int rows = (ROWS + 31) / 32, ahead = SCALE_KIND == 0 ? 2 : 4;
    const Share share = share_of(p);
    const int lane = this_thread() & 31, stages = share.passes * share.stages, blocks = p.k / BLOCK;
    const float offset = SCALE_KIND == 1 ? __ldg(scales.offset) : 0.f;
    const u32 map256 = base + MAP256_AT;
    RawScales raw[ahead][rows];
    Walk loaded(share), written(share);
    auto skip = [&](Walk& walk, int pairs) {
        for (int i = 0; i < 2 * pairs; ++i) walk.step(share);
    };
    skip(loaded, side), skip(written, side);
    auto load = [&](RawScales (&into)[rows]) {
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            const int row = loaded.row0 + 32 * r + lane;
            if (scales.aligned && row < p.n && loaded.unit0 * SUBS < blocks) load_scales(scales, (long long)row * blocks + loaded.unit0 * SUBS, into[r]);
        }
        loaded.step(share);
    };
    auto write = [&](const RawScales (&from)[rows], u32 to) {
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            const int row = 32 * r + lane;
            if (ROWS % 32 != 0 && row >= ROWS) continue;
#pragma unroll
            for (int c = 0; c < SUBS; ++c) {
                float scale[4];
                if (scales.aligned)
#pragma unroll
                    for (int j = 0; j < 4; ++j) scale[j] = scale_of(from[r], 4 * c + j, offset, map256);
                else
                    read_scales(scales, p, written.row0 + row, written.unit0 * SUBS + 4 * c, offset, map256, scale);
                sts128(to + scale_chunk(row, c), __float_as_uint(scale[0]), __float_as_uint(scale[1]), __float_as_uint(scale[2]), __float_as_uint(scale[3]));
            }
        }
        written.step(share);
    };
    auto load_pair = [&](int i) {
        load(raw[i]), load(raw[i + 1]);
        skip(loaded, SIDES - 1);
    };
#pragma unroll
    for (int i = 0; i < ahead; i += 2) load_pair(i);
    Place<SCALE_STAGES> place = {2 * side, 0};
    for (int stage = 2 * side; stage < stages;)
#pragma unroll
        for (int i = 0; i < ahead; i += 2, stage += 2 * SIDES, place.step(2 * SIDES)) {
            if (stage >= stages) break;
            const u32 full = base + BARRIERS_AT + SCALES_FULL(place.slot), to = base + SCALES_AT + place.slot * SCALE_BYTES;
#pragma unroll
            for (int j = 0; j < 2; ++j) barrier_wait(full + SLOT_FULL(j) + 8, place.emptied());
#pragma unroll
            for (int j = 0; j < 2; ++j) write(raw[i + j], to + j * SCALE_BYTES);
            skip(written, SIDES - 1);
            __syncwarp();
            if (lane < 2) barrier_arrive(full + SLOT_FULL(lane));
            load_pair(i);
        }
}
#endif

#if ADAPTERS
// The adapters' warp: pass after pass, what they add. Not inlined, as it would cost the main loop registers.
static __device__ __noinline__ void bring_adapters(const Problem& p, u32 base, float inverse) {
    const Share share = share_of(p);
    const u32 added = base + ADDED_AT, full = base + BARRIERS_AT + ADDED_FULL;
    const int items = list_items(p.expand, 0, p.m, p.n, inverse, added + EXPAND_ITEMS_AT);
    __syncwarp();
    send_for_items(p.expand, added + EXPAND_ITEMS_AT, items, share.slab, 16 * share.tiles, p.n, 0);
    previous_kernel_done();    // h is read
#pragma unroll 1
    for (int pass = 0; pass < share.passes; ++pass) {
        if (pass > 0) barrier_wait_long(full + 8, (pass - 1) & 1);
        expand(p.expand, added, items, 0, share.slab + pass * ROWS, 16 * min(TILES, share.tiles - pass * TILES), p.n);
        __syncwarp();
        if ((this_thread() & 31) == 0) barrier_arrive(full);
    }
}
#endif

DEVICE void x_readable(u32 base) {
#if ADAPTERS
    barrier_wait(base + BARRIERS_AT + X_READABLE, 0);
#else
    previous_kernel_done();
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
codebook_mma(const __grid_constant__ Maps maps, const __grid_constant__ Codebook codebook, const __grid_constant__ Scales scales, const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) u8 shared[];
    if ((shared_address(shared) & 0xFFFFFFu) != TABLE_AT) __trap();    // no device known puts a block's shared memory elsewhere
    const u32 base = SPLIT == 1 ? TABLE_AT : shared_address(shared);    // in a cluster its high bits tell the block
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    next_kernel_may_start();

    Copies copies(p);
    if (warp == COPY_WARP) {    // sets the barriers up and is off before the others have set up their part
        if (lane == 0) {
            const u32 barriers = base + BARRIERS_AT;
            expect_map(&maps.codes[0]);
            for (int slot = 0; slot < STAGES; ++slot) {
                barrier_init(barriers + SLOT_FULL(slot), COPY_ARRIVALS);
                barrier_init(barriers + SLOT_FULL(slot) + 8, TEAM);
            }
            for (int slot = 0; slot < SCALE_SIDE * SCALE_STAGES; ++slot) {
                barrier_init(barriers + SCALES_FULL(slot), 1);
                barrier_init(barriers + SCALES_FULL(slot) + 8, TEAM);
            }
            barrier_init(barriers + INBOX_FULL, 32 * WARPS * (SPLIT - 1) + (SPLIT == 1));
            barrier_init(barriers + INBOX_FULL + 8, 32 * WARPS);
            barrier_init(barriers + X_READABLE + 8, WARPS);
#if ADAPTERS
            barrier_init(barriers + ADDED_FULL, 1);
            barrier_init(barriers + ADDED_FULL + 8, WARPS);
            barrier_init(barriers + X_READABLE, 1);
#endif
            barriers_visible();
        }
        __syncwarp();
        if (elected()) copies.copy<false>(maps, p, base, FIRST_SLOTS, lane);
    } else if (warp < WARPS) {    // builds its share of the table, one copy of each pair of weights a bank
        build_table<WARPS>(codebook, base, warp, lane);
    }
#if SCALE_KIND == 1
    for (int i = threadIdx.x; i < 256; i += THREADS) sts32(base + MAP256_AT + 4 * i, __float_as_uint(__ldg(scales.map + i)));
#endif
    __syncthreads();
    cluster_arrive();

    if (warp == COPY_WARP) {
        if (elected()) {
            // x would wait behind all that is sent for before it
#if X_AWAITED
            barrier_wait(base + BARRIERS_AT + X_READABLE + 8, 0);
#else
            x_readable(base);
#endif
            copies.copy<false>(maps, p, base, STAGES - FIRST_SLOTS, lane);
            copies.copy<true>(maps, p, base, copies.left, lane);
        }
        __syncwarp();
        cluster_wait();
        return;
    }
#if ADAPTERS
    if (warp == SIDE_WARP + SIDES) {
        wait_for_signal(p.expand);
        if (lane == 0) barrier_arrive(base + BARRIERS_AT + X_READABLE);
        signal_seen(p.expand);
        if (share_of(p).rank == 0) bring_adapters(p, base, codebook.inverse);
        previous_kernel_done();
        __syncwarp();
        cluster_wait();
        return;
    }
#endif
#if SCALE_SIDE
    if (warp >= SIDE_WARP) {
        bring_scales(scales, p, base, warp - SIDE_WARP);
        __syncwarp();
        cluster_wait();
        return;
    }
#endif
    x_readable(base);    // from here on x is read and out written
    u32 round = 0;
    Fetch fetch(base + X_AT + warp * X_WARP_BYTES, share_of(p).first_unit(warp), lane);
    fetch.next(p);
    fetch.finish();
#if X_AWAITED
    __syncwarp();
    if (lane == 0) barrier_arrive(base + BARRIERS_AT + X_READABLE + 8);
#endif
#if !X_STAGED
    fetch.next(p);
#endif
    for (int tiles; (tiles = tiles_now(p, round)) > 0;)
        if (tiles == TILES)
            multiply_pass<TILES>(p, base, codebook.inverse, round, fetch);
        else if (tiles == LAST)
            multiply_pass<LAST>(p, base, codebook.inverse, round, fetch);
        else
            multiply_pass<(LAST > 1 ? LAST - 1 : 1)>(p, base, codebook.inverse, round, fetch);
}
