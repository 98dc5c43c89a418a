// What LoRA adapters add to a tile's outputs, by the warps that have multiplied, once its sums are there: see adapters_items.cuh. A
// warp takes a piece after another, 16 rows of W of an item, and hands each output's part over as soon as it has it.
//
// The kernel says:
//   EXPAND_COLUMNS  rows of x whose outputs a block writes      EXPAND_TILES  of 16 rows of W in a tile
//   EXPAND_WARPS    that work here

#define EXPAND_DEPTH (WARPGROUPS == 4 ? 2 : 3)    // steps of 16 ranks whose B is on its way at once
#define EXPAND_SHARE (EXPAND_WARPS / EXPAND_TILES)    // warps that share a tile's items
static_assert(EXPAND_WARPS % EXPAND_TILES == 0, "a warp has one tile of 16 rows");

// A lane's four of 16 ranks of B, of rows g and g + 8 of 16, two to a word.
struct Parts {
    u32 b[2][2];
};

// A warp's way through items, and of each its ranks, 16 at a time.
struct Step {
    u32 item;    // where it is
    int rank;

    METHOD void next() {
        rank += 16;
        if (rank >= (int)lds32(item + 16)) rank = 0, item += EXPAND_SHARE * EXPAND_ITEM_BYTES;
    }
};

// What a warp adds to its 16 rows of W.
struct Outputs {
    const float* h;     // of the block's first row of x
    int width, b_type;
    int row, n;         // a lane's first row of W, and how many there are
    int lane;

    METHOD Outputs(const float* shrunk, int width, int b_type, int m0, int row0, int n)
        : h(shrunk + (long long)m0 * width), width(width), b_type(b_type), row(row0 + threadIdx.x / 32 % EXPAND_TILES * 16 + (threadIdx.x >> 2 & 7)), n(n), lane(threadIdx.x & 31) {}

    METHOD const float* h_of(const Item& item, int rank) const { return h + (item.row(lane >> 2) * width + item.column + rank + 4 * (lane & 3)); }
    METHOD long long b_at(const Item& item, int rank) const { return (long long)row * item.stride + rank + 4 * (lane & 3); }

    // Of a plain item, which has 16 ranks or more from here on, or none.
    METHOD void load(const Step& at, Parts& to) const {
        const Item item = Item::at(at.item);
        to = {};
        if (item.rank == 0) return;
        const u16* const b = (const u16*)item.b + b_at(item, at.rank);
        if (row < n) asm volatile("ld.global.L1::evict_first.v2.u32 {%0, %1}, [%2];" : "=r"(to.b[0][0]), "=r"(to.b[0][1]) : "l"(b));
        if (row + 8 < n) asm volatile("ld.global.L1::evict_first.v2.u32 {%0, %1}, [%2];" : "=r"(to.b[1][0]), "=r"(to.b[1][1]) : "l"(b + 8 * item.stride));
    }

    // Two of a lane's four ranks are one multiply's; b: rows g and g + 8 of one rank, then of the other. whole: it has no more bits than
    // tf32.
    static METHOD void multiply(const float* h, const float (&b)[4], bool whole, float (&acc)[4]) {
        u32 a[4];
        float high[2], low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) high[i] = tf32_of(h[i]), low[i] = h[i] - high[i];
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = __float_as_uint(whole ? b[i] : tf32_of(b[i]));
        mma_tf32(acc, a, high[0], high[1]);
        mma_tf32(acc, a, low[0], low[1]);
        if (whole) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = __float_as_uint(b[i] - __uint_as_float(a[i]));
        mma_tf32(acc, a, high[0], high[1]);
    }
    METHOD void multiply(const Step& at, const Parts& of, float (&acc)[4]) const {
        const Item item = Item::at(at.item);
        float h[4] = {};
        if (item.rank > 0 && item.row(lane >> 2) != NOBODY)    // stays in the L1
            asm volatile("ld.global.L1::evict_last.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(h[0]), "=f"(h[1]), "=f"(h[2]), "=f"(h[3]) : "l"(h_of(item, at.rank)));
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            float b[4];
            if (b_type == 1)
#pragma unroll
                for (int i = 0; i < 4; ++i) b[i] = half_of_b(1, of.b[i & 1][s], i >> 1);
            else
#pragma unroll
                for (int i = 0; i < 4; ++i) b[i] = half_of_b(0, of.b[i & 1][s], i >> 1);
            multiply(h + 2 * s, b, true, acc);
        }
    }
    METHOD void multiply_number_by_number(const Step& at, float (&acc)[4]) const {
        const Item item = Item::at(at.item);
        const int left = item.rank - at.rank - 4 * (lane & 3);
        const float* const from = h_of(item, at.rank);
        const long long b0 = b_at(item, at.rank);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            float h_of[2], b[4];
#pragma unroll
            for (int i = 0; i < 2; ++i) h_of[i] = item.row(lane >> 2) != NOBODY && 2 * s + i < left ? __ldcg(from + 2 * s + i) : 0.f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int rank = 2 * s + (i >> 1), down = 8 * (i & 1);
                b[i] = rank < left && row + down < n ? number_of_b(b_type, (const void*)item.b, b0 + down * item.stride + rank) : 0.f;
            }
            multiply(h_of, b, b_type != 2, acc);
        }
    }

    // Calls write(column, i, added) for each output of an item, by its lane: of the block's row `column` of x and row g + 8 i of the
    // warp's 16; -0 changes no bit of what it is added to.
    template <class Write>
    METHOD void hand_over(u32 at, float (&acc)[4], const Write& write) const {
        const Item item = Item::at(at);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int column = item.row(2 * (lane & 3) + c);
            if (column == NOBODY) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i) write(column, i, item.rank > 0 ? __fmul_rn(item.scaling, acc[2 * i + c]) : -0.f);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[i] = 0.f;
    }

    // For all outputs of so many items. plain: whether all of them are.
    template <class Write>
    METHOD void expand(u32 list, int items, bool plain, const Write& write) const {
        const u32 end = list + items * EXPAND_ITEM_BYTES;
        Step ahead = {list + threadIdx.x / 32 / EXPAND_TILES * EXPAND_ITEM_BYTES, 0}, now = ahead;
        float acc[4] = {};
#pragma unroll 1
        while (plain && now.item < end) {
            Parts parts[EXPAND_DEPTH];
#pragma unroll
            for (int d = 0; d < EXPAND_DEPTH; ++d)
                if (ahead.item < end) load(ahead, parts[d]), ahead.next();
#pragma unroll
            for (int d = 0; d < EXPAND_DEPTH; ++d) {
                if (now.item >= end) break;
                multiply(now, parts[d], acc);
                const u32 done = now.item;
                now.next();
                if (now.item != done) hand_over(done, acc, write);
            }
        }
#pragma unroll 1
        while (now.item < end) {
            multiply_number_by_number(now, acc);
            const u32 done = now.item;
            now.next();
            if (now.item != done) hand_over(done, acc, write);
        }
    }
};

// Whether four numbers of h, and of B, can be read at once, 16 ranks at a time, of all items; a warp asks.
DEVICE bool all_plain(const Expand& e, u32 list, int items) {
    bool plain = e.b_type != 2 && (((u64)e.shrunk & 15) | (e.width & 3)) == 0;
    for (int i = this_thread() & 31; i < items; i += 32) {
        const Item item = Item::at(list + i * EXPAND_ITEM_BYTES);
        plain &= item.rank == 0 || (item.wide(e) && item.rank % 16 == 0 && item.column % 4 == 0);
    }
    return __all_sync(~0u, plain);
}
