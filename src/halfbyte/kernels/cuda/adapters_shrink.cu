// h[M, width] = A x in fp32, each row of x with the rows of A that its slot spans: the first of an adapter's two multiplies.
//
// A cluster of CLUSTER blocks takes an item after another: 16 rows of A of one slot, and all rows of x (of a chunk of 64) that
// have this slot, so that A is read once for each adapter that is present. Its warps share K, 32 elements at a time by turns;
// their sums are added in shared memory, first a block's warps, then the cluster's blocks, in the order of their numbers. So a
// row's bits depend on K alone. Which slots there are, each warp reads from the index: nothing of it is known at launch.
//
//   16 ranks x 32 k of A, 8 bytes or more a lane --\
//   8 rows of x x 32 k, likewise ------------------ + 2 mma --> fp32 sums, 16 ranks x 8 rows
//
// A lane's 8 elements of a row are those of two multiplies: k is in another order there, in A and x alike.
//
// Macros, set by adapters_shrink.py:
//   X_TYPE, A_TYPE  0 fp16, 1 bf16, 2 fp32; tensor cores multiply where both are the same 16-bit type
//   GROUPS          groups of 8 rows of x that are multiplied at once: 1, 2 or 4
//   CLUSTER         blocks that share K                WIDE     whether rows of x and A lie at multiples of 16 bytes
//   OVERLAP         starts before the previous kernel has ended

#define SPLIT CLUSTER
#define WARPS 16
#define THREADS (32 * WARPS)
#define RANKS 16                      // of an item
#define ROWS (8 * GROUPS)             // of x, at once
#define CHUNK 64                      // rows of x whose slots are compared
#define OUTPUTS (RANKS * ROWS)
#define BATCH (GROUPS == 4 ? 2 : 4)   // of 32 k, whose loads are on their way together
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
        const int found = p.index ? p.index[row0 + row] : 0;
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
    METHOD u64 members(int slot) const { return __ballot_sync(~0u, low == slot) | (u64)__ballot_sync(~0u, high == slot) << 32; }
};

// A warp's part of K: sums[rank][row], of `count` rows of x whose numbers are in `rows`, and `ranks` rows of A from `first` on.
#if TENSOR
DEVICE void multiply(const Problem& p, int row0, const int* rows, int count, int first, int ranks, int part, int parts, float* sums) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    long long x_row[GROUPS];
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) x_row[j] = 8 * j + g < count ? (row0 + rows[8 * j + g]) * p.x_stride : -1;
    float acc[GROUPS][4] = {};
#pragma unroll 1
    for (int c = part; 32 * c < p.k; c += BATCH * parts) {
        u32 a[BATCH][2][4], x[BATCH][GROUPS][4];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int at = 32 * (c + b * parts) + 8 * q;
#pragma unroll
            for (int h = 0; h < 2; ++h) eight(p.a, (long long)(first + g + 8 * h) * p.k, at, p.k, g + 8 * h < ranks && at < p.k, a[b][h]);
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
        for (int i = 0; i < 4; ++i) sums[(g + 8 * (i >> 1)) * ROWS + 8 * j + 2 * q + (i & 1)] = acc[j][i];
}
#else
DEVICE void multiply(const Problem& p, int row0, const int* rows, int count, int first, int ranks, int part, int parts, float* sums) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int row = 0; row < count; ++row) {
        float acc[RANKS] = {};
#pragma unroll 1
        for (int k = 32 * part + lane; k < p.k; k += 32 * parts) {
            const float x = number<X_TYPE>(p.x, (row0 + rows[row]) * p.x_stride + k);
#pragma unroll
            for (int r = 0; r < RANKS; ++r)
                if (r < ranks) acc[r] = fmaf(number<A_TYPE>(p.a, (long long)(first + r) * p.k + k), x, acc[r]);
        }
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
#pragma unroll
            for (int other = 16; other > 0; other /= 2) acc[r] += __shfl_xor_sync(~0u, acc[r], other);
            if (lane == 0) sums[r * ROWS + row] = acc[r];
        }
    }
}
#endif

DEVICE float remote_sum(u32 address, int block) {
    float value;
#if CLUSTER > 1
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(at_rank(address, block)) : "memory");
#else
    value = __uint_as_float(lds32(address));
#endif
    return value;
}

DEVICE void cluster_sync() {
    if (CLUSTER == 1) __syncthreads();
    __syncwarp();
    cluster_arrive();
    cluster_wait();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
adapters_shrink(const __grid_constant__ Problem p) {
    __shared__ float sums[WARPS][OUTPUTS];
    __shared__ float total[OUTPUTS];
    __shared__ int list[CHUNK];
    next_kernel_may_start();
    previous_kernel_done();
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, block = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER;
    const int row0 = cluster / p.clusters * CHUNK, tiles = (p.width + RANKS - 1) / RANKS;
    const Slots slots(p, row0);
    const int items = __popcll(slots.leaders) * tiles;
#pragma unroll 1
    for (int item = cluster % p.clusters; item < items; item += p.clusters) {
        u64 left = slots.leaders;
        for (int i = 0; i < item / tiles; ++i) left &= left - 1;
        const int slot = slots.of(__ffsll(left) - 1), tile = item % tiles;
        const u64 members = slots.members(slot);
        const int2 span = slot < 0 ? make_int2(0, 0) : p.spans[slot];
        const bool inside = span.x >= 0 && span.y >= 0 && span.y <= p.a_rows - span.x;
        const int first = span.x + RANKS * tile, ranks = inside ? min(RANKS, span.y - RANKS * tile) : 0, count = __popcll(members);
        if (warp == 0)
            for (int row = lane; row < CHUNK; row += 32)
                if (members >> row & 1) list[__popcll(members & ((1ull << row) - 1))] = row;
        __syncthreads();
#pragma unroll 1
        for (int begin = 0; begin < count; begin += ROWS) {
            const int now = min(ROWS, count - begin);
            if (ranks > 0) {
                multiply(p, row0, list + begin, now, first, ranks, block * WARPS + warp, CLUSTER * WARPS, sums[warp]);
                __syncthreads();
                for (int i = thread; i < OUTPUTS; i += THREADS) {
                    float sum = sums[0][i];
#pragma unroll
                    for (int w = 1; w < WARPS; ++w) sum += sums[w][i];
                    total[i] = sum;
                }
                cluster_sync();
            }
            for (int i = block * (OUTPUTS / CLUSTER) + thread; i < (block + 1) * (OUTPUTS / CLUSTER); i += THREADS) {
                const int column = RANKS * tile + i % RANKS, at = i % RANKS * ROWS + i / RANKS, row = i / RANKS;
                if (row >= now || column >= p.width) continue;
                float sum = 0.f;
                if (i % RANKS < ranks) {
                    sum = remote_sum(shared_address(total + at), 0);
#pragma unroll
                    for (int b = 1; b < CLUSTER; ++b) sum += remote_sum(shared_address(total + at), b);
                }
                p.out[(long long)(row0 + list[begin + row]) * p.width + column] = sum;
            }
            if (ranks > 0) cluster_sync();    // all have read
        }
        __syncthreads();    // and the list
    }
}
