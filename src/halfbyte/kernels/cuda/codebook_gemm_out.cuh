// What a thread of codebook_gemm.cu has of a tile, and where it goes: of 8 rows of x (a column group) two of each of its two rows of W.

// Segments' sums: four of a thread lie together, then those of a tile's threads, then its column groups.
DEVICE float4* sums_at(const void* sums, const Problem& p, int segment, int row_tile, int column_group, int thread) {
    const int row_tiles = (p.n + ROWS - 1) / ROWS, groups = (p.m + 7) / 8;
    return (float4*)sums + (((long long)segment * row_tiles + row_tile) * groups + column_group) * (2 * ROWS) + thread;
}

DEVICE float bias_at(const Problem& p, long long at) {
    if (p.bias_is_fp32) return __ldg((const float*)p.bias + at);
    return __uint_as_float((u32)__ldg((const u16*)p.bias + at) << 16);
}

// Writes a thread's outputs of a column group, from row0 of W and column0 of x on: with the bias, rounded once. Lanes of even rows take
// the pair of rows in the first column, those of odd rows in the second.
DEVICE void write_outputs(const Problem& p, int row0, int column0, int thread, const float (&sum)[4]) {
    const int lane = thread & 31, g = lane >> 2, column = column0 + 2 * (lane & 3) + (g >> 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float other = __shfl_xor_sync(~0u, g < 4 ? sum[2 * h + 1] : sum[2 * h], 16);
        float pair[2] = {g < 4 ? sum[2 * h] : other, g < 4 ? other : sum[2 * h + 1]};
        const int n = row0 + 16 * (thread >> 5) + 8 * h + 2 * (g & 3);
        if (column >= p.m || n >= p.n) continue;
        if (p.bias) {
            pair[0] += bias_at(p, column * p.bias_stride + n);
            if (n + 1 < p.n) pair[1] += bias_at(p, column * p.bias_stride + n + 1);
        }
        u32 bits;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(pair[1]), "f"(pair[0]));
        u16* const out = (u16*)p.out + (long long)column * p.n + n;
        if (p.n % 2 == 0 && (u64)p.out % 4 == 0) {
            *(u32*)out = bits;
        } else {
            out[0] = bits;
            if (n + 1 < p.n) out[1] = bits >> 16;
        }
    }
}
