// Where stages are spread evenly over blocks: sums that meet in memory, behind x's image. codebook_wgmma_x.cu has set the counters to
// 0 by the time that anyone looks at them. Threads' numbers lie as they hold them, four at a time.
//
//   u32 pieces[tiles]       of each tile, whose sums are there
//   u32 handed[blocks]      whether the chains that a block goes on with are there
//   float sums[tiles][PIECES][ROWS * COLUMNS]     (from a multiple of 256 bytes on)
//   float chains[blocks][4][ROWS * COLUMNS]

#define QUADS (ROWS * COLUMNS / 4)    // of a piece's sums

DEVICE u64 image_bytes(const Problem& p) { return (u64)((p.k / UNIT + TEAM - 1) / TEAM) * (COLUMNS * 528 + 16); }
DEVICE u32* counter_of(const Problem& p, const Shares& s, int number) { return (u32*)(p.x + image_bytes(p)) + number; }
DEVICE float* sums_of(const Problem& p, const Shares& s, int piece) {
    const u64 at = (image_bytes(p) + 4 * (s.tiles + gridDim.x) + 255) / 256 * 256;
    return (float*)(p.x + at) + (u64)piece * (4 * QUADS);
}
DEVICE float* chains_of(const Problem& p, const Shares& s, int block) { return sums_of(p, s, s.tiles * PIECES) + (u64)block * (16 * QUADS); }

DEVICE void store4(float* to, const float (&v)[4]) { asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory"); }
DEVICE void load4(const float* from, float (&v)[4]) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(from) : "memory");
}

// Chains of a piece that another block goes on with.
DEVICE void hand_over(const Problem& p, const Shares& s, const float (&chain)[UNITS][SUMS]) {
    float* at = chains_of(p, s, this_block() + 1) + 4 * this_thread();
#pragma unroll
    for (int i = 0; i < UNITS * SUMS; i += 4) {
        const float four[4] = {chain[i / SUMS][i % SUMS], chain[i / SUMS][i % SUMS + 1], chain[i / SUMS][i % SUMS + 2], chain[i / SUMS][i % SUMS + 3]};
        store4(at + i * CONSUMERS, four);
    }
}

// Blocks start in the order of their numbers, and chains are the first thing that they hand over.
DEVICE void take_over(const Problem& p, const Shares& s, float (&chain)[UNITS][SUMS]) {
    const int block = this_block();
    u32 there;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(counter_of(p, s, s.tiles + block)) : "memory");
    while (!there);
    const float* at = chains_of(p, s, block) + 4 * this_thread();
#pragma unroll
    for (int i = 0; i < UNITS * SUMS; i += 4) {
        float four[4];
        load4(at + i * CONSUMERS, four);
#pragma unroll
        for (int c = 0; c < 4; ++c) chain[i / SUMS][i % SUMS + c] = four[c];
    }
}

// A warp that multiplies has written what it has of a turn.
DEVICE void written(u32 base, int turn) {
    __syncwarp();
    if ((this_thread() & 31) == 0) barrier_arrive(base + TURNS_AT + 8 * turn);
}

// A warp beside tells other blocks, so that those that multiply need not wait until all can see it: that chains are there, or a
// piece's sums. Of each turn it notes whether its tile has all of them now.
DEVICE void tell(const Problem& p, const Shares& s, u32 base) {
    const int turns = Turn::count(s, blockIdx.x);
    for (int turn = 0; turn < turns; ++turn) {
        barrier_wait(base + TURNS_AT + 8 * turn, 0);
        const Turn now(s, blockIdx.x, turn);
        u32 before = 0;
        if (now.whole(s))
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter_of(p, s, now.tile())) : "memory");
        else
            asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counter_of(p, s, s.tiles + blockIdx.x + 1)), "r"(1) : "memory");
        sts32(base + NOTES_AT + 4 * turn, before == PIECES - 1);
    }
    barrier_arrive(base + TOLD_AT);
}

#if ADAPTERS
// Where an output's sum is among its piece's.
DEVICE int place_of(int row, int column) {
    const int in8 = row & 7, g = in8 & 1 ? (in8 + 7) / 2 : in8 / 2;    // row_of(g) == in8
    return (row / 64 * SUMS + column / 8 * 4) * 128 + 4 * ((row >> 4 & 3) * 32 + g * 4 + (column >> 1 & 3)) + (row >> 3 & 1) * 2 + (column & 1);
}

// Puts what sums of pieces and adapters make of a tile's outputs where its first piece's sums are. Not inlined, as it would cost the
// main loop registers.
static __device__ __noinline__ void add_adapters(const float* shrunk, int width, int b_type, u32 base, float* sums, int row0, int n) {
    barrier_wait(base + LISTED_AT, 0);
    const Outputs outputs(shrunk, width, b_type, 0, row0, n);
    float* const of_row = sums + place_of(threadIdx.x / 32 % EXPAND_TILES * 16 + (threadIdx.x >> 2 & 7), 0);
    outputs.expand(base + ITEMS_AT, lds32(base + ITEM_COUNT_AT), lds32(base + ITEM_COUNT_AT + 4), [&](int column, int i, float added) {
        float* const at = of_row + place_of(8 * i, column);
        float total = 0.f;
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            float of_rank = 0.f;
#pragma unroll
            for (int e = 0; e < 4; ++e) of_rank += __ldcg(at + (4 * r + e) * (4 * QUADS));
            total = r == 0 ? of_rank : total + of_rank;
        }
        *at = total + added;
    });
    threads_sync(1, CONSUMERS);
}
#endif

// A tile's outputs: its pieces' sums, added in order.
DEVICE void finish_tile(const Problem& p, const Shares& s, u32 base, int tile, float inverse) {
#if ADAPTERS
    add_adapters(p.expand.shrunk, p.expand.width, p.expand.b_type, base, sums_of(p, s, tile * PIECES), tile * ROWS, p.n);
#endif
    constexpr int pieces = ADAPTERS ? 1 : PIECES;
    constexpr int batch = QUADS >= 2 * CONSUMERS ? 2 : 1;    // whose sums are fetched at once
#pragma unroll 1
    for (int first = this_thread(); first < QUADS; first += batch * CONSUMERS) {
        float sums[batch][pieces][4];
#pragma unroll
        for (int b = 0; b < batch; ++b)
#pragma unroll
            for (int e = 0; e < pieces; ++e) load4(sums_of(p, s, tile * PIECES + e) + 4 * (first + b * CONSUMERS), sums[b][e]);
#pragma unroll
        for (int b = 0; b < batch; ++b) {
            const int i = first + b * CONSUMERS, thread = i & 127, lane = thread & 31;
            const int column = i / 128 % (SUMS / 4) * 8 + 2 * (lane & 3);
            const int n = tile * ROWS + i / 128 / (SUMS / 4) * 64 + thread / 32 * 16 + row_of(lane >> 2);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                float total = sums[b][0][c];
#pragma unroll
                for (int r = 0; r < RANKS && !ADAPTERS; ++r) {
                    float of_rank = 0.f;
#pragma unroll
                    for (int e = 0; e < 4; ++e) of_rank += sums[b][4 * r + e][c];
                    total = r == 0 ? of_rank : total + of_rank;
                }
                if (n + c / 2 * 8 < p.n && column + c % 2 < p.m) store(p, column + c % 2, n + c / 2 * 8, total, inverse, -0.f);
            }
        }
    }
}
