// Part of codebook_mma.cu: from codes to sums, and from sums to outputs.

// ---- multiplying

DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Adds the products of one unit to the accumulators of a pass's tiles.
template <int T>
DEVICE void multiply_unit(u32 codes, u32 scales, u32 bank, const Activations (&x)[GROUPS], float (&acc)[T][GROUPS][4]) {
#pragma unroll
    for (int t = 0; t < T; ++t) {
        if (t > 0 && t % 2 == 0) __syncwarp();    // nothing is fetched so far ahead that registers spill
        u32 word[2][2], scale[SUBS][2];
        load_codes(codes + t * 2048, word);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 at = scales + (16 * t + 8 * h) * SCALE_PITCH;
            if (SUBS == 2)
                lds64(at, scale[0][h], scale[SUBS - 1][h]);
            else
                scale[0][h] = lds32(at);
        }
        float sum[SUMS][GROUPS][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const bool first = step == 0 || (SUBS == 2 && step == 2), last = step == 3 || (SUBS == 2 && step == 1);    // of a scale block
            u32 a[4], low[4];
            decode<TABLE_AT>(word, step, bank, a);
            if (TERMS == 2) decode<TABLE_AT + 32768>(word, step, bank, low);
#pragma unroll
            for (int j = 0; j < GROUPS; ++j) {
                const u32(&b)[8 * X_TERMS] = x[j].word;
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (first) sum[0][j][c] = sum[SUMS - 1][j][c] = 0.f;
                mma(sum[0][j], a, b[2 * step], b[2 * step + 1]);
                if (TERMS == 2) mma(sum[SUMS - 1][j], low, b[2 * step], b[2 * step + 1]);
                if (X_TERMS == 2) mma(sum[SUMS - 1][j], a, b[8 * (X_TERMS - 1) + 2 * step], b[8 * (X_TERMS - 1) + 2 * step + 1]);
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    if (!last || (X_ROWS == 1 && (c & 1))) continue;    // with one row of x, odd columns are nobody's
                    float value = sum[0][j][c];
                    if (SUMS == 2) value = fmaf(sum[SUMS - 1][j][c], LOW_WEIGHT, value);
                    acc[t][j][c] = fmaf(value, __uint_as_float(scale[SUBS == 2 ? step >> 1 : 0][c >> 1]) * x[j].unscale[c & 1], acc[t][j][c]);
                }
            }
        }
    }
}

// ---- the end of a pass

DEVICE void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); }

// Adds the warps' accumulators, then the cluster's, in a fixed order, and writes the pass's outputs.
//
// A warp's sums of a group of x lie in columns, a row of x each. The four warps of a team are added first, then the teams,
// each in turn. codebook_wgmma.cu adds in the same order, so its rows of x have the bits that they have here.
template <int T>
DEVICE void reduce_and_store(const Problem& p, u32 base, int pass, float inverse, float (&acc)[T][GROUPS][4]) {
    constexpr int group_outputs = X_ROWS * 16 * T, threads = 32 * WARPS, owned = (group_outputs + threads - 1) / threads;
    const u32 sums = base + SUMS_AT;
    const int thread = this_thread(), warp = thread >> 5, g = thread >> 2 & 7, q = thread & 3;
    const Share share = share_of(p);
    const bool last = pass + 1 == share.passes;
    float total[GROUPS][owned];
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
        if (j > 0 || pass > 0) consumers_sync();    // the last sums have been read
#pragma unroll
        for (int turn = 0; turn < WARPS / SUM_WARPS; ++turn) {    // all at once, or a warp of each team at a time
            if ((SUM_WARPS == WARPS || warp % TEAM == turn) && 2 * q < X_ROWS) {
                const u32 mine = sums + (warp / (WARPS / SUM_WARPS) * WARP_SUMS + 2 * q * SUM_PITCH + row_of(g)) * 4;
#pragma unroll
                for (int i = 0; i < 4 * T; ++i) {
                    if (X_ROWS == 1 && (i & 1)) continue;
                    const u32 at = mine + ((i & 1) * SUM_PITCH + 16 * (i >> 2) + 8 * (i >> 1 & 1)) * 4;
                    if (turn > 0) acc[i >> 2][j][i & 3] += __uint_as_float(lds32(at));
                    sts32(at, __float_as_uint(acc[i >> 2][j][i & 3]));
                }
            }
            consumers_sync();
        }
#pragma unroll
        for (int o = 0; o < owned; ++o) {
            const int i = thread + threads * o;
            const u32 at = sums + (i / (16 * T) * SUM_PITCH + i % (16 * T)) * 4;
            total[j][o] = 0.f;
            if (i >= group_outputs) continue;
#pragma unroll
            for (int team = 0; team < TEAMS; ++team) {
                constexpr int each = SUM_WARPS / TEAMS;    // of a team in shared memory
                float sum = __uint_as_float(lds32(at + team * each * WARP_SUMS * 4));
#pragma unroll
                for (int w = 1; w < each; ++w) sum += __uint_as_float(lds32(at + (team * each + w) * WARP_SUMS * 4));
                total[j][o] += sum;
            }
        }
    }
#if SPLIT > 1
    // Peers write their sums into the inbox of the cluster's first block, once it has emptied it of the last pass's.
    const u32 inbox = base + PEERS_AT + thread * 4, inbox_full = base + BARRIERS_AT + INBOX_FULL, inbox_free = inbox_full + 8;
    if (pass == 0) cluster_wait();    // all barriers are ready
    if (share.rank > 0) {
        if (pass > 0) cluster_barrier_wait(inbox_free, (pass - 1) & 1);
        const u32 to = at_rank(inbox + (share.rank - 1) * OUTPUTS * 4, 0);
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
#pragma unroll
            for (int o = 0; o < owned; ++o)
                if (thread + threads * o < group_outputs)
                    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to + (j * group_outputs + threads * o) * 4), "f"(total[j][o]) : "memory");
        remote_arrive(at_rank(inbox_full, 0));
        return;
    }
    cluster_barrier_wait(inbox_full, pass & 1);
#pragma unroll
    for (int peer = 0; peer < SPLIT - 1; ++peer) {
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
#pragma unroll
            for (int o = 0; o < owned; ++o)
                if (thread + threads * o < group_outputs) total[j][o] += __uint_as_float(lds32(inbox + (peer * OUTPUTS + j * group_outputs + threads * o) * 4));
        if (!last) remote_arrive(at_rank(inbox_free, peer + 1));
    }
#endif
#if ADAPTERS
    const u32 added_full = base + BARRIERS_AT + ADDED_FULL;
    barrier_wait(added_full, pass & 1);
#endif
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
        for (int o = 0; o < owned; ++o) {
            const int i = thread + threads * o, row = share.slab + pass * ROWS + i % (16 * T), column = 8 * j + i / (16 * T);
            if (i >= group_outputs || row >= p.n || column >= p.m) continue;
            float added = -0.f;
#if ADAPTERS
            added = added_to(base + ADDED_AT, column, i % (16 * T));
#endif
            store(p, column, row, total[j][o] + added, inverse, -0.f);
        }
#if ADAPTERS
    __syncwarp();
    if ((thread & 31) == 0) barrier_arrive(added_full + 8);
#endif
}
