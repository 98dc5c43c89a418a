// h[M, n] = A x in fp32, each row of x with the rows of A that its slot spans: the first of an adapter's two multiplies.
//
// A cluster of CLUSTER blocks takes an item after another: RANKS rows of A of one slot, and up to eight rows of x (of a chunk of
// 64) that have this slot, so that A comes from memory once for each adapter that is present. Its warps share K, 32 elements at a
// time by turns, and send their sums to the block that owns the rank, where a warp adds them, a lane a part, always as the same
// tree. So a row's bits depend on K alone. Which slots there are, each warp reads from the index: nothing of it is known at launch.
//
// It reads the index and sends for A before the kernel in front has ended, and multiplies by what it has seen while it looks at the
// index again: if that has changed, it begins anew.
//
// Blocks are so small that they fit beside those of codebook_mma.cu: they wait there for the kernel before, and the next one's
// blocks need not wait until they have left, nor for h: `signal` tells them that all kernels in front of this one have ended. Those of
// codebook_wgmma.cu it tells that x is laid out.
//
//   8 or 16 ranks x 32 k of A, 16 bytes or two of them a lane --\
//   8 rows of x x 32 k, likewise ------------------------------- + 2 mma --> fp32 sums, ranks x 8 rows
//
// A lane's 8 elements of a row are those of two multiplies: k is in another order there, in A and x alike.
//
// Macros, set by adapters_shrink.py:
//   X_TYPE, A_TYPE  0 fp16, 1 bf16, 2 fp32; tensor cores multiply where both are the same 16-bit type
//   RANKS           of an item: 16, or 8 for more clusters to share a long K
//   CLUSTER, WARPS  blocks that share K, warps of each WIDE     whether rows of x and A lie at multiples of 16 bytes
//   OVERLAP         starts before the previous kernel has ended
//   COLUMNS, BLOCK  not 0: its first blocks lay x out for codebook_wgmma.cu, as codebook_wgmma_x.cu does

#define SPLIT CLUSTER
#define PARTS (CLUSTER * WARPS)       // of K
#define THREADS (32 * WARPS)
#define ROWS 8                        // of x, at most, of an item
#define CHUNK 64                      // rows of x whose slots are compared
#define PITCH (ROWS + 4)              // floats of a rank's or a part's rows
#define OWNED ((RANKS + CLUSTER - 1) / CLUSTER)    // ranks of a block, at most
#define BATCH (RANKS == 16 ? 5 : 8)   // of 32 k, whose loads are on their way together
static_assert(PARTS <= 32, "a lane adds a part");
#define UNIT 64                       // of k, in an image of x
#define TENSOR (X_TYPE == A_TYPE && X_TYPE != 2)

#include "codebook_types.cuh"

struct Problem {
    const void* x;
    const void* bias;       // nobody's
    float* out;             // [m, n]
    long long x_stride;     // elements between rows of x
    int m, n, bias_is_fp32;
    const void* a;          // [a_rows, k]
    const int2* spans;      // a slot's first row of A, and how many
    const int* index;       // each row's slot, none where that is out of range; null: all take slot 0
    int k, a_rows, slots;
    int clusters;           // that share a chunk's items
    u64* signal;            // null, or where `tag` is written, 16 bits further up: by each block of the image, once its part is there, or
    u64 tag;                // by one of a launch without, once the kernels in front have ended
    u8* image;              // of x, by so many blocks
    int image_blocks;
    int counters;           // behind the image, to be set to 0
};

#include "codebook_shared.cuh"
#if COLUMNS
#include "codebook_numbers.cuh"
#include "codebook_wgmma_image.cuh"
#endif

template <int TYPE>
DEVICE float number(const void* from, long long at) {
    if (TYPE == 2) return ((const float*)from)[at];
    const u32 bits = ((const u16*)from)[at];
    if (TYPE == 1) return __uint_as_float(bits << 16);
    float value;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(bits));
    return value;
}

// Elements at .. at + 7 of a row that begins at `row`; zeros beyond K and where there is no row.
DEVICE void eight(const void* from, long long row, int at, int k, bool there, u32 (&word)[4]) {
    word[0] = word[1] = word[2] = word[3] = 0;
    if (!there) return;
#if WIDE
    if (at < k) {
        const uint4 all = *(const uint4*)((const u16*)from + row + at);
        word[0] = all.x, word[1] = all.y, word[2] = all.z, word[3] = all.w;
    }
#else
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (at + i < k) word[i / 2] |= (u32)((const u16*)from)[row + at + i] << 16 * (i & 1);
#endif
}

DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if X_TYPE == 1
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Rows of A of one slot, and up to eight rows of x that have it; the numbers of these are in a list, a byte each.
struct Item {
    int slot, tile;         // of ranks
    int2 span;              // the slot's first row of A, and how many
    int rows;               // of x

    METHOD int column() const { return RANKS * tile; }    // of h
    METHOD int first() const { return span.x + column(); }
    METHOD int ranks(const Problem& p) const {
        const bool inside = span.x >= 0 && span.y >= 0 && span.y <= p.a_rows - span.x;
        return inside ? max(0, min(RANKS, span.y - column())) : 0;
    }
};

DEVICE int2 span_of(const Problem& p, int slot) {
    int2 span = make_int2(0, 0);
    if (slot >= 0) asm volatile("ld.global.cg.v2.s32 {%0, %1}, [%2];" : "=r"(span.x), "=r"(span.y) : "l"(p.spans + slot));
    return span;
}

// The slots of two rows a lane, `lane` and 32 further. Rows without an adapter are of slot -1; -2: no row.
struct Slots {
    int of[2];

    METHOD Slots(const Problem& p, int row0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = row0 + 32 * i + (threadIdx.x & 31);
            int found = 0;
            if (p.index && row < p.m) asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(found) : "l"(p.index + row));
            of[i] = row >= p.m ? -2 : (u32)found < (u32)p.slots ? found : -1;
        }
    }
    METHOD bool differ(const Slots& other) const { return __any_sync(~0u, of[0] != other.of[0] || of[1] != other.of[1]); }
};

// A chunk's rows by slot, eight at a time; all by all lanes of a warp.
struct Rows {
    Slots slots;
    int number[2];    // of a lane's rows among those of their slot
    u64 leaders;      // the first row of each eight

    METHOD Rows(const Problem& p, int row0) : slots(p, row0) {
        const u32 before = (1u << (threadIdx.x & 31)) - 1;
        number[0] = __popc(__match_any_sync(~0u, slots.of[0]) & before), number[1] = 0;
        if (row0 + 32 < p.m) {
            number[1] = __popc(__match_any_sync(~0u, slots.of[1]) & before);
#pragma unroll 4
            for (int i = 0; i < 32; ++i) number[1] += __shfl_sync(~0u, slots.of[0], i) == slots.of[1];
        }
        leaders = leading(0) | (u64)leading(1) << 32;
    }
    METHOD u32 leading(int i) const { return __ballot_sync(~0u, slots.of[i] > -2 && number[i] % ROWS == 0); }
    METHOD int items(int tiles) const { return __popcll(leaders) * tiles; }
    METHOD Item item(const Problem& p, int tiles, int which, u32 list) const {
        u64 left = leaders;
        for (int i = which / tiles; i > 0; --i) left &= left - 1;
        const int leader = __ffsll(left) - 1, lane = threadIdx.x & 31;
        Item item;
        item.slot = __shfl_sync(~0u, leader < 32 ? slots.of[0] : slots.of[1], leader & 31), item.tile = which % tiles;
        item.span = span_of(p, item.slot), item.rows = 0;
        const int eight = __shfl_sync(~0u, leader < 32 ? number[0] : number[1], leader & 31) / ROWS;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool its = slots.of[i] == item.slot && number[i] / ROWS == eight;
            if (its) asm volatile("st.shared.u8 [%0], %1;" ::"r"(list + number[i] % ROWS), "r"(32 * i + lane) : "memory");
            item.rows += __popc(__ballot_sync(~0u, its));
        }
        __syncwarp();
        return item;
    }
};

// Sends for a part of an item's rows of A.
DEVICE void prefetch(const Problem& p, const Item& item, int part) {
    const int size = A_TYPE == 2 ? 4 : 2;
    const char* begin = (const char*)p.a + (long long)item.first() * p.k * size;
    const long long bytes = (long long)item.ranks(p) * p.k * size;
#pragma unroll 1
    for (long long at = (part * 32 + (threadIdx.x & 31)) * 128; at < bytes; at += PARTS * 32 * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(begin + at));
}

// Sums of parts, on their way from all of the cluster's warps to the blocks that own their ranks: [rank][part][row]. There are two
// places by turns: who sends to one again has received what others sent to the other, so they have read this one. A warp gathers
// its sums, [rank][row], to send four rows at once.
struct Inbox {
    u32 sums, gathered, barrier;    // of this block, of this warp, of this block
    u32 turn;

    METHOD Inbox(u32 sums, u32 gathered, u32 barrier) : sums(sums), gathered(gathered + (threadIdx.x >> 5) * RANKS * PITCH * 4), barrier(barrier), turn(0) {
        if (threadIdx.x == 0) {
            barrier_init(barrier, PARTS);
            barriers_visible();
        }
        __syncthreads();
        cluster_arrive();
    }
    METHOD u32 place(int rank, int part) const { return sums + (((turn & 1) * OWNED + rank / CLUSTER) * PARTS + part) * PITCH * 4; }
    METHOD void put(int rank, int row, float sum) const { sts32(gathered + (rank * PITCH + row) * 4, __float_as_uint(sum)); }
    METHOD void ready() const {    // before the first is sent
        if (turn == 0) cluster_wait();
    }
    METHOD void send(int part, int rows) const {    // by all lanes of a warp, once for each turn
        __syncwarp();
        ready();
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = lane; i < RANKS * ROWS / 4; i += 32) {
            const int rank = i / (ROWS / 4), row = i % (ROWS / 4) * 4;
            if (row >= rows) continue;
            u32 word[4];
            lds128(gathered + (rank * PITCH + row) * 4, word[0], word[1], word[2], word[3]);
            const u32 to = place(rank, part) + row * 4;
#if CLUSTER > 1
            asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at_rank(to, rank % CLUSTER)), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]) : "memory");
#else
            sts128(to, word[0], word[1], word[2], word[3]);
#endif
        }
        __syncwarp();
#if CLUSTER > 1
        if (lane < CLUSTER) remote_arrive(at_rank(barrier, lane));
#else
        if (lane == 0) barrier_arrive(barrier);
#endif
    }
    METHOD void wait() const {
#if CLUSTER > 1
        cluster_barrier_wait(barrier, turn & 1);
#else
        barrier_wait(barrier, turn & 1);
#endif
    }
    METHOD float sum(int rank, int row) const {    // by all lanes, which all get it
        const int lane = threadIdx.x & 31;
        float sum = lane < PARTS ? __uint_as_float(lds32(place(rank, lane) + row * 4)) : 0.f;
#pragma unroll
        for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
        return sum;
    }
};

DEVICE int row_at(u32 list, int i) {
    u32 row;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(row) : "r"(list + i));
    return row;
}

// A warp's part of K of an item.
#if TENSOR
DEVICE void multiply(const Problem& p, int row0, u32 list, const Item& item, int part, const Inbox& inbox) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, ranks = item.ranks(p);
    const long long x_row = g < item.rows ? (row0 + row_at(list, g)) * p.x_stride : -1;
    float acc[4] = {};
#pragma unroll 1
    for (int c = part; 32 * c < p.k; c += BATCH * PARTS) {
        u32 a[BATCH][2][4] = {}, x[BATCH][4];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int at = 32 * (c + b * PARTS) + 8 * q;
#pragma unroll
            for (int h = 0; h < RANKS / 8; ++h) eight(p.a, (long long)(item.first() + g + 8 * h) * p.k, at, p.k, g + 8 * h < ranks && at < p.k, a[b][h]);
            eight(p.x, x_row, at, p.k, x_row >= 0 && at < p.k, x[b]);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
#pragma unroll
            for (int half = 0; half < 4; half += 2) mma(acc, a[b][0][half], a[b][1][half], a[b][0][half + 1], a[b][1][half + 1], x[b][half], x[b][half + 1]);
    }
#pragma unroll
    for (int i = 0; i < RANKS / 4; ++i) inbox.put(g + 8 * (i >> 1), 2 * q + (i & 1), acc[i]);
}
#else
DEVICE void multiply(const Problem& p, int row0, u32 list, const Item& item, int part, const Inbox& inbox) {
    const int lane = threadIdx.x & 31, ranks = item.ranks(p);
#pragma unroll 1
    for (int row = 0; row < item.rows; ++row) {
        const long long from = (row0 + row_at(list, row)) * p.x_stride;
        float acc[RANKS] = {};
#pragma unroll 1
        for (int k = 32 * part + lane; k < p.k; k += 32 * PARTS) {
            const float x = number<X_TYPE>(p.x, from + k);
#pragma unroll
            for (int r = 0; r < RANKS; ++r)
                if (r < ranks) acc[r] = fmaf(number<A_TYPE>(p.a, (long long)(item.first() + r) * p.k + k), x, acc[r]);
        }
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
#pragma unroll
            for (int other = 16; other > 0; other /= 2) acc[r] += __shfl_xor_sync(~0u, acc[r], other);
            if (lane == 0) inbox.put(r, row, acc[r]);
        }
    }
}
#endif

// Adds what all parts have sent of an item, and writes the block's share of h: a warp takes some outputs.
DEVICE void finish(const Problem& p, int row0, u32 list, const Item& item, int block, const Inbox& inbox) {
    const int ranks = item.ranks(p);
#pragma unroll 4
    for (int i = threadIdx.x >> 5; i < OWNED * ROWS; i += WARPS) {
        const int rank = i / ROWS * CLUSTER + block, row = i % ROWS, column = item.column() + rank;
        if (rank >= RANKS || row >= item.rows || column >= p.n) continue;
        const float sum = rank < ranks ? inbox.sum(rank, row) : 0.f;
        if ((threadIdx.x & 31) == 0) p.out[(long long)(row0 + row_at(list, row)) * p.n + column] = sum;
    }
}


extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
adapters_shrink(const __grid_constant__ Problem p) {
    __shared__ __align__(16) float sums[2][OWNED][PARTS][PITCH], gathered[WARPS][RANKS][PITCH];
    __shared__ u64 barrier;
    __shared__ u8 lists[WARPS][ROWS];    // a warp's own
    next_kernel_may_start();
#if COLUMNS
    if (blockIdx.x < p.image_blocks) {
        previous_kernel_done();
        clear(p, p.image, p.counters, blockIdx.x, p.image_blocks);
        lay_out(p, p.image, blockIdx.x, p.image_blocks);
        __syncthreads();
        if (p.signal && threadIdx.x == 0) asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p.signal + blockIdx.x), "l"(p.tag << 16) : "memory");
        return;
    }
#endif
    const int warp = threadIdx.x >> 5, block = blockIdx.x % CLUSTER, cluster = (blockIdx.x - p.image_blocks) / CLUSTER, part = block * WARPS + warp;
    const int row0 = cluster / p.clusters * CHUNK, tiles = (p.n + RANKS - 1) / RANKS;
    const u32 list = shared_address(lists[warp]);
    Inbox inbox(shared_address(sums), shared_address(gathered), shared_address(&barrier));
    int which = cluster % p.clusters;
    Rows rows(p, row0);    // with OVERLAP, as they were before the kernel in front had ended
    int items = rows.items(tiles);
    bool known = false, sure = !OVERLAP;    // the item; that the rows are what the index says
    Item item;
#if OVERLAP
#pragma unroll 1
    for (int next = items - 1 - (items - 1 - which) % p.clusters; next >= which && next < items; next -= p.clusters, known = true)
        item = rows.item(p, tiles, next, list), prefetch(p, item, part);
#endif
    previous_kernel_done();
    // what kernels in front wrote is where all of the device sees it, so nothing is released here
    if (!COLUMNS && p.signal && blockIdx.x == 0 && threadIdx.x == 0) asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p.signal), "l"(p.tag << 16) : "memory");
    const Slots now(p, row0);
    const int2 span = span_of(p, known ? item.slot : -1);
#pragma unroll 1
    for (;;) {
        if (which < items) {
            if (!known) item = rows.item(p, tiles, which, list);
            if (item.ranks(p) > 0) multiply(p, row0, list, item, part, inbox);
        }
        if (!sure) {
            sure = true;
            if (now.differ(rows.slots) || known && (span.x != item.span.x || span.y != item.span.y)) {    // anew
                rows = Rows(p, row0), items = rows.items(tiles), known = false;
                continue;
            }
        }
        if (which >= items) break;
        if (item.ranks(p) > 0) inbox.send(part, item.rows), inbox.wait();
        finish(p, row0, list, item, block, inbox);
        inbox.turn += item.ranks(p) > 0;
        which += p.clusters, known = false;
        __syncwarp();    // all have read the list
    }
    inbox.ready();
}
