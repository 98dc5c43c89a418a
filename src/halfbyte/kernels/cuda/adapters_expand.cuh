// What LoRA adapters add to a kernel's outputs, worked out by side warps while the others multiply: scaling * B h in fp32 for a
// tile of W and the block's rows of x, in shared memory by the time that the outputs' sums are there.
//
//   B of 16 rows of W x 8 ranks, as tf32 ------\
//   h of 8 rows of x x 8 ranks, tf32 twice ---- + 2 mma.m16n8k8 --> fp32 sums of those rows
//
// The eight rows are of one adapter, wherever they are among the block's. fp16 and bf16 are exact in tf32, h is kept to 22 bits,
// and so is a B of fp32. A sum runs over the ranks in an order of its own, 8 at a time, so it has the same bits in every kernel and
// whatever the other rows take.
//
// A warp takes every EXPAND_WARPS-th tile, of 16 or 32 rows of W, of each eight rows of x, 16 ranks of it at a time. B and h of its
// next EXPAND_DEPTH are on their way to shared memory meanwhile, where each lane has places of its own.
//
// The kernel says:
//   EXPAND_COLUMNS  rows of x whose outputs a block writes      EXPAND_WARPS  that work here
//   EXPAND_ROWS     rows of W at a time                         EXPAND_PAIR   16-row tiles that a warp takes at once: 1 or 2

#define EXPAND_DEPTH 3
#define EXPAND_PITCH (EXPAND_ROWS + 4)    // floats of a row of x: the writers of four rows miss each other's banks
#define EXPAND_ITEM_BYTES 32
#define EXPAND_STAGE_BYTES (512 * (1 + EXPAND_PAIR))    // of a warp: 16 bytes of h a lane, then of B of each 16 rows
#define EXPAND_ITEMS_AT (EXPAND_COLUMNS * EXPAND_PITCH * 4)    // behind what is added
#define EXPAND_STAGES_AT (EXPAND_ITEMS_AT + EXPAND_COLUMNS * EXPAND_ITEM_BYTES)
#define EXPAND_BYTES (EXPAND_STAGES_AT + EXPAND_WARPS * EXPAND_DEPTH * EXPAND_STAGE_BYTES)
#define NOBODY 0xFF

DEVICE void sts8(u32 address, u32 value) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(value) : "memory"); }

// An adapter and up to eight rows of x that take it. Rows without one are those of items of rank 0. In shared memory the rows,
// of the block's, come first, then four numbers: rank, column, stride, first; then the scaling.
struct Item {
    u32 rows[2];    // a byte each, or NOBODY
    int rank, column, stride, first;
    float scaling;

    static METHOD Item at(u32 address) {
        Item item;
        u32 word[4], more;
        lds128(address, item.rows[0], item.rows[1], word[0], word[1]);
        lds128(address + 16, word[2], word[3], more, more);
        item.rank = word[0], item.column = word[1], item.stride = word[2], item.first = word[3];
        item.scaling = __uint_as_float(lds32(address + 24));
        return item;
    }
    METHOD int row(int i) const { return (i < 4 ? rows[0] : rows[1]) >> 8 * (i & 3) & 0xFF; }
    // Whether four numbers of its B can be read at once.
    METHOD bool wide(const Expand& e, int outputs) const {
        return rank > 0 && e.b_type != 2 && ((u64)e.b + 2ll * first * outputs & 7 | stride & 3) == 0;
    }
};

// Rows m0 .. m0 + EXPAND_COLUMNS - 1 of x and their slots; a lane holds those of two. -1: no adapter, -2: no row.
struct Takers {
    int slot[2];
    u64 alike[2];    // the rows that have the same

    METHOD Takers(const Expand& e, int m0, int m) {
        const int lane = this_thread() & 31;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 32 * i + lane;
            const bool there = row < EXPAND_COLUMNS && m0 + row < m;
            const int named = there && e.index ? __ldcg(e.index + m0 + row) : 0;
            slot[i] = !there ? -2 : (u32)named < (u32)e.slots ? named : -1;
        }
        alike[0] = __match_any_sync(~0u, slot[0]), alike[1] = 0;
        if (EXPAND_COLUMNS > 32) {
            alike[1] = (u64)__match_any_sync(~0u, slot[1]) << 32;
#pragma unroll 1
            for (int i = 0; i < 32; ++i) {
                alike[0] |= (u64)(__shfl_sync(~0u, slot[1], i) == slot[0]) << 32 + i;
                alike[1] |= (u64)(__shfl_sync(~0u, slot[0], i) == slot[1]) << i;
            }
        }
    }
};

// A warp lists what the block's rows of x take; returns how many items there are.
DEVICE int list_items(const Expand& e, int m0, int m, u32 list) {
    const int lane = this_thread() & 31;
    const Takers takers(e, m0, m);
    int items = 0, before[2];    // items of slots that appear before
#pragma unroll
    for (int i = 0; i < (EXPAND_COLUMNS > 32 ? 2 : 1); ++i) {
        const bool leads = takers.slot[i] != -2 && __ffsll(takers.alike[i]) == 32 * i + lane + 1;
        int sum = leads ? (__popcll(takers.alike[i]) + 7) / 8 : 0;
        const int mine = sum;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        before[i] = items + sum - mine;
        items += __shfl_sync(~0u, sum, 31);
    }
#pragma unroll
    for (int i = 0; i < (EXPAND_COLUMNS > 32 ? 2 : 1); ++i) {
        const u64 alike = takers.alike[i];
        const int leader = __ffsll(alike) - 1;
        int first = __shfl_sync(~0u, before[0], leader & 31);
        if (EXPAND_COLUMNS > 32) {
            const int later = __shfl_sync(~0u, before[1], leader & 31);
            if (leader >= 32) first = later;
        }
        if (takers.slot[i] == -2) continue;
        const int number = __popcll(alike & (1ull << 32 * i + lane) - 1);    // among the rows of the slot
        const u32 item = list + (first + number / 8) * EXPAND_ITEM_BYTES;
        sts8(item + number % 8, 32 * i + lane);
        if (number % 8 > 0) continue;
        for (int none = __popcll(alike) - number; none < 8; ++none) sts8(item + none, NOBODY);
        const int slot = takers.slot[i];
        const int4 place = slot < 0 ? make_int4(0, 0, 0, 0) : __ldcg(e.table + slot);
        sts32(item + 8, place.y), sts32(item + 12, place.x);
        sts128(item + 16, place.w, place.z, __float_as_uint(slot < 0 ? 0.f : __ldcg(e.scalings + slot)), 0);
    }
    return items;
}

// Sends for rows row0 .. row0 + rows - 1 of some items' B: into the L2, so that nobody waits for memory long.
DEVICE void prefetch_items(const Expand& e, u32 list, int items, int warp, int row0, int rows, int outputs) {
    const int lane = this_thread() & 31, size = e.b_type == 2 ? 4 : 2;
    rows = min(rows, outputs - row0);
#pragma unroll 1
    for (int i = warp; i < items; i += EXPAND_WARPS) {
        const Item item = Item::at(list + i * EXPAND_ITEM_BYTES);
        const char* begin = (const char*)e.b + ((long long)item.first * outputs + (long long)row0 * item.stride) * size;
        const long long bytes = item.rank > 0 ? (long long)rows * item.stride * size : 0;
#pragma unroll 1
        for (long long line = lane * 128; line < bytes; line += 32 * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(begin + line));
    }
}

DEVICE void mma_tf32(float (&d)[4], const u32 (&a)[4], float b0, float b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

DEVICE float tf32_of(float value) { return __uint_as_float(__float_as_uint(value) & 0xFFFFE000u); }

// Number i of a word of two.
DEVICE float half_of_b(int type, u32 word, int i) {
    if (type == 1) return __uint_as_float(i ? word & 0xFFFF0000u : word << 16);
    float value;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(i ? word >> 16 : word & 0xFFFFu));
    return value;
}

DEVICE float number_of_b(int type, const void* from, int at) {
    return type == 2 ? ((const float*)from)[at] : half_of_b(type, ((const u16*)from)[at], 0);
}

// Copies `BYTES` bytes of which `there` are there, the others zeros.
template <int BYTES>
DEVICE void copy_later(u32 to, const void* from, int there) {
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(there) : "memory");
}

// What a warp of a block works on.
struct Tile {
    const Expand& e;
    u32 added;
    int warp, m0, row0, tiles, outputs;    // rows of W from row0 on, in tiles of 16 EXPAND_PAIR

    METHOD u32 item(int number) const { return added + EXPAND_ITEMS_AT + number * EXPAND_ITEM_BYTES; }
    METHOD u32 stage(int number) const {    // a lane's 16 bytes of h; those of B follow
        return added + EXPAND_STAGES_AT + (warp * EXPAND_DEPTH + number % EXPAND_DEPTH) * EXPAND_STAGE_BYTES + (this_thread() & 31) * 16;
    }
    // A lane's part of B, in numbers from its begin: of ranks rank .. rank + 15 the four from 4 q on, of row g of a tile.
    METHOD long long b_at(const Item& item, int rank, int tile) const {
        const int lane = this_thread() & 31;
        return (long long)item.first * outputs + (long long)(row0 + 16 * EXPAND_PAIR * tile + (lane >> 2)) * item.stride + rank + 4 * (lane & 3);
    }
};

// A warp's way through a tile's items: the ranks of each, 16 at a time, and of those its tiles of 16 rows of W.
struct Step {
    int item, rank, tile;

    METHOD void next(const Tile& on) {
        tile += EXPAND_WARPS;
        if (tile < on.tiles) return;
        tile = on.warp, rank += 16;
        if (rank >= (int)lds32(on.item(item) + 8)) rank = 0, ++item;
    }
};

// Sends for B and h. What is the same for all tiles of an item's ranks is worked out with the first.
struct Sender {
    Step at;
    const char* from;
    int down, there;    // bytes to the row that is eight further; bytes that a lane takes of a row

    METHOD void send(const Tile& on, int number) {
        const Expand& e = on.e;
        const int lane = this_thread() & 31;
        const u32 to = on.stage(number);
        if (at.tile == on.warp) {
            const Item item = Item::at(on.item(at.item));
            const int left = max(0, min(4, item.rank - at.rank - 4 * (lane & 3)));
            there = item.wide(e, on.outputs) ? 2 * left : 0, down = 16 * item.stride;
            from = there ? (const char*)e.b + 2 * on.b_at(item, at.rank, at.tile) : (const char*)e.b;
            const int row = item.row(lane >> 2), of_h = row == NOBODY ? 0 : left, column = item.column;
            const float* h = of_h ? e.shrunk + (long long)(on.m0 + row) * e.width + column + at.rank + 4 * (lane & 3) : e.shrunk;
            if ((((u64)e.shrunk | 4ull * e.width | 4ull * column) & 15) == 0)
                copy_later<16>(to, h, 4 * of_h);
            else
#pragma unroll
                for (int i = 0; i < 4; ++i) copy_later<4>(to + 4 * i, i < of_h ? h + i : e.shrunk, i < of_h ? 4 : 0);
        }
        const int row = on.row0 + 16 * EXPAND_PAIR * at.tile + (lane >> 2);
#pragma unroll
        for (int i = 0; i < 2 * EXPAND_PAIR; ++i) {
            const bool any = there > 0 && row + 8 * i < on.outputs;
            copy_later<8>(to + 512 * (1 + i / 2) + 8 * (i & 1), any ? from + i * down : (const char*)e.b, any ? there : 0);
        }
        if (there > 0) from += 2 * EXPAND_PAIR * EXPAND_WARPS * down;
        at.next(on);
    }
};

// Multiplies, once they are there. Of 16 ranks a lane has four: two are the first multiply's, two the second's. Sums of ranks so
// far lie where the result will.
struct Receiver {
    Step at;
    float high[4], low[4];    // h
    u32 to[2];                // of the two rows of x whose sums a lane has, or 0
    float scaling;            // once the last ranks are added
    bool wide, some;          // whether four numbers of B come at once; whether there is an adapter

    METHOD void settle(const Tile& on, u32 stage) {
        const Item item = Item::at(on.item(at.item));
        const int lane = this_thread() & 31;
        u32 word[4];
        lds128(stage, word[0], word[1], word[2], word[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) high[i] = tf32_of(__uint_as_float(word[i])), low[i] = __uint_as_float(word[i]) - high[i];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = item.row(2 * (lane & 3) + i);
            to[i] = row == NOBODY ? 0 : on.added + (row * EXPAND_PITCH + 16 * EXPAND_PAIR * at.tile + (lane >> 2)) * 4;
        }
        scaling = at.rank + 16 >= item.rank ? item.scaling : 1.f, wide = item.wide(on.e, on.outputs), some = item.rank > 0;
    }

    // Of one multiply: 16 rows of W, in which a lane has rows g and g + 8 of one rank, then of the other.
    METHOD void multiply(const u32 (&a)[4], int s, float (&acc)[4]) const {
        mma_tf32(acc, a, high[2 * s], high[2 * s + 1]);
        mma_tf32(acc, a, low[2 * s], low[2 * s + 1]);
    }

    METHOD void multiply_wide(const Tile& on, u32 stage, float (&acc)[EXPAND_PAIR][4]) const {
        u32 word[EXPAND_PAIR][4];    // two of row g, two of row g + 8
#pragma unroll
        for (int t = 0; t < EXPAND_PAIR; ++t) lds128(stage + 512 * (1 + t), word[t][0], word[t][1], word[t][2], word[t][3]);
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int t = 0; t < EXPAND_PAIR; ++t) {
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = __float_as_uint(half_of_b(on.e.b_type, word[t][2 * (i & 1) + s], i >> 1));
                multiply(a, s, acc[t]);
            }
    }

    METHOD void multiply_number_by_number(const Tile& on, float (&acc)[EXPAND_PAIR][4]) const {
        const Item item = Item::at(on.item(at.item));
        const int type = on.e.b_type, lane = this_thread() & 31, left = item.rank - at.rank - 4 * (lane & 3), rows = on.outputs - on.row0 - 16 * EXPAND_PAIR * at.tile - (lane >> 2);
        const char* from = (const char*)on.e.b + on.b_at(item, at.rank, at.tile) * (type == 2 ? 4 : 2);
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int t = 0; t < EXPAND_PAIR; ++t) {
                u32 a[4], rest[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int down = 16 * t + 8 * (i & 1), rank = 2 * s + (i >> 1);
                    const float value = down < rows && rank < left ? number_of_b(type, from, down * item.stride + rank) : 0.f;
                    a[i] = __float_as_uint(type == 2 ? tf32_of(value) : value);
                    rest[i] = __float_as_uint(value - __uint_as_float(a[i]));
                }
                multiply(a, s, acc[t]);
                if (type == 2) mma_tf32(acc[t], rest, high[2 * s], high[2 * s + 1]);
            }
    }

    METHOD void receive(const Tile& on, int number) {
        const u32 stage = on.stage(number);
        if (at.tile == on.warp) settle(on, stage);
        float acc[EXPAND_PAIR][4] = {};
        if (at.rank > 0)
#pragma unroll
            for (int i = 0; i < 4 * EXPAND_PAIR; ++i)
                if (to[i & 1]) acc[i / 4][i & 3] = __uint_as_float(lds32(to[i & 1] + 32 * (i >> 1)));
        if (wide)
            multiply_wide(on, stage, acc);
        else if (some)
            multiply_number_by_number(on, acc);
#pragma unroll
        for (int i = 0; i < 4 * EXPAND_PAIR; ++i) {    // -0 changes no bit of what it is added to
            const float sum = some ? __fmul_rn(scaling, acc[i / 4][i & 3]) : -0.f;
            if (to[i & 1] && (EXPAND_PAIR == 1 || 2 * 16 * at.tile + 8 * (i >> 1) < EXPAND_ROWS)) sts32(to[i & 1] + 32 * (i >> 1), __float_as_uint(sum));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (to[i]) to[i] += EXPAND_WARPS * EXPAND_PAIR * 64;
        at.next(on);
    }
};

// Waits for what is far off; asking all the time would take turns from those who multiply.
DEVICE void barrier_wait_long(u32 barrier, u32 parity) {
    for (;;) {
        u32 done;
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
        if (done) return;
        asm volatile("nanosleep.u32 200;");
    }
}

// All warps together: what is added to rows row0 .. row0 + rows - 1 of W. A thread reads what other kernels wrote, so it
// has waited for them.
DEVICE void expand(const Expand& e, u32 added, int items, int warp, int m0, int row0, int rows, int outputs) {
    const Tile on = {e, added, warp, m0, row0, (rows + 16 * EXPAND_PAIR - 1) / (16 * EXPAND_PAIR), outputs};
    if (warp >= on.tiles) return;
    Sender ahead = {{0, 0, warp}};
    Receiver now = {{0, 0, warp}};
#pragma unroll 1
    for (int number = -EXPAND_DEPTH; now.at.item < items; ++number) {
        if (number >= 0) {
            asm volatile("cp.async.wait_group %0;" ::"n"(EXPAND_DEPTH - 1) : "memory");
            now.receive(on, number);
        }
        if (ahead.at.item < items) ahead.send(on, number + EXPAND_DEPTH);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
}

// What is added to output `row` of the tile for row `column` of x, both counted from where the block's begin.
DEVICE float added_to(u32 added, int column, int row) { return __uint_as_float(lds32(added + (column * EXPAND_PITCH + row) * 4)); }
