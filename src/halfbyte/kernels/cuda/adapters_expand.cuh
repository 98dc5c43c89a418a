// What LoRA adapters add to a kernel's outputs, worked out by side warps while the others multiply: scaling * B h for a tile of W
// and the block's rows of x, in shared memory by the time that the outputs' sums are there. See adapters_items.cuh.
//
// A warp takes every EXPAND_WARPS-th tile, of 16 or 32 rows of W, of each eight rows of x, 16 ranks of it at a time. B and h of its
// next EXPAND_DEPTH are on their way to shared memory meanwhile, where each lane has places of its own.
//
// The kernel says:
//   EXPAND_COLUMNS  rows of x whose outputs a block writes      EXPAND_ROWS  rows of W at a time
//   EXPAND_PAIR     16-row tiles that a warp takes at once: 1 or 2        EXPAND_WARPS  that work here, if not one

#ifndef EXPAND_WARPS
#define EXPAND_WARPS 1
#endif
#define EXPAND_DEPTH 3
#define EXPAND_PITCH (EXPAND_ROWS + 4)    // floats of a row of x: the writers of four rows miss each other's banks
#define EXPAND_STAGE_BYTES (512 * (1 + EXPAND_PAIR))    // of a warp: 16 bytes of h a lane, then of B of each 16 rows
#define EXPAND_ITEMS_AT (EXPAND_COLUMNS * EXPAND_PITCH * 4)    // behind what is added
#define EXPAND_STAGES_AT (EXPAND_ITEMS_AT + EXPAND_COLUMNS * EXPAND_ITEM_BYTES)
#define EXPAND_BYTES (EXPAND_STAGES_AT + EXPAND_WARPS * EXPAND_DEPTH * EXPAND_STAGE_BYTES)

// Copies `BYTES` bytes of which `there` are there, the others zeros.
template <int BYTES>
DEVICE void copy_later(u32 to, const void* from, int there) {
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(there) : "memory");
}

// What a warp works on.
struct Tile {
    const Expand& e;
    u32 added;
    int warp, m0, row0, tiles, outputs;    // rows of W from row0 on, in tiles of 16 EXPAND_PAIR

    METHOD u32 item(int number) const { return added + EXPAND_ITEMS_AT + number * EXPAND_ITEM_BYTES; }
    METHOD u32 stage(int number) const {    // a lane's 16 bytes of h; those of B follow
        return added + EXPAND_STAGES_AT + (warp * EXPAND_DEPTH + number % EXPAND_DEPTH) * EXPAND_STAGE_BYTES + (this_thread() & 31) * 16;
    }
    // A lane's part of an item's B, in numbers from its begin: of ranks rank .. rank + 15 the four from 4 q on, of row g of a tile.
    METHOD long long b_at(const Item& item, int rank, int tile) const {
        const int lane = this_thread() & 31;
        return (long long)(row0 + 16 * EXPAND_PAIR * tile + (lane >> 2)) * item.stride + rank + 4 * (lane & 3);
    }
};

// Its way through a tile's items: the ranks of each, 16 at a time, and of those its tiles of 16 rows of W.
struct Step {
    int item, rank, tile;

    METHOD void next(const Tile& on) {
        tile += EXPAND_WARPS;
        if (tile < on.tiles) return;
        tile = on.warp, rank += 16;
        if (rank >= (int)lds32(on.item(item) + 16)) rank = 0, ++item;
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
            there = item.wide(e) ? 2 * left : 0, down = 16 * item.stride;
            from = there ? (const char*)item.b + 2 * on.b_at(item, at.rank, at.tile) : (const char*)e.b;
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
        scaling = at.rank + 16 >= item.rank ? item.scaling : 1.f, wide = item.wide(on.e), some = item.rank > 0;
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
        const char* from = (const char*)item.b + on.b_at(item, at.rank, at.tile) * (type == 2 ? 4 : 2);
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

// All warps together: what is added to rows row0 .. row0 + rows - 1 of W. A thread reads what other kernels wrote, so it
// has waited for them.
DEVICE void expand(const Expand& e, u32 added, int items, int m0, int row0, int rows, int outputs, int warp = 0) {
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
