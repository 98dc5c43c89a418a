// Part of codebook_mma.cu: codes and scales, from memory to the ring.

// Lane group g of a warp owns rows row_of(g) and row_of(g) + 8 of a tile: even rows first, which keeps the swizzled codes
// free of bank conflicts.
DEVICE int row_of(int g) { return g < 4 ? 2 * g : 2 * g - 7; }

// Where chunk c (16 bytes) of a row of a slot's scales is, as bulk copies swizzle it.
DEVICE int scale_chunk(int row, int c) { return row * SCALE_PITCH + ((SUBS == 1 ? c : c ^ (row >> 2 & 1)) << 4); }

#if __CUDA_ARCH__ >= 900
DEVICE void expect_bytes(u32 full, u32 bytes) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(full), "r"(bytes) : "memory");
}
DEVICE void expect_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
DEVICE bool elected() {    // one thread of a warp
    u32 yes;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p; }" : "=r"(yes));
    return yes;
}
DEVICE void copy_tile(const TensorMap* map, int column, int row, u32 to, u32 full) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(full) : "memory");
}
#endif

// Copies a stage of `tiles` tiles (none beyond K) into a slot, by the engine on sm_90, else by all lanes; `full` has one arrival of it to
// come. Beyond N and K the slot holds zeros or stale bytes, which nobody's sums see.
#if __CUDA_ARCH__ >= 900
#define COPY_ARRIVALS 1
#else
#define COPY_ARRIVALS 32
DEVICE void expect_map(const TensorMap*) {}
DEVICE bool elected() { return true; }
#endif
DEVICE void copy_stage(const Maps& maps, const Problem& p, int tiles, int row0, int unit0, u32 codes, u32 scales, u32 full, int lane) {
#if __CUDA_ARCH__ >= 900
    if (tiles == 0) {
        barrier_arrive(full);
        return;
    }
    const int kind = tiles == TILES ? 0 : tiles == LAST ? 1 : 2;
    expect_bytes(full, tiles * 16 * (128 + (SCALE_SIDE ? 0 : SCALE_PITCH)));
    copy_tile(&maps.codes[kind], unit0 * (UNIT / 2), row0, codes, full);
    if (!SCALE_SIDE) copy_tile(&maps.scales[kind], unit0 * SUBS, row0, scales, full);
#else
    const long long pitch = p.k / 2;
    for (int i = lane; i < tiles * 128; i += 32) {
        const int row = i >> 3, chunk = i & 7;
        const long long byte = (long long)unit0 * (UNIT / 2) + chunk * 16;
        if (row0 + row < p.n && byte < pitch)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(codes + row * 128 + ((chunk ^ (row & 7)) << 4)), "l"(p.codes + (row0 + row) * pitch + byte) : "memory");
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
#endif
}

#if SCALE_SIDE
// The scales of a row in a stage, as they are in memory: on their way while earlier stages are decoded.
struct RawScales {
#if SCALE_KIND == 0
    float value[STAGE_BLOCKS];
#else
    u32 bytes[SUBS];
    float outer;    // nested: of all of them, as stages begin at multiples of 4 blocks
#endif
};

// The fp32 number of a byte of scales. A format with another kind of scale adds a case here and in RawScales.
DEVICE float scale_of(u32 byte, float outer, float offset, u32 map256) {
    if (SCALE_KIND == 1) return __fadd_rn(__fmul_rn(__uint_as_float(lds32(map256 + 4 * byte)), outer), offset);
    return __uint_as_float(byte == 255 ? 0x7FC00000u : byte ? byte << 23 : 0x00400000u);    // E8M0: 2^(byte - 127), NaN for 255
}

DEVICE float scale_of(const RawScales& raw, int j, float offset, u32 map256) {
#if SCALE_KIND == 0
    return raw.value[j];
#else
    return scale_of(raw.bytes[j / 4] >> (8 * (j & 3)) & 255, raw.outer, offset, map256);
#endif
}

// Four scales of a row, one by one: where they are not `aligned`.
DEVICE void read_scales(const Scales& s, const Problem& p, int row, int block, float offset, u32 map256, float (&scale)[4]) {
    const int blocks = p.k / BLOCK;
    for (int j = 0; j < 4; ++j) {
        const long long b = (long long)row * blocks + block + j >> s.shift;
        scale[j] = 0.f;
        if (row >= p.n || block + j >= blocks) continue;
#if SCALE_KIND == 0
        scale[j] = __ldg((const float*)s.values + b);
#else
        scale[j] = scale_of(__ldg((const u8*)s.values + b), SCALE_KIND == 1 ? __ldg(s.outer + (b >> 8)) : 0.f, offset, map256);
#endif
    }
}

DEVICE void load_scales(const Scales& s, long long b, RawScales& raw) {
#if SCALE_KIND == 0
#pragma unroll
    for (int j = 0; j < STAGE_BLOCKS; ++j) raw.value[j] = __ldg((const float*)s.values + (b + j >> s.shift));
#else
#pragma unroll
    for (int j = 0; j < SUBS; ++j) raw.bytes[j] = __ldg((const u32*)((const u8*)s.values + b) + j);
    if (SCALE_KIND == 1) raw.outer = __ldg(s.outer + (b >> 8));
#endif
}
#endif
