// h[M, width] = A x in fp32, each row of x with the rows of A that its slot spans: the first of an adapter's two multiplies.
//
// A cluster of CLUSTER blocks takes an item after another: RANKS rows of A of one slot, and all rows of x (of a chunk of 64) that
// have this slot, so that A is read once for each adapter that is present. Its warps share K, 32 elements at a time by turns, and
// send their sums to the block that owns the rank, where a warp adds them, a lane a part, always as the same tree. So a row's bits
// depend on K alone. Which slots there are, each warp reads from the index: nothing of it is known at launch.
//
// Blocks are so small that they fit beside those of the base kernels: they wait there for the kernel before, and the next one's
// blocks need not wait until they have left.
//
//   8 or 16 ranks x 32 k of A, 16 bytes or two of them a lane --\
//   8 rows of x x 32 k, likewise ------------------------------- + 2 mma --> fp32 sums, ranks x 8 rows
//
// A lane's 8 elements of a row are those of two multiplies: k is in another order there, in A and x alike.
//
// Macros, set by adapters_shrink.py:
//   X_TYPE, A_TYPE  0 fp16, 1 bf16, 2 fp32; tensor cores multiply where both are the same 16-bit type
//   GROUPS          groups of 8 rows of x that are multiplied at once: 1, 2 or 4
//   RANKS           of an item: 16, or 8 for more clusters to share a long K
//   CLUSTER, WARPS  blocks that share K, warps of each WIDE     whether rows of x and A lie at multiples of 16 bytes
//   OVERLAP         starts before the previous kernel has ended
//   LATE            the next kernel starts only after that, and so may read x without waiting for this one

#define SPLIT CLUSTER
#define PARTS (CLUSTER * WARPS)       // of K
#define THREADS (32 * WARPS)
#define ROWS (8 * GROUPS)             // of x, at once
#define CHUNK 64                      // rows of x whose slots are compared
#define PITCH (ROWS + 4)              // floats of a rank's or a part's rows
#define OWNED ((RANKS + CLUSTER - 1) / CLUSTER)    // ranks of a block, at most
#define BATCH (GROUPS == 4 ? 3 : RANKS == 16 ? 5 : GROUPS == 2 ? 6 : 8)    // of 32 k, whose loads are on their way together
static_assert(PARTS <= 32, "a lane adds a part");
#define TENSOR (X_TYPE == A_TYPE && X_TYPE != 2)

#include "codebook_types.cuh"

struct Problem {
    const void* x;
    const void* bias;       // nobody's
    float* out;             // [m, width]
    long long x_stride;     // elements between rows of x
    int m, bias_is_fp32;
    const void* a;          // [a_rows, k]
    const int2* spans;      // a slot's first row of A, and how many
    const int* index;       // each row's slot, none where that is out of range; null: all take slot 0
    int k, a_rows, width, slots;
    int clusters;           // that share a chunk's items
};

#include "codebook_shared.cuh"

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

// The rows of a chunk and their slots; a lane holds those of two rows. Rows without an adapter are slot -1, none is -2.
struct Slots {
    int low, high;
    u64 leaders;    // the first row of each slot

    METHOD int slot(const Problem& p, int row, int rows, int row0) const {
        if (row >= rows) return -2;
        int found = 0;
        if (p.index) asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(found) : "l"(p.index + row0 + row));
        return (u32)found < (u32)p.slots ? found : -1;
    }
    // Whether no lane before has this slot; all lanes ask.
    static METHOD bool leads(int slot) { return __ffs(__match_any_sync(~0u, slot)) == (threadIdx.x & 31) + 1; }

    METHOD Slots(const Problem& p, int row0) {
        const int lane = threadIdx.x & 31, rows = min(CHUNK, p.m - row0);
        low = slot(p, lane, rows, row0), high = slot(p, lane + 32, rows, row0);
        const u32 first = __ballot_sync(~0u, leads(low) && low > -2);
        u32 second = 0;
        if (rows > 32) {
            bool fresh = leads(high) && high > -2;
            for (int i = 0; i < 32; ++i) fresh &= __shfl_sync(~0u, low, i) != high;
            second = __ballot_sync(~0u, fresh);
        }
        leaders = first | (u64)second << 32;
    }
    METHOD int of(int row) const {
        const int value = row < 32 ? low : high;
        return __shfl_sync(~0u, value, row & 31);
    }
    METHOD int slot_of(int number) const {    // of those that there are
        u64 left = leaders;
        for (int i = 0; i < number; ++i) left &= left - 1;
        return of(__ffsll(left) - 1);
    }
    METHOD u64 members(int slot) const { return __ballot_sync(~0u, low == slot) | (u64)__ballot_sync(~0u, high == slot) << 32; }
};

DEVICE int2 span_of(const Problem& p, int slot) {
    int2 span = make_int2(0, 0);
    if (slot >= 0) asm volatile("ld.global.cg.v2.s32 {%0, %1}, [%2];" : "=r"(span.x), "=r"(span.y) : "l"(p.spans + slot));
    return span;
}

// The first of a slot's rows of A that are of a tile of ranks, and how many there are.
DEVICE int2 rows_of_a(const Problem& p, int2 span, int tile) {
    const bool inside = span.x >= 0 && span.y >= 0 && span.y <= p.a_rows - span.x;
    return make_int2(span.x + RANKS * tile, inside ? max(0, min(RANKS, span.y - RANKS * tile)) : 0);
}

// Sends for a part of the rows of A that this cluster takes, while the kernel before is still at work; returns the first one's slot.
// That kernel may be writing the index or the spans: then the wrong rows come, and nothing else happens.
DEVICE int prefetch(const Problem& p, int row0, int tiles, int first, int part) {
    const int lane = threadIdx.x & 31, size = A_TYPE == 2 ? 4 : 2;
    const Slots slots(p, row0);
    const int items = __popcll(slots.leaders) * tiles;
#pragma unroll 1
    for (int item = first; item < items; item += p.clusters) {
        const int2 rows = rows_of_a(p, span_of(p, slots.slot_of(item / tiles)), item % tiles);
        const char* begin = (const char*)p.a + (long long)rows.x * p.k * size;
        const long long bytes = (long long)rows.y * p.k * size;
#pragma unroll 1
        for (long long at = (part * 32 + lane) * 128; at < bytes; at += PARTS * 32 * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(begin + at));
    }
    return first < items ? slots.slot_of(first / tiles) : -1;
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

// A warp's part of K: sums of `count` rows of x whose numbers are in `rows`, and `ranks` rows of A from `first` on.
#if TENSOR
DEVICE void multiply(const Problem& p, int row0, const int* rows, int count, int first, int ranks, int part, const Inbox& inbox) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    long long x_row[GROUPS];
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) x_row[j] = 8 * j + g < count ? (row0 + rows[8 * j + g]) * p.x_stride : -1;
    float acc[GROUPS][4] = {};
#pragma unroll 1
    for (int c = part; 32 * c < p.k; c += BATCH * PARTS) {
        u32 a[BATCH][2][4] = {}, x[BATCH][GROUPS][4];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int at = 32 * (c + b * PARTS) + 8 * q;
#pragma unroll
            for (int h = 0; h < RANKS / 8; ++h) eight(p.a, (long long)(first + g + 8 * h) * p.k, at, p.k, g + 8 * h < ranks && at < p.k, a[b][h]);
#pragma unroll
            for (int j = 0; j < GROUPS; ++j) eight(p.x, x_row[j], at, p.k, x_row[j] >= 0 && at < p.k, x[b][j]);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
#pragma unroll
            for (int half = 0; half < 4; half += 2)
#pragma unroll
                for (int j = 0; j < GROUPS; ++j) mma(acc[j], a[b][0][half], a[b][1][half], a[b][0][half + 1], a[b][1][half + 1], x[b][j][half], x[b][j][half + 1]);
    }
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
        for (int i = 0; i < RANKS / 4; ++i) inbox.put(g + 8 * (i >> 1), 8 * j + 2 * q + (i & 1), acc[j][i]);
}
#else
DEVICE void multiply(const Problem& p, int row0, const int* rows, int count, int first, int ranks, int part, const Inbox& inbox) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int row = 0; row < count; ++row) {
        float acc[RANKS] = {};
#pragma unroll 1
        for (int k = 32 * part + lane; k < p.k; k += 32 * PARTS) {
            const float x = number<X_TYPE>(p.x, (row0 + rows[row]) * p.x_stride + k);
#pragma unroll
            for (int r = 0; r < RANKS; ++r)
                if (r < ranks) acc[r] = fmaf(number<A_TYPE>(p.a, (long long)(first + r) * p.k + k), x, acc[r]);
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

extern "C" __global__ void __launch_bounds__(THREADS, (GROUPS == 1 ? 512 : 384) / THREADS)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
adapters_shrink(const __grid_constant__ Problem p) {
    __shared__ __align__(16) float sums[2][OWNED][PARTS][PITCH], gathered[WARPS][RANKS][PITCH];
    __shared__ u64 barrier;
    __shared__ int list[CHUNK];
    if (!LATE) next_kernel_may_start();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, block = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER, part = block * WARPS + warp;
    const int row0 = cluster / p.clusters * CHUNK, tiles = (p.width + RANKS - 1) / RANKS;
    Inbox inbox(shared_address(sums), shared_address(gathered), shared_address(&barrier));
    int likely = -1;    // the first slot, as the index says before the kernel before has ended
#if OVERLAP
    likely = prefetch(p, row0, tiles, cluster % p.clusters, part);
#endif
    previous_kernel_done();
    if (LATE) next_kernel_may_start();
    const int2 its_span = span_of(p, likely);
    const Slots slots(p, row0);
    const int items = __popcll(slots.leaders) * tiles;
#pragma unroll 1
    for (int item = cluster % p.clusters; item < items; item += p.clusters) {
        const int slot = slots.slot_of(item / tiles), tile = item % tiles;
        const u64 members = slots.members(slot);
        const int2 rows = rows_of_a(p, slot == likely ? its_span : span_of(p, slot), tile);
        const int first = rows.x, ranks = rows.y, count = __popcll(members);
        if (warp == 0)
            for (int row = lane; row < CHUNK; row += 32)
                if (members >> row & 1) list[__popcll(members & ((1ull << row) - 1))] = row;
        __syncthreads();
#pragma unroll 1
        for (int begin = 0; begin < count; begin += ROWS) {
            const int now = min(ROWS, count - begin);
            if (ranks > 0) {
                multiply(p, row0, list + begin, now, first, ranks, part, inbox);
                inbox.send(part, now);
                inbox.wait();
            }
#pragma unroll 4
            for (int i = warp; i < OWNED * ROWS; i += WARPS) {    // a warp takes some outputs
                const int rank = i / ROWS * CLUSTER + block, row = i % ROWS, column = RANKS * tile + rank;
                if (rank >= RANKS || row >= now || column >= p.width) continue;
                const float sum = rank < ranks ? inbox.sum(rank, row) : 0.f;
                if (lane == 0) p.out[(long long)(row0 + list[begin + row]) * p.width + column] = sum;
            }
            inbox.turn += ranks > 0;
        }
        __syncthreads();    // all have read the list
    }
    inbox.ready();
}
