// LoRA adapters in kernels that add scaling * B h to their outputs: who takes which, and their numbers on the way to the tensor cores.
//
//   B of 16 rows of W x 8 ranks, as tf32 ------\
//   h of 8 rows of x x 8 ranks, tf32 twice ---- + 2 mma.m16n8k8 --> fp32 sums of those rows
//
// The eight rows are of one adapter, wherever they are among the block's. fp16 and bf16 are exact in tf32, h is kept to 22 bits,
// and so is a B of fp32. A sum runs over the ranks in an order of its own, 8 at a time, so it has the same bits in every kernel and
// whatever the other rows take.
//
// The kernel says:
//   EXPAND_COLUMNS  rows of x whose outputs a block writes

#define EXPAND_ITEM_BYTES 32
#define NOBODY 0xFF

DEVICE void sts8(u32 address, u32 value) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(value) : "memory"); }

// A warp waits for what adapters_shrink.cu signals: that x is there, or its image, so that nobody but who reads h need wait for that
// kernel. All of its blocks have started by then, so it does signal. Without signals, it waits for the kernel in front.
DEVICE void wait_for_signal(const Expand& e) {
    if (!e.signal) previous_kernel_done();
    for (int i = e.signal ? this_thread() & 31 : e.signals; i < e.signals; i += 32) {
        u64 word;
        do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(e.signal + i) : "memory");
        while (word >> 16 != e.tag);
    }
    __syncwarp();
}

// Says so afterwards, for one warp of each block. The first word counts them: the last leaves no tag behind, as this launch may be one
// of a graph that is replayed.
DEVICE void signal_seen(const Expand& e) {
    if (!e.signal) return;
    u64 word = 0;
    const int lane = this_thread() & 31;
    if (lane == 0) asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(word) : "l"(e.signal) : "memory");
    const bool last = __shfl_sync(~0u, (u32)word & 0xFFFF, 0) == gridDim.x - 1;
    for (int i = last ? lane : e.signals; i < e.signals; i += 32) asm volatile("st.relaxed.gpu.global.u64 [%0], 0;" ::"l"(e.signal + i) : "memory");
}

// An adapter and up to eight rows of x that take it; rows without one are those of items of rank 0. So it lies in shared memory.
struct Item {
    u32 rows[2];       // a byte each, of the block's, or NOBODY
    u64 b;             // where its B [outputs, stride] begins
    int rank, column;  // its first column of h
    int stride;
    float scaling;     // by which its sums are multiplied, so that they may join the outputs' sums

    static METHOD Item at(u32 address) {
        Item item;
        u32 b[2], word[4];
        lds128(address, item.rows[0], item.rows[1], b[0], b[1]);
        lds128(address + 16, word[0], word[1], word[2], word[3]);
        item.b = b[0] | (u64)b[1] << 32, item.rank = word[0], item.column = word[1], item.stride = word[2], item.scaling = __uint_as_float(word[3]);
        return item;
    }
    METHOD int row(int i) const { return __byte_perm(rows[0], rows[1], i) & 0xFF; }
    // Whether four numbers of its B can be read at once.
    METHOD bool wide(const Expand& e) const { return rank > 0 && e.b_type != 2 && (b & 7 | stride & 3) == 0; }
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

// A warp lists what the block's rows of x take; returns how many items there are. inverse: by which sums are multiplied, once what
// adapters add has joined them.
DEVICE int list_items(const Expand& e, int m0, int m, int outputs, float inverse, u32 list) {
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
        const u64 b = (u64)e.b + (long long)place.z * outputs * (e.b_type == 2 ? 4 : 2);
        sts32(item + 8, (u32)b), sts32(item + 12, (u32)(b >> 32));
        sts128(item + 16, place.y, place.x, place.w, __float_as_uint(slot < 0 ? 0.f : __fdiv_rn(__ldcg(e.scalings + slot), inverse)));
    }
    return items;
}

// Sends for rows row0 .. row0 + rows - 1 of some items' B, so that nobody waits for memory long: into the L2, or, where all of it is
// at most `near` bytes, into the L1.
DEVICE void send_for_items(const Expand& e, u32 list, int items, int row0, int rows, int outputs, int near) {
    const int lane = this_thread() & 31, size = e.b_type == 2 ? 4 : 2;
    rows = min(rows, outputs - row0);
    const auto bytes_of = [&](const Item& item) { return item.rank > 0 ? (long long)rows * item.stride * size : 0; };
    long long all = 0;
    u64 before = 0;
    for (int i = 0; i < items && near > 0; ++i) {
        const Item item = Item::at(list + i * EXPAND_ITEM_BYTES);
        all += item.b != before ? bytes_of(item) : 0, before = item.b;
    }
    before = 0;
#pragma unroll 1
    for (int i = 0; i < items; ++i) {
        const Item item = Item::at(list + i * EXPAND_ITEM_BYTES);
        const long long bytes = item.b != before ? bytes_of(item) : 0;    // items of a slot are neighbours
        before = item.b;
        u64 begin = item.b + (long long)row0 * item.stride * size;
        if (all <= near) {
            begin &= ~15ull;
#pragma unroll 4
            for (long long at = lane * 16; at < bytes; at += 32 * 16) {
                u32 word[4];
                asm volatile("ld.global.ca.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "l"(begin + at));
            }
        } else {
#pragma unroll 1
            for (long long line = lane * 128; line < bytes; line += 32 * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(begin + line));
        }
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

DEVICE float number_of_b(int type, const void* from, long long at) {
    return type == 2 ? ((const float*)from)[at] : half_of_b(type, ((const u16*)from)[at], 0);
}

// Waits for what is far off; asking all the time would take turns from those who multiply.
DEVICE void barrier_wait_long(u32 barrier, u32 parity) {
    for (;;) {
        u32 done;
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
        if (done) return;
        asm volatile("nanosleep.u32 200;");
    }
}

