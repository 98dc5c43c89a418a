// How a warpgroup multiplies stages of the ring: codes to fragments, wgmma, and sums of scale blocks to chains.

// What a warpgroup does with a unit of a stage.
struct Multiplier {
    u32 codes, scales, bank;    // addresses of this thread, from which a slot's are counted
    u32 base;
    int unit0;

    METHOD Multiplier(u32 base, int row_group, int unit_group, int thread) : base(base), unit0(UNIT_GROUPS == 1 ? 0 : __shfl_sync(~0u, unit_group * UNITS, 0)) {    // which the compiler then knows to be a warp's
        const int warp = thread >> 5 & 3, lane = thread & 31, q = lane & 3, row = 64 * row_group + 16 * warp + row_of(lane >> 2);
        codes = base + CODES_AT + row * 128 + (BLOCK == 64 ? (q & 1) * 8 : q * 4) + (((BLOCK == 64 ? q >> 1 : 0) ^ row & 7) << 4);
        scales = base + SCALES_AT + row * SCALE_PITCH;
        bank = base - TABLE_AT + lane * 4;
    }

    // The codes of a unit, and A fragments.
    METHOD void fetch(u32 slot, int u, u32 (&word)[2][2]) const { load_codes((codes ^ (2 * (unit0 + u)) << 4) + slot * CODE_BYTES, word); }
    METHOD void decoded(const u32 (&word)[2][2], u32 (&a)[4][4]) const {
#pragma unroll
        for (int step = 0; step < 4; ++step) decode<TABLE_AT>(word, step, bank, a[step]);
    }
    METHOD void weights(u32 slot, int u, u32 (&a)[4][4]) const {
        u32 word[2][2];
        fetch(slot, u, word);
        decoded(word, a);
    }

    METHOD void start(u32 slot, int u, int sub, const u32 (&a)[4][4], float (&sum)[SUMS]) const {
        const u32 b = descriptor(base + X_AT + slot * X_SLOT + (unit0 + u) * COLUMNS * 128);
        wgmma_fence();
#pragma unroll
        for (int step = sub * 4 / SUBS; step < (sub + 1) * 4 / SUBS; ++step) wgmma(sum, a[step], b + 2 * step, step > sub * 4 / SUBS);
        wgmma_commit();
    }

    // The scales of this thread's two rows: of a stage where registers hold them, else of a scale block.
    METHOD void load_scales(u32 slot, u32 (&scale)[2][4]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) lds128(scales + slot * SCALE_BYTES + h * 8 * SCALE_PITCH, scale[h][0], scale[h][1], scale[h][2], scale[h][3]);
    }
    METHOD void load_scale(u32 slot, int u, int sub, float (&scale)[2]) const {
        const int block = (unit0 + u) * SUBS + sub;
        const int row = SUBS == 1 ? 0 : row_of(this_thread() >> 2 & 7);    // of eight: all that swizzling looks at
        const u32 at = scales + slot * SCALE_BYTES + scale_chunk(row, block >> 2) - row * SCALE_PITCH + (block & 3) * 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) scale[h] = __uint_as_float(lds32(at + h * 8 * SCALE_PITCH));
    }

    // The sums of a scale block, added to a chain. SCALED: whether a row of x was.
    template <bool SCALED>
    METHOD void add(u32 slot, int u, const float (&scale)[2], const float (&sum)[SUMS], float (&chain)[SUMS]) const {
        const u32 undo = base + UNSCALE_AT + (this_thread() & 3) * 8 + slot * UNSCALE_BYTES + (unit0 + u) * COLUMNS * 4;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            u32 back[2];
            if (SCALED) lds64(undo + 32 * j, back[0], back[1]);
#pragma unroll
            for (int c = 0; c < 4; ++c) chain[4 * j + c] = fmaf(sum[4 * j + c], SCALED ? scale[c >> 1] * __uint_as_float(back[c & 1]) : scale[c >> 1], chain[4 * j + c]);
        }
    }

    // One stage, at `next`, which moves on. a[FIRST] holds its first unit's fragments. At the end the one that follows holds
    // the next stage's, if there is a next stage: its codes are there once its slot is full. FETCH_AHEAD: `word` holds the codes of the unit after.
    template <int FIRST>
    METHOD void stage(u32 (&word)[2][2], u32 (&a)[1 + AHEAD][4][4], float (&chain)[UNITS][SUMS], bool more, Place& next, u32 barriers) const {
        const u32 slot = next.slot;
        next.step();
        u32 of_stage[2][4];
        if (SCALES_OF_STAGE) load_scales(slot, of_stage);
        bool scaled = false;
        if (X_TYPE == 1) {
            u32 said[TEAM];    // of each unit
            lds128(base + UNSCALE_AT + slot * UNSCALE_BYTES + COLUMNS * 16, said[0], said[1], said[2], said[3]);
            scaled = said[0] | said[1] | said[2] | said[3];
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            auto decode_next = [&] {
                u32(&into)[4][4] = a[AHEAD ? (FIRST + u + 1) % 2 : 0];
#if FETCH_AHEAD
                if (u + 1 < UNITS || more) decoded(word, into);
                if (u + 2 < UNITS) {
                    fetch(slot, u + 2, word);
                } else if (more) {
                    if (u + 2 == UNITS) barrier_wait(barriers + SLOT_FULL(next.slot), next.turn);
                    fetch(next.slot, u + 2 - UNITS, word);
                }
#else
                if (u + 1 < UNITS) {
                    weights(slot, u + 1, into);
                } else if (more) {
                    barrier_wait(barriers + SLOT_FULL(next.slot), next.turn);
                    weights(next.slot, 0, into);
                }
#endif
            };
#pragma unroll
            for (int sub = 0; sub < SUBS; ++sub) {
                float sum[SUMS], scale[2];
                start(slot, u, sub, a[AHEAD ? (FIRST + u) % 2 : 0], sum);
                if (SCALES_OF_STAGE)
                    scale[0] = __uint_as_float(of_stage[0][u]), scale[1] = __uint_as_float(of_stage[1][u]);
                else
                    load_scale(slot, u, sub, scale);
                if (AHEAD && sub == 0) decode_next();
                wgmma_wait<0>();
#pragma unroll
                for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sum[i])::"memory");    // they are there only now
                if (!AHEAD && sub == SUBS - 1) decode_next();
                if (scaled)
                    add<true>(slot, u, scale, sum, chain[u]);
                else
                    add<false>(slot, u, scale, sum, chain[u]);
            }
        }
        __syncwarp();    // all have read
        if ((this_thread() & 31) == 0) barrier_arrive(barriers + SLOT_FULL(slot) + 8);
    }

    // So many stages, at `next`, which moves on: units r, r + 4, ... to chain r.
    METHOD void stages(int left, float (&chain)[UNITS][SUMS], Place& next, u32 barriers) const {
        u32 a[1 + AHEAD][4][4], word[2][2];
        if (left > 0) {
            barrier_wait(barriers + SLOT_FULL(next.slot), next.turn);
            weights(next.slot, 0, a[0]);
            if (FETCH_AHEAD) fetch(next.slot, 1, word);
        }
#pragma unroll 1
        while (left > 0) {
            stage<0>(word, a, chain, left-- > 1, next, barriers);
            if (AHEAD && UNITS % 2 == 1 && left > 0) stage<1>(word, a, chain, left-- > 1, next, barriers);    // fragments alternate between two places
        }
    }
};
