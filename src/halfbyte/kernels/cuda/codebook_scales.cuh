// Scales: where they lie in a slot, and how side warps decode them where bulk copies cannot bring them as they are.

// Where chunk c (16 bytes) of a row of a slot's scales is, as bulk copies swizzle it.
DEVICE int scale_chunk(int row, int c) { return row * SCALE_PITCH + ((SUBS == 1 ? c : c ^ (row >> 2 & 1)) << 4); }

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

// One scale, of a block of BLOCK weights.
DEVICE float scale_of_block(const Scales& s, long long block, float offset, u32 map256) {
    const long long b = block >> s.shift;
#if SCALE_KIND == 0
    return __ldg((const float*)s.values + b);
#else
    return scale_of(__ldg((const u8*)s.values + b), SCALE_KIND == 1 ? __ldg(s.outer + (b >> 8)) : 0.f, offset, map256);
#endif
}

// Four scales of a row, one by one: where they are not `aligned`.
DEVICE void read_scales(const Scales& s, const Problem& p, int row, int block, float offset, u32 map256, float (&scale)[4]) {
    const int blocks = p.k / BLOCK;
    for (int j = 0; j < 4; ++j) {
        scale[j] = row < p.n && block + j < blocks ? scale_of_block(s, (long long)row * blocks + block + j, offset, map256) : 0.f;
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
