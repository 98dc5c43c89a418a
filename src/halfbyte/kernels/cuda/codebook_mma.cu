// out[M, N] = x[M, K] * W[N, K]^T for a few rows of x, W a 4-bit codebook weight read where the checkpoint left it.
//
// A block of threads owns a slab of rows of W (a cluster of SPLIT blocks, a share of K each; slabs differ by one tile of 16
// rows at most), takes it in passes of TILES tiles, and walks along K in stages of 256 weights a row. One warp copies codes and fp32 scales into a ring of
// STAGES slots in shared memory; where scales need decoding, a side warp or two write them there in fp32. Sixteen warps
// multiply, in teams of four: team t takes every fourth stage, and a warp of it 64 weights (a "unit") of all the pass's rows.
//
//   codes of 16 rows x 64 k  --table--> A fragments of 4 mma.m16n8k16 (fp16) --\
//   8 rows of x   x 64 k     ---------> B fragments --------------------------- + --> fp32 sums of one scale block
//                                                          accumulators += scale * sums
//
// K is walked in the order that suits the codes: a lane's 8 consecutive bytes are its part of four mma steps, and x
// follows. Nobody but the warp of a unit needs the unit's x, so it goes from memory straight to that warp's registers. The
// order of summation depends on N and K alone, so a row's bits do not depend on M.
//
// A block that takes half of a multiprocessor (RESIDENT 2) leaves the other half to the next launch, whose ring fills while
// this one ends. There is a block for each multiprocessor even where some have nothing to do, lest two of the next launch
// meet on one.
//
// Macros, set by codebook_mma.py:
//   TILES           16-row tiles of W in a pass             LAST        tiles of the last pass of a larger slab
//   GROUPS          groups of 8 rows of x                   X_ROWS      rows of x in a group: 1, 2, 4 or 8
//   STAGES          slots of the ring, a multiple of 4      SPLIT       blocks of a cluster, which share K
//   X_TYPE          0 fp16, 1 bf16, 2 fp32 (also of out)    RESIDENT    blocks that fit a multiprocessor: 1 or 2
//   BLOCK           32 or 64: k between two scales          TERMS       2 keeps the table to 22 bits, else 1
//   SCALE_KIND      0 fp32, 1 nested, 2 E8M0                SCALE_SIDE  whether side warps bring the scales
//   HIGH_FIRST      element 2j is the high nibble of byte j OVERLAP     starts before the previous kernel has ended

#define UNIT 64                                  // weights of a row that a warp takes from a stage
#define TEAM 4                                   // warps of a team: units in a stage
#define TEAMS 4
#define WARPS (TEAM * TEAMS)                     // that multiply
#define COPY_WARP WARPS
#define SIDE_WARP (WARPS + 1)
#define SIDES (!SCALE_SIDE ? 0 : RESIDENT == 1 ? 2 : 1)     // side warps
#define THREADS (32 * (WARPS + 1 + SIDES))
#define ROWS (16 * TILES)                        // rows of W in a pass
#define SUBS (UNIT / BLOCK)                      // scale blocks in a unit
#define STAGE_BLOCKS (TEAM * SUBS)               // scale blocks of a row in a stage
#define X_TERMS (X_TYPE == 2 ? 2 : 1)            // fp32 x is split in two fp16 numbers
#define X_WORDS (X_TYPE == 2 ? 16 : 8)           // 32-bit words of a lane's 16 elements of x
#define X_BYTES (X_TYPE == 2 ? 4 : 2)            // of an element
#define X_STAGED (X_TYPE == 2 || GROUPS > 1 || X_ROWS > 2)      // x waits in shared memory, else in registers
#define X_PITCH (UNIT * X_BYTES + 16)            // of a row of a warp's x in shared memory
#define SUMS (TERMS == 2 || X_TERMS == 2 ? 2 : 1)
#define LOW_WEIGHT 0.00048828125f                // 2^-11: the second terms are kept 2^11 times larger

// Shared memory: table, ring, sums, the cluster's sums, the warps' x, nested map, barriers. The table holds a pair of fp16 weights for
// each byte of codes, once for each bank, then (TERMS 2) the pairs' low terms. The ring: first all slots' codes [row][128
// bytes], 16-byte chunks xor-swizzled by the row, then all slots' fp32 scales [row][STAGE_BLOCKS], swizzled where a row has
// two chunks.
#define TABLE_BYTES (32768 * TERMS)
// where a block's own shared memory begins, as the table's addresses have it
#if __CUDA_ARCH__ >= 900
#define TABLE_AT 1024
#else
#define TABLE_AT 0
#endif
#define CODE_BYTES (ROWS * 128)
#define SCALE_PITCH (4 * STAGE_BLOCKS)
#define SCALE_BYTES (ROWS * SCALE_PITCH)
#define CODES_AT TABLE_BYTES
#define SCALES_AT (CODES_AT + STAGES * CODE_BYTES)
#define SUMS_AT (SCALES_AT + STAGES * SCALE_BYTES)
#define SUM_PITCH (ROWS + 4)                     // floats of a column of sums: its writers and readers miss each other's banks
#define SUM_WARPS (X_ROWS == 1 ? WARPS : 4)      // warps whose sums are in shared memory at a time
#define WARP_SUMS (X_ROWS * SUM_PITCH)
#define PEERS_AT (SUMS_AT + SUM_WARPS * WARP_SUMS * 4)
#define OUTPUTS (GROUPS * X_ROWS * ROWS)         // of a pass
#define X_AT (PEERS_AT + (SPLIT - 1) * OUTPUTS * 4)
#define MAP256_AT (X_AT + WARPS * GROUPS * X_ROWS * X_PITCH)
#define BARRIERS_AT (MAP256_AT + (SCALE_KIND == 1 ? 1024 : 0))
#define SLOT_FULL(slot) (16 * (slot))            // from BARRIERS_AT; "empty" is 8 further
#define INBOX_FULL (16 * STAGES)

#define ROUNDS (STAGES / TEAMS)                  // of all teams' slots
// A barrier tells odd turns of a slot from even ones alone, so each slot must always serve the same team.
static_assert(STAGES % TEAMS == 0, "the ring holds whole rounds of teams");

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

struct Maps {    // for bulk copies: of a pass of TILES tiles, of one of LAST, of one of LAST - 1
    TensorMap codes[3], scales[3];
};

struct Codebook {
    u16 high[16];    // fp16(codebook * factor)
    u16 low[16];     // fp16 of 2^11 times what `high` misses; used where TERMS is 2
    float inverse;   // 1 / factor: multiplies the sums
};

struct Scales {
    const void* values;     // fp32 absmax, q8 or E8M0, by SCALE_KIND
    const float* outer;     // nested: absmax of each 256 blocks
    const float* map;       // nested: the 256 values of q8
    const float* offset;    // nested: one number, added to each scale
    int shift;              // log2 of units (of BLOCK weights) that share a scale
    int aligned;            // whether K is in whole stages, and bytes of scales can be read by 4
};

struct Problem {
    const u8* codes;
    const void* x;
    const void* bias;       // of x's type or fp32, or null
    void* out;
    long long x_stride;     // elements between rows of x
    int m, n, k;
    int bias_is_fp32;
    int tiles, larger;      // of W that a cluster owns; the first `larger` clusters own one more
    int units;              // units of K that a block of a cluster owns, a multiple of TEAM
};

#define METHOD __device__ __forceinline__
#define DEVICE static METHOD

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

template <int OFFSET>
DEVICE u32 table_word(u32 address) {
    u32 d;
    asm volatile("ld.shared.u32 %0, [%1 + %2];" : "=r"(d) : "r"(address), "n"(OFFSET));
    return d;
}

DEVICE u32 lds32(u32 address) {
    u32 d;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"(address));
    return d;
}

DEVICE void lds64(u32 address, u32& a, u32& b) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(address));
}

DEVICE void lds128(u32 address, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address));
}

DEVICE void sts32(u32 address, u32 value) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory"); }

DEVICE void sts128(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// From the cache that all multiprocessors share: x may have been written while this block was already there.
DEVICE void ldg128(const void* from, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(from));
}

// Read anew each time, so that nothing of them is kept in registers through the main loop.
DEVICE int this_thread() {
    int t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
}
DEVICE int this_block() {
    int b;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(b));
    return b;
}

// ---- barriers in shared memory

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(barrier) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
#else
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
#endif
}

DEVICE void barriers_visible() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The cluster's barrier, used once: all blocks have started and their barriers are ready.
DEVICE void cluster_arrive() {
#if SPLIT > 1
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_wait() {
#if SPLIT > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

#if SPLIT > 1
DEVICE u32 at_rank(u32 address, u32 rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
DEVICE void remote_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void cluster_barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}
#endif

// Programmatic dependent launch: the next kernel may start (and fetch weights) as soon as all of this one's blocks have;
// whoever reads x or writes out first waits until the previous kernel has ended.
DEVICE void next_kernel_may_start() {
#if OVERLAP
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void previous_kernel_done() {
#if OVERLAP
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); }

// ---- fetching codes and scales

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

// ---- fetching x

DEVICE u32 pack_half2(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

DEVICE float half_to_float(u32 bits) {
    float f;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(bits & 0xFFFF));
    return f;
}

DEVICE u32 max_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

DEVICE u32 scale_bf16x2(u32 a, u32 scale) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(scale), "r"(0x80008000u));
    return d;
}

DEVICE u32 scaled_bf16x2(u32 raw, u32 scale) {
    const u32 scaled = scale_bf16x2(raw, scale | scale >> 16);
    return pack_half2(__uint_as_float(scaled << 16), __uint_as_float(scaled & 0xFFFF0000u));
}

// A lane's B fragments of a group of 8 rows of x in one unit, in the order in which codes are decoded.
struct Activations {
    u32 word[8 * X_TERMS];
    float unscale[2];    // of the two columns of a lane's sums
};

// The power of two that brings the largest of a row's elements in a unit to 2^14, and its inverse, as bits of fp32. `top` is
// the largest magnitude that this lane has seen, as bits of fp32; the row is spread over `LANES` lanes.
struct PowerOfTwo {
    u32 scale, inverse;
};
template <int LANES>
DEVICE PowerOfTwo power_for(u32 top) {
    if (LANES == 32)
        top = __reduce_max_sync(~0u, top);
    else
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) top = max(top, __shfl_xor_sync(~0u, top, step));
    const u32 exponent = max(top >> 23, 15u);
    return {(268u - exponent) << 23, (exponent - 14u) << 23};
}

DEVICE u32 magnitude(u32 top, u32 word) {    // the larger of `top` and the elements of a word of x
    if (X_TYPE == 2) return max(top, word & 0x7FFFFFFFu);
    const u32 pair = max_bf16x2(word & 0x7FFF7FFFu, word & 0x7FFF7FFFu);
    return max(top, max(pair & 0xFFFF0000u, pair << 16));
}

// A unit's x in B fragments. Scaling brings the largest of each row to 2^14: bf16's 8 bits then fit fp16 exactly, and fp32's
// 24 bits fit two fp16 numbers to 22. x is fetched while the unit before is multiplied.
#if X_STAGED
struct Fetch {    // by asynchronous copies into the warp's buffer, as it is in memory
    const char* from;
    u32 buffer;

    METHOD explicit Fetch(u32 buffer) : buffer(buffer) {}
    METHOD void begin(const Problem& p, int unit, int) { from = (const char*)p.x + (long long)unit * UNIT * X_BYTES; }

    METHOD void start(const Problem& p) {
        constexpr int chunks = UNIT * X_BYTES / 16;    // of a row
        const int lane = this_thread() & 31;
#pragma unroll
        for (int i = 0; i < GROUPS * X_ROWS * chunks; i += 32) {
            const int row = (i + lane) / chunks, chunk = (i + lane) % chunks;
            if (i + 32 > GROUPS * X_ROWS * chunks && row >= GROUPS * X_ROWS) continue;
            const char* at = from + min(row, p.m - 1) * p.x_stride * X_BYTES + chunk * 16;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(buffer + row * X_PITCH + chunk * 16), "l"(at) : "memory");
        }
        from += WARPS * UNIT * X_BYTES;
    }

    METHOD void finish(int) { asm volatile("cp.async.wait_all;" ::: "memory"); }

    METHOD void read(Activations (&x)[GROUPS], int lane) {
        const int q = lane & 3;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
            const u32 at = buffer + (8 * j + (lane >> 2) % X_ROWS) * X_PITCH + q * (BLOCK == 64 ? 16 : 8) * X_BYTES;
            u32 raw[X_WORDS];
#pragma unroll
            for (int i = 0; i < X_WORDS; i += 4)    // 16 elements in a row, or 8 of each scale block
                lds128(at + (BLOCK == 64 ? 4 * i : X_TYPE == 2 ? i / 8 * 128 + i % 8 * 4 : i / 4 * 64), raw[i], raw[i + 1], raw[i + 2], raw[i + 3]);
            convert(raw, x[j], q);
        }
    }

    static METHOD void convert(const u32 (&raw)[X_WORDS], Activations& x, int q) {
#if X_TYPE == 0
#pragma unroll
        for (int i = 0; i < 8; ++i) x.word[i] = raw[i];
        x.unscale[0] = x.unscale[1] = 1.f;
#else
        u32 top = 0;
#if X_TYPE == 1
#pragma unroll
        for (int i = 0; i < 8; ++i) top = max_bf16x2(top, raw[i] & 0x7FFF7FFFu);
        top = magnitude(0, top);
#else
#pragma unroll
        for (int i = 0; i < X_WORDS; ++i) top = magnitude(top, raw[i]);
#endif
        const PowerOfTwo power = power_for<4>(top);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#if X_TYPE == 1
            x.word[i] = scaled_bf16x2(raw[i], power.scale);
#else
            const float a = __uint_as_float(raw[2 * i]) * __uint_as_float(power.scale), b = __uint_as_float(raw[2 * i + 1]) * __uint_as_float(power.scale);
            x.word[i] = pack_half2(a, b);
            x.word[8 + i] = pack_half2((a - half_to_float(x.word[i])) * 2048.f, (b - half_to_float(x.word[i] >> 16)) * 2048.f);
#endif
        }
#pragma unroll
        for (int c = 0; c < 2; ++c)    // a lane's sums are of rows 2q and 2q + 1
            x.unscale[c] = __uint_as_float(X_ROWS == 1 ? power.inverse : __shfl_sync(~0u, power.inverse, (2 * q + c) % X_ROWS * 4));
#endif
    }
};
#else
struct Fetch {    // by loads of X_ROWS words a lane, which scales them and shares them through the warp's buffer
    static constexpr int lanes = 32 / X_ROWS;    // of a row
    const char* from;
    u32 buffer, raw[X_ROWS], inverse;

    METHOD explicit Fetch(u32 buffer) : buffer(buffer), inverse(0x3F800000u) {}
    METHOD void begin(const Problem& p, int unit, int lane) {
        from = (const char*)p.x + ((long long)unit * UNIT + lane / lanes * p.x_stride + lane % lanes * X_ROWS * 2) * X_BYTES;
    }

    METHOD void start(const Problem&) {
#if X_ROWS == 1
        asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(raw[0]) : "l"(from));
#else
        asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(raw[0]), "=r"(raw[1]) : "l"(from));
#endif
        from += WARPS * UNIT * X_BYTES;
    }

    // What `start` fetched goes to the buffer; all lanes have read what was there.
    METHOD void finish(int lane) {
#if X_TYPE == 1
        const PowerOfTwo power = power_for<lanes>(magnitude(0, max_bf16x2(raw[0] & 0x7FFF7FFFu, raw[X_ROWS - 1] & 0x7FFF7FFFu)));
        inverse = power.inverse;
#pragma unroll
        for (int i = 0; i < X_ROWS; ++i) raw[i] = scaled_bf16x2(raw[i], power.scale);
#endif
        const u32 to = buffer + lane / lanes * X_PITCH + lane % lanes * X_ROWS * 4;
        if (X_ROWS == 1)
            sts32(to, raw[0]);
        else
            asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(raw[0]), "r"(raw[X_ROWS - 1]) : "memory");
    }

    METHOD void read(Activations (&x)[GROUPS], int lane) {
        const u32 at = buffer + (lane >> 2) % X_ROWS * X_PITCH + (lane & 3) * (BLOCK == 64 ? 32 : 16);
        u32(&word)[8] = x[0].word;
#pragma unroll
        for (int i = 0; i < 8; i += 4) lds128(at + i * (BLOCK == 64 ? 4 : 16), word[i], word[i + 1], word[i + 2], word[i + 3]);
#pragma unroll
        for (int c = 0; c < 2; ++c)    // a lane's sums are of rows 2q and 2q + 1
            x[0].unscale[c] = __uint_as_float(X_ROWS == 1 || X_TYPE == 0 ? inverse : __shfl_sync(~0u, inverse, c * lanes));
    }
};
#endif

// ---- multiplying

DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A lane's codes of a tile: [row or row + 8][half of its 8 bytes, or scale block].
DEVICE void load_codes(u32 at, u32 (&word)[2][2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (BLOCK == 64) {
            lds64(at + h * 1024, word[h][0], word[h][1]);
        } else {
            word[h][0] = lds32(at + h * 1024);
            word[h][1] = lds32((at ^ 16) + h * 1024);
        }
    }
}

// The A fragment of step `step` of the four of a unit, by the table: two bytes of each of two words, in the order of memory.
// A byte's entries are 128 bytes apart; `bank` holds the rest of their addresses but the table's offset.
template <int OFFSET>
DEVICE void decode(const u32 (&word)[2][2], int step, u32 bank, u32 (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 w = word[i & 1][step >> 1];
        const int byte = 2 * (step & 1) + (i >> 1);
        a[i] = table_word<OFFSET>((byte == 0 ? w << 7 : w >> (8 * byte - 7)) & 0x7F80 | bank);
    }
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

// What a block has to do.
struct Share {
    u32 rank;                       // in its cluster
    int slab;                       // its first row of W
    int tiles, passes;              // of its slab
    int unit_begin, unit_end;       // of K
    int stages;                     // of a pass

    METHOD int tiles_of(int pass) const { return min(TILES, tiles - pass * TILES); }
};

DEVICE Share share_of(const Problem& p) {
    const int block = this_block(), cluster = block / SPLIT;
    Share share;
    share.rank = block % SPLIT;
    share.tiles = p.tiles + (cluster < p.larger);
    share.slab = 16 * (cluster * p.tiles + min(cluster, p.larger));
    share.passes = (share.tiles + TILES - 1) / TILES;
    share.unit_begin = share.rank * p.units, share.unit_end = min(p.k / UNIT, share.unit_begin + p.units);
    share.stages = share.unit_begin < share.unit_end ? (share.unit_end - share.unit_begin + WARPS - 1) / WARPS * TEAMS : 0;
    return share;
}

// ---- the end of a pass

DEVICE float bias_of(const Problem& p, int n) {
    if (X_TYPE == 2 || p.bias_is_fp32) return __ldg((const float*)p.bias + n);
    const u32 bits = __ldg((const u16*)p.bias + n);
    return X_TYPE == 1 ? __uint_as_float(bits << 16) : half_to_float(bits);
}

DEVICE void store(const Problem& p, int row, int n, float value) {
    const long long at = (long long)row * p.n + n;
    if (p.bias) value += bias_of(p, n);
#if X_TYPE == 2
    ((float*)p.out)[at] = value;
#else
    u16 bits;
    if (X_TYPE == 1)
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    else
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    ((u16*)p.out)[at] = bits;
#endif
}

// Adds the warps' accumulators, then the cluster's, in a fixed order, and writes the pass's outputs.
//
// A warp's sums of a group of x lie in columns, a row of x each. Sums of warps r, r + 4, r + 8 and r + 12 are added first,
// from the last on, then those of the four r in turn.
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
        for (int from = WARPS - SUM_WARPS; from >= 0; from -= SUM_WARPS) {
            if (warp >= from && warp < from + SUM_WARPS && 2 * q < X_ROWS) {
                const u32 mine = sums + ((warp - from) * WARP_SUMS + 2 * q * SUM_PITCH + row_of(g)) * 4;
#pragma unroll
                for (int i = 0; i < 4 * T; ++i) {
                    if (X_ROWS == 1 && (i & 1)) continue;
                    const u32 at = mine + ((i & 1) * SUM_PITCH + 16 * (i >> 2) + 8 * (i >> 1 & 1)) * 4;
                    if (from + SUM_WARPS < WARPS) acc[i >> 2][j][i & 3] += __uint_as_float(lds32(at));
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
            for (int r = 0; r < 4; ++r) {
                float sum = __uint_as_float(lds32(at + (r + SUM_WARPS - 4) * WARP_SUMS * 4));
#pragma unroll
                for (int w = r + SUM_WARPS - 8; w >= 0; w -= 4) sum += __uint_as_float(lds32(at + w * WARP_SUMS * 4));
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
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
        for (int o = 0; o < owned; ++o) {
            const int i = thread + threads * o, row = share.slab + pass * ROWS + i % (16 * T), column = 8 * j + i / (16 * T);
            if (i < group_outputs && row < p.n && column < p.m) store(p, column, row, total[j][o] * inverse);
        }
}

// ---- the warps' work

// A warp's share of the table: its pairs of weights, one copy a bank.
DEVICE void build_table(const Codebook& codebook, u32 base, int warp, int lane) {
    constexpr int entries = 256 / WARPS;
    const int entry = warp * entries + lane % entries;
    const int first = HIGH_FIRST ? entry >> 4 : entry & 15, second = HIGH_FIRST ? entry & 15 : entry >> 4;
    const u32 pair = codebook.high[first] | (u32)codebook.high[second] << 16;
    const u32 low = codebook.low[first] | (u32)codebook.low[second] << 16;
#pragma unroll
    for (int i = 0; i < entries; ++i) {
        const u32 at = base + (warp * entries + i) * 128 + lane * 4;
        sts32(at, __shfl_sync(~0u, pair, i));
        if (TERMS == 2) sts32(at + 32768, __shfl_sync(~0u, low, i));
    }
}

// A place in the ring: the slot, and how often it was used before.
struct Place {
    int slot, turn;
    METHOD void step(int by) {    // at most STAGES
        slot += by;
        if (slot >= STAGES) slot -= STAGES, ++turn;
    }
    METHOD u32 filled() const { return turn & 1; }          // parities to wait for
    METHOD u32 emptied() const { return (turn & 1) ^ 1; }
};

// The pass that a multiplying warp is about to begin, and its tiles: from the stages of its team so far, as a register more
// in the main loop would be one too many.
DEVICE int pass_of(const Problem& p, u32 round) { return round / (share_of(p).stages / TEAMS); }
DEVICE int tiles_now(const Problem& p, u32 round) {
    const Share share = share_of(p);
    return min(TILES, share.tiles - pass_of(p, round) * TILES);
}

// Sends for the x of a warp's first unit of a pass.
DEVICE void start_pass(const Problem& p, Fetch& fetch) {
    const Share share = share_of(p);
    const int thread = this_thread(), lane = thread & 31, unit = share.unit_begin + (thread >> 5);
    fetch.begin(p, unit, lane);
    if (unit < share.unit_end) fetch.start(p);
}

// One multiplying warp's pass over T tiles. Its first unit's x is on its way; at the end the next pass's is.
template <int T>
DEVICE void multiply_pass(const Problem& p, u32 base, float inverse, u32& round, Fetch& fetch) {
    const Share share = share_of(p);
    const int thread = this_thread(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, q = lane & 3, row = row_of(g), mine = warp % TEAM;
    const u32 barriers = base + BARRIERS_AT, bank = base - TABLE_AT + lane * 4;    // of the table's addresses, all but their offset
    // this warp's 32 bytes of each row: chunks 2 mine and 2 mine + 1 of a slot; its SUBS scales
    const int chunk = 2 * mine + (BLOCK == 64 ? q >> 1 : 0);
    const u32 codes_at = base + CODES_AT + row * 128 + ((chunk ^ row) << 4) + (BLOCK == 64 ? (q & 1) * 8 : q * 4);
    const u32 scales_at = base + SCALES_AT + scale_chunk(row, mine * SUBS >> 2) + (mine * SUBS & 3) * 4;

    float acc[T][GROUPS][4] = {};
    int unit = share.unit_begin + warp;
    fetch.finish(lane);
#if !X_STAGED
    if (unit + WARPS < share.unit_end) fetch.start(p);
#endif
    __syncwarp();
    for (; unit - warp < share.unit_end; unit += WARPS, ++round) {
        const u32 slot = round % ROUNDS * TEAMS + warp / TEAM, full = barriers + SLOT_FULL(slot);
        barrier_wait(full, round / ROUNDS & 1);
        if (unit < share.unit_end) {    // the last warps may have come to the end of K
            Activations x[GROUPS];
            fetch.read(x, lane);
#if X_STAGED
            __syncwarp();
            if (unit + WARPS < share.unit_end) fetch.start(p);
#endif
            multiply_unit<T>(codes_at + slot * CODE_BYTES, scales_at + slot * SCALE_BYTES, bank, x, acc);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(full + 8);
        if (unit + WARPS < share.unit_end) fetch.finish(lane);
#if !X_STAGED
        if (unit + 2 * WARPS < share.unit_end) fetch.start(p);
#endif
        __syncwarp();
    }
    start_pass(p, fetch);
    reduce_and_store<T>(p, base, pass_of(p, round) - 1, inverse, acc);
}

// The stages of a block in their order: pass after pass, K in each.
struct Walk {
    int row0, tiles, unit0;    // the pass's first row of W and what is left of the slab; the stage's first unit of K

    METHOD Walk(const Share& share) : row0(share.slab), tiles(share.tiles), unit0(share.unit_begin) {}
    METHOD void step(const Share& share) {
        unit0 += TEAM;
        if (unit0 >= share.unit_begin + TEAM * share.stages) unit0 = share.unit_begin, row0 += ROWS, tiles -= TILES;
    }
};

// The copying warp; one thread of it where the engine copies.
struct Copies {
    Share share;
    Walk walk;
    Place place;
    int left;

    METHOD Copies(const Problem& p) : share(share_of(p)), walk(share), place{0, 0}, left(share.passes * share.stages) {}

    template <bool WAIT>
    METHOD void copy(const Maps& maps, const Problem& p, u32 base, int most, int lane) {
#pragma unroll 1
        for (; left > 0 && most > 0; --left, --most, place.step(1), walk.step(share)) {
            const u32 full = base + BARRIERS_AT + SLOT_FULL(place.slot);
            if (WAIT) barrier_wait(full + 8, place.emptied());
            copy_stage(maps, p, walk.unit0 < share.unit_end ? min(TILES, walk.tiles) : 0, walk.row0, walk.unit0, base + CODES_AT + place.slot * CODE_BYTES, base + SCALES_AT + place.slot * SCALE_BYTES, full, lane);
        }
    }
};

#if SCALE_SIDE
// A side warp: decodes stages' scales, a lane some rows, with those of the next stages on their way. Two stages at a time, as
// one warp alone would wait too long for each (their number is even); with two warps each takes every other pair.
DEVICE void bring_scales(const Scales& scales, const Problem& p, u32 base, int side) {
    constexpr int rows = (ROWS + 31) / 32, ahead = SCALE_KIND == 0 ? 2 : 4;
    const Share share = share_of(p);
    const int lane = this_thread() & 31, stages = share.passes * share.stages, blocks = p.k / BLOCK;
    const float offset = SCALE_KIND == 1 ? __ldg(scales.offset) : 0.f;
    const u32 map256 = base + MAP256_AT;
    RawScales raw[ahead][rows];
    Walk loaded(share), written(share);
    auto skip = [&](Walk& walk, int pairs) {
        for (int i = 0; i < 2 * pairs; ++i) walk.step(share);
    };
    skip(loaded, side), skip(written, side);
    auto load = [&](RawScales (&into)[rows]) {
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            const int row = loaded.row0 + 32 * r + lane;
            if (scales.aligned && row < p.n && loaded.unit0 * SUBS < blocks) load_scales(scales, (long long)row * blocks + loaded.unit0 * SUBS, into[r]);
        }
        loaded.step(share);
    };
    auto write = [&](const RawScales (&from)[rows], u32 to) {
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            const int row = 32 * r + lane;
            if (ROWS % 32 != 0 && row >= ROWS) continue;
#pragma unroll
            for (int c = 0; c < SUBS; ++c) {
                float scale[4];
                if (scales.aligned)
#pragma unroll
                    for (int j = 0; j < 4; ++j) scale[j] = scale_of(from[r], 4 * c + j, offset, map256);
                else
                    read_scales(scales, p, written.row0 + row, written.unit0 * SUBS + 4 * c, offset, map256, scale);
                sts128(to + scale_chunk(row, c), __float_as_uint(scale[0]), __float_as_uint(scale[1]), __float_as_uint(scale[2]), __float_as_uint(scale[3]));
            }
        }
        written.step(share);
    };
    auto load_pair = [&](int i) {
        load(raw[i]), load(raw[i + 1]);
        skip(loaded, SIDES - 1);
    };
#pragma unroll
    for (int i = 0; i < ahead; i += 2) load_pair(i);
    Place place = {2 * side, 0};
    for (int stage = 2 * side; stage < stages;)
#pragma unroll
        for (int i = 0; i < ahead; i += 2, stage += 2 * SIDES, place.step(2 * SIDES)) {
            if (stage >= stages) break;
            const u32 full = base + BARRIERS_AT + SLOT_FULL(place.slot), to = base + SCALES_AT + place.slot * SCALE_BYTES;
#pragma unroll
            for (int j = 0; j < 2; ++j) barrier_wait(full + SLOT_FULL(j) + 8, place.emptied());
#pragma unroll
            for (int j = 0; j < 2; ++j) write(raw[i + j], to + j * SCALE_BYTES);
            skip(written, SIDES - 1);
            __syncwarp();
            if (lane < 2) barrier_arrive(full + SLOT_FULL(lane));
            load_pair(i);
        }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
codebook_mma(const __grid_constant__ Maps maps, const __grid_constant__ Codebook codebook, const __grid_constant__ Scales scales, const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) u8 shared[];
    if ((shared_address(shared) & 0xFFFFFFu) != TABLE_AT) __trap();    // no device known puts a block's shared memory elsewhere
    const u32 base = SPLIT == 1 ? TABLE_AT : shared_address(shared);    // in a cluster its high bits tell the block
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    next_kernel_may_start();

    Copies copies(p);
    if (warp == COPY_WARP) {    // sets the barriers up and is off before the others have set up their part
        if (lane == 0) {
            const u32 barriers = base + BARRIERS_AT;
            expect_map(&maps.codes[0]);
            for (int slot = 0; slot < STAGES; ++slot) {
                barrier_init(barriers + SLOT_FULL(slot), COPY_ARRIVALS + SCALE_SIDE);
                barrier_init(barriers + SLOT_FULL(slot) + 8, TEAM);
            }
            barrier_init(barriers + INBOX_FULL, 32 * WARPS * (SPLIT - 1) + (SPLIT == 1));
            barrier_init(barriers + INBOX_FULL + 8, 32 * WARPS);
            barriers_visible();
        }
        __syncwarp();
        if (elected()) copies.copy<false>(maps, p, base, STAGES, lane);
    } else if (warp < WARPS) {    // builds its share of the table, one copy of each pair of weights a bank
        build_table(codebook, base, warp, lane);
    }
#if SCALE_KIND == 1
    for (int i = threadIdx.x; i < 256; i += THREADS) sts32(base + MAP256_AT + 4 * i, __float_as_uint(__ldg(scales.map + i)));
#endif
    __syncthreads();
    cluster_arrive();

    if (warp == COPY_WARP) {
        if (elected()) copies.copy<true>(maps, p, base, copies.left, lane);
        __syncwarp();
        cluster_wait();
        return;
    }
#if SCALE_SIDE
    if (warp >= SIDE_WARP) {
        bring_scales(scales, p, base, warp - SIDE_WARP);
        __syncwarp();
        cluster_wait();
        return;
    }
#endif
    previous_kernel_done();    // from here on x is read and out written
    u32 round = 0;
    Fetch fetch(base + X_AT + warp * GROUPS * X_ROWS * X_PITCH);
    start_pass(p, fetch);
    for (int tiles; (tiles = tiles_now(p, round)) > 0;)
        if (tiles == TILES)
            multiply_pass<TILES>(p, base, codebook.inverse, round, fetch);
        else if (tiles == LAST)
            multiply_pass<LAST>(p, base, codebook.inverse, round, fetch);
        else
            multiply_pass<(LAST > 1 ? LAST - 1 : 1)>(p, base, codebook.inverse, round, fetch);
}
