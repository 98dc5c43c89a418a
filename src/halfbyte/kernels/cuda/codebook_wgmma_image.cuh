// x, laid out for codebook_wgmma.cu: fp16, stage after stage (256 k), in each unit (64 k) COLUMNS rows of 128 bytes, k in the order
// in which codes are decoded, chunks of 16 bytes swizzled by row as wgmma expects; then, for bf16, stage after stage what undoes
// the powers of two by which rows of units were scaled, [4][COLUMNS] fp32, and for each unit whether any of them is not 1. Rows
// beyond M and k beyond K are zeros.

// Sets counters behind the image to 0, by so many blocks.
DEVICE void clear(const Problem& p, u8* image, int counters, int block, int blocks) {
    u32* const from = (u32*)(image + (u64)((p.k / UNIT + 3) / 4) * (COLUMNS * 528 + 16));
    for (int i = block * 64 + threadIdx.x; i < counters; i += blocks * 64) from[i] = 0;
}

// One of so many blocks of 64 threads; it takes some units after others, whose x it fetches at once, eight lanes a row, 16 bytes each.
// x is there.
template <int AT_ONCE = 1>
DEVICE void lay_out(const Problem& p, u8* image, int block, int blocks) {
    const int stages = (p.k / UNIT + 3) / 4, part = threadIdx.x & 7;
    float* const undos = (float*)(image + (u64)stages * COLUMNS * 512);
    // k = 16 q + 4 step + 2 high (+ 1), or within a block of 32: 32 half + 8 q + 4 (step & 1) + 2 high
    const int q = BLOCK == 64 ? part / 2 : part & 3, step0 = BLOCK == 64 ? 2 * (part & 1) : 2 * (part / 4);
    constexpr int rows = COLUMNS / 8;    // of a thread
#pragma unroll 1
    for (int first = block; first < 4 * stages; first += AT_ONCE * blocks) {
        u32 word[AT_ONCE][rows][4] = {};
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
#pragma unroll
            for (int i = 0; i < rows; ++i) {
                const int row = 8 * i + (threadIdx.x >> 3), unit = first + u * blocks;
                if (row >= p.m || unit >= p.k / UNIT) continue;
                const u8* from = (const u8*)p.x + row * p.x_stride * 2 + (u64)unit * UNIT * 2 + part * 16;
                u32(&w)[4] = word[u][i];
                asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(from));
            }
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const int unit = first + u * blocks;
            if (unit >= 4 * stages) break;
            u8* to = image + (u64)unit * COLUMNS * 128;
            float* undo = undos + unit / 4 * (COLUMNS * 4 + 4);
            bool scaled = false;
#pragma unroll
            for (int i = 0; i < rows; ++i) {
                const int row = 8 * i + (threadIdx.x >> 3);
                u32(&x)[4] = word[u][i];
#if X_TYPE == 1
                u32 top = 0;
#pragma unroll
                for (int w = 0; w < 4; ++w) top = max_bf16x2(top, x[w] & 0x7FFF7FFFu);
                const PowerOfTwo power = power_for<8>(magnitude(0, top));
#pragma unroll
                for (int w = 0; w < 4; ++w) x[w] = scaled_bf16x2(x[w], power.scale);
                if (part == 0) undo[unit % 4 * COLUMNS + row] = __uint_as_float(power.inverse);
                scaled |= power.scale != 0x3F800000u;
#endif
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const int chunk = 2 * (step0 + w / 2) + w % 2;
                    *(u32*)(to + row * 128 + ((chunk ^ row & 7) << 4) + q * 4) = x[w];
                }
            }
#if X_TYPE == 1
            scaled = __syncthreads_or(scaled);
            if (threadIdx.x == 0) *(int*)(undo + COLUMNS * 4 + unit % 4) = scaled;
#endif
        }
    }
}
