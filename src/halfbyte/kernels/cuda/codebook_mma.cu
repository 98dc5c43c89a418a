// out[M, N] = x[M, K] * W[N, K]^T for a few rows of x, W a 4-bit codebook weight read where the checkpoint left it.
//
// A block of threads owns a slab of rows of W (a cluster of SPLIT blocks, a share of K each) and walks along K in stages
// of 256 weights a row and groups of four stages. One warp copies codes into a ring of STAGES slots in shared memory,
// one copies x there, one or two scale x to fp16 in place, and scales come a group at a time: copied too where they are
// fp32 and aligned, else decoded to fp32 by one or two side warps. Four teams of four warps multiply: team t takes stage t of each group,
// and a warp of it 64 weights (a "unit") of all the slab's rows.
//
//   codes of 16 rows x 64 k  --table--> A fragments of 4 mma.m16n8k16 (fp16) --\
//   8 rows of x   x 64 k     ---------> B fragments --------------------------- + --> fp32 sums of one scale block
//                                                          accumulators += scale * sums
//
// K is walked in the order that suits the codes: a lane's 8 consecutive bytes are its part of four mma steps, and x
// follows. The order of summation depends on N and K alone, so a row's bits do not depend on M.
//
// Macros, set by codebook_mma.py:
//   TILES           16-row tiles of W in flight a warp          GROUPS      groups of 8 rows of x
//   STAGES          slots of the ring, a multiple of 4          X_ROWS      rows of x kept in a slot: 1, 2, 4, 8 GROUPS
//   X_TYPE          0 fp16, 1 bf16, 2 fp32 (also of out)        SPLIT       blocks of a cluster, which share K
//   BLOCK           32 or 64: k between two scales              TERMS       2 keeps the table to 22 bits, else 1
//   SCALE_KIND      0 fp32, 1 nested, 2 E8M0                    SCALE_SIDE  whether side warps bring the scales
//   HIGH_FIRST      element 2j is the high nibble of byte j     OVERLAP     starts before the previous kernel has ended

#define UNIT 64                                  // weights of a row that a warp takes from a stage
#define TEAM 4                                   // warps of a team: units in a stage
#define TEAMS 4                                  // stages in a group
#define WARPS (TEAM * TEAMS)                     // that multiply
#define CODE_WARP WARPS
#define X_WARP (WARPS + 1)
#define SCALING_WARP (WARPS + 2)
#define SCALINGS (X_TYPE == 0 ? 0 : SCALE_SIDE ? 1 : 2)      // 20 warps in all leave 96 registers a thread
#define SIDE_WARP (SCALING_WARP + SCALINGS)
#define SIDES (!SCALE_SIDE ? 0 : X_TYPE == 0 ? 2 : 1)
#define ROWS (16 * TILES)                        // rows of W in a pass
#define SUBS (UNIT / BLOCK)                      // scale blocks in a unit
#define THREADS (32 * (SIDE_WARP + SIDES))
#define X_BYTES_EACH (X_TYPE == 2 ? 4 : 2)
#define X_TERMS (X_TYPE == 2 ? 2 : 1)            // fp32 x is split in two fp16 numbers
#define X_WORDS (4 * X_BYTES_EACH)               // 32-bit words of a lane's 16 elements of x
#define SUMS (TERMS == 2 || X_TERMS == 2 ? 2 : 1)
#define LOW_WEIGHT 0.00048828125f                // 2^-11: the second terms are kept 2^11 times larger

// A slot: codes of ROWS x 256 k, 16-byte chunks xor-swizzled by the row; x [row][256], rows padded against bank
// conflicts. Two slots for scales: fp32 [row][16 SUBS blocks of a group], chunks swizzled.
#define CODE_BYTES (ROWS * 128)
#define X_PITCH (256 * X_BYTES_EACH + (BLOCK == 32 ? 64 : 16))
#define X_BYTES (X_ROWS * X_PITCH)
#define SCALE_PITCH (64 * SUBS)
#define SCALE_BYTES (ROWS * SCALE_PITCH)

// Shared memory: table, codes, scales, x, sums. An entry of the table is 256 bytes, so that one PRMT makes its address: a
// pair of fp16 for each bank, then 128 bytes that hold the pair's low terms (TERMS 2) or, at the end of a pass, sums.
#define TABLE_BYTES 65536
// bits 8..15 of the address where a block's own shared memory begins
#if __CUDA_ARCH__ >= 900
#define TABLE_OFFSET 1024
#else
#define TABLE_OFFSET 0
#endif
#define CODES_AT TABLE_BYTES
#define SCALES_AT (CODES_AT + STAGES * CODE_BYTES)
#define X_AT (SCALES_AT + 2 * SCALE_BYTES)
#define UNSCALE_AT (X_AT + STAGES * X_BYTES)
#define UNSCALE_BYTES (X_TYPE == 0 ? 0 : TEAM * X_ROWS * 4)    // of a slot: [unit][row of x]
#define SUMS_AT (UNSCALE_AT + STAGES * UNSCALE_BYTES)
#define SUM_WARPS 8          // warps whose sums are in shared memory at a time
#define SUMS_BYTES (TERMS == 2 ? SUM_WARPS * 4 * TILES * 128 : 0)
#define PEERS_AT (SUMS_AT + SUMS_BYTES)
#define PEERS_BYTES ((SPLIT - 1) * 4 * TILES * GROUPS * 128)
#define MAP256_AT (PEERS_AT + PEERS_BYTES)
#define BARRIERS_AT (MAP256_AT + (SCALE_KIND == 1 ? 1024 : 0))
#define SLOT_FULL(slot) (16 * (slot))            // from BARRIERS_AT; "empty" is 8 further
#define SCALES_FULL(slot) (16 * (STAGES + (slot)))
#define INBOX_FULL (16 * (STAGES + 2))
#define X_COPIED(slot) (16 * (STAGES + 3) + 8 * (slot))
#define SHARED_BYTES (BARRIERS_AT + 16 * (STAGES + 3) + 8 * STAGES)

// A barrier tells odd turns of a slot from even ones alone, so each slot must always serve the same team.
static_assert(STAGES % TEAMS == 0, "the ring holds whole groups");

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

struct alignas(64) TensorMap {
    u64 opaque[16];
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
    int aligned;            // whether 4 neighbouring scales of one row can be read by one load
};

struct Problem {
    const u8* codes;
    const void* x;
    const void* bias;       // of x's type or fp32, or null
    void* out;
    long long x_stride;     // elements between rows of x
    int m, n, k;
    int bias_is_fp32;
    int slab;               // rows of W that a block (or cluster) owns, a multiple of ROWS
    int units;              // units of K that a block of a cluster owns, a multiple of TEAM
};

#define DEVICE static __device__ __forceinline__

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// Reads what never changes after set-up, so the compiler is free to move it.
template <int OFFSET = 0>
DEVICE u32 constant_word(u32 address) {
    u32 d;
    asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(d) : "r"(address), "n"(OFFSET));
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

DEVICE void sts32(u32 address, u32 value) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory"); }

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

// Between a thread's own writes to shared memory and a bulk copy that later overwrites them.
DEVICE void written_before_copies() {
#if __CUDA_ARCH__ >= 900
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

// With programmatic dependent launch the kernel starts, and fetches weights, while the previous one ends.
DEVICE void previous_kernel_done() {
#if OVERLAP
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

DEVICE void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); }

// ---- fetching

// Lane group g of a warp owns rows row_of(g) and row_of(g) + 8 of a tile: even rows first, which keeps the swizzled codes
// free of bank conflicts.
DEVICE int row_of(int g) { return g < 4 ? 2 * g : 2 * g - 7; }

// Where chunk c (16 bytes) of a row of scales is, as bulk copies swizzle it.
DEVICE int scale_chunk(int row, int c) { return row * SCALE_PITCH + ((c ^ (SUBS == 1 ? row >> 1 & 3 : row & 7)) << 4); }

DEVICE u32 load_byte(const void* base, long long at) { return __ldg((const u8*)base + at); }

// The scales of a row in a group, as they are in memory: on their way while the slot is still being read.
#define GROUP_BLOCKS (16 * SUBS)
struct RawScales {
#if SCALE_KIND == 0
    float value[GROUP_BLOCKS];
#else
    u32 bytes[GROUP_BLOCKS / 4];
#endif
#if SCALE_KIND == 1
    float first_outer, last_outer;    // of the first and the last block, in case 256 blocks end between them
    int first_count;                  // blocks that take the first
#endif
};

DEVICE void load_scales(const Scales& s, const Problem& p, int row, int block, RawScales& raw) {
    const int blocks = p.k / BLOCK;    // of a row
    const long long b = (long long)row * blocks + block;
    const int count = row < p.n ? min(GROUP_BLOCKS, blocks - block) : 0;
#pragma unroll
    for (int c = 0; c < GROUP_BLOCKS; c += 4) {
#if SCALE_KIND == 0
#pragma unroll
        for (int j = c; j < c + 4; ++j) raw.value[j] = j < count ? __ldg((const float*)s.values + ((b + j) >> s.shift)) : 0.f;
#else
        u32 bytes = 0;
        if (s.aligned && c < count) {
            bytes = __ldg((const u32*)((const u8*)s.values + b + c));
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) bytes |= (c + j < count ? load_byte(s.values, (b + c + j) >> s.shift) : 0u) << (8 * j);
        }
        raw.bytes[c / 4] = bytes;
#endif
    }
#if SCALE_KIND == 1
    if (count > 0) {
        const long long first = b >> s.shift >> 8, last = (b + count - 1) >> s.shift >> 8;
        raw.first_outer = __ldg(s.outer + first), raw.last_outer = __ldg(s.outer + last);
        raw.first_count = first == last ? GROUP_BLOCKS : (int)((last << 8 << s.shift) - b);
    }
#endif
}

// Block j of `raw` in fp32. A format with another kind of scale adds a case here and in RawScales.
DEVICE float scale_of(const RawScales& raw, int j, float offset, u32 map256) {
#if SCALE_KIND == 0
    return raw.value[j];
#elif SCALE_KIND == 1
    const float code = __uint_as_float(constant_word(map256 + 4 * ((raw.bytes[j / 4] >> (8 * (j & 3))) & 255)));
    return __fadd_rn(__fmul_rn(code, j < raw.first_count ? raw.first_outer : raw.last_outer), offset);
#else
    const u32 e = (raw.bytes[j / 4] >> (8 * (j & 3))) & 255;    // 2^(e - 127), NaN for 255
    return __uint_as_float(e == 255 ? 0x7FC00000u : e ? e << 23 : 0x00400000u);
#endif
}

DEVICE void sts128(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE void write_scales(const RawScales& raw, int row, float offset, u32 map256, u32 to) {
#pragma unroll
    for (int c = 0; c < GROUP_BLOCKS / 4; ++c) {
        u32 word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) word[j] = __float_as_uint(scale_of(raw, 4 * c + j, offset, map256));
        sts128(to + scale_chunk(row, c), word[0], word[1], word[2], word[3]);
    }
}

// Copies into shared memory, by the engine on sm_90, else by all lanes. `full` has one arrival of a warp to come.
#if __CUDA_ARCH__ >= 900
#define COPY_ARRIVALS 1
DEVICE void expect_bytes(u32 full, u32 bytes) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(full), "r"(bytes) : "memory");
}
DEVICE void copy_tile(const TensorMap* map, int column, int row, u32 to, u32 full) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(full) : "memory");
}
#else
#define COPY_ARRIVALS 32
DEVICE void copy_chunk(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
DEVICE void arrive_when_copied(u32 full) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory"); }
#endif

// A stage's codes: 128 bytes of each row, chunk c of row r at chunk c ^ (r & 7). Beyond N and K the slot holds zeros or
// stale bytes, which nobody's sums see.
DEVICE void copy_codes(const TensorMap* map, const Problem& p, int row0, int unit0, u32 to, u32 full, int lane) {
#if __CUDA_ARCH__ >= 900
    if (lane > 0) return;
    expect_bytes(full, CODE_BYTES);
    copy_tile(map, unit0 * (UNIT / 2), row0, to, full);
#else
    const long long pitch = p.k / 2;
    for (int i = lane; i < ROWS * 8; i += 32) {
        const int row = i >> 3, chunk = i & 7;
        const long long byte = (long long)unit0 * (UNIT / 2) + chunk * 16;
        if (row0 + row < p.n && byte < pitch)
            copy_chunk(to + row * 128 + ((chunk ^ (row & 7)) << 4), p.codes + (row0 + row) * pitch + byte);
    }
    arrive_when_copied(full);
#endif
}

// A stage's x: 256 elements, or what is left of K, of each row.
DEVICE void copy_x(const Problem& p, int unit0, u32 to, u32 full, int lane) {
    const u32 bytes = max(0, min(256, p.k - unit0 * UNIT)) * X_BYTES_EACH;
    const char* from = (const char*)p.x + (long long)unit0 * UNIT * X_BYTES_EACH;
    const long long pitch = p.x_stride * X_BYTES_EACH;
#if __CUDA_ARCH__ >= 900
    if (lane == 0) expect_bytes(full, bytes * p.m);
    __syncwarp();
    for (int row = lane; row < p.m && bytes > 0; row += 32)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(to + row * X_PITCH), "l"(from + row * pitch), "r"(bytes), "r"(full) : "memory");
#else
    for (int row = 0; row < p.m; ++row)
        for (u32 at = lane * 16; at < bytes; at += 512) copy_chunk(to + row * X_PITCH + at, from + row * pitch + at);
    arrive_when_copied(full);
#endif
}

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

// ---- scaling x, in place

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

// The bits of the largest magnitude among the 64 elements that four lanes hold, as fp32.
DEVICE u32 largest(const u32 (&raw)[X_WORDS]) {
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < X_WORDS; ++i) {
        if (X_TYPE == 1) top = max_bf16x2(top, raw[i] & 0x7FFF7FFFu);
        if (X_TYPE == 2) top = max(top, raw[i] & 0x7FFFFFFFu);
    }
    if (X_TYPE == 1) top = max(top & 0xFFFF0000u, top << 16);
    top = max(top, __shfl_xor_sync(~0u, top, 1));
    return max(top, __shfl_xor_sync(~0u, top, 2));
}

// Scales 16 elements in place by the power of two that brings the largest of their unit to 2^14, and returns its inverse.
// bf16's 8 bits then fit fp16 exactly; fp32's 24 bits fit two fp16 numbers to 22.
DEVICE u32 scale_piece(u32 at, bool mine) {
    u32 raw[X_WORDS], half[8 * X_TERMS];
#pragma unroll
    for (int i = 0; i < X_WORDS; i += 4)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(raw[i]), "=r"(raw[i + 1]), "=r"(raw[i + 2]), "=r"(raw[i + 3]) : "r"(at + 4 * i));
    const u32 exponent = max(largest(raw) >> 23, 15u), scale = (268u - exponent) << 23;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#if X_TYPE == 1
        const u32 scaled = scale_bf16x2(raw[i], scale | scale >> 16);
        half[i] = pack_half2(__uint_as_float(scaled << 16), __uint_as_float(scaled & 0xFFFF0000u));
#elif X_TYPE == 2
        const float a = __uint_as_float(raw[2 * i]) * __uint_as_float(scale), b = __uint_as_float(raw[2 * i + 1]) * __uint_as_float(scale);
        half[i] = pack_half2(a, b);
        half[8 + i] = pack_half2((a - half_to_float(half[i])) * 2048.f, (b - half_to_float(half[i] >> 16)) * 2048.f);
#endif
    }
#pragma unroll
    for (int i = 0; i < 8 * X_TERMS; i += 4)
        if (mine) sts128(at + 4 * i, half[i], half[i + 1], half[i + 2], half[i + 3]);
    return (exponent - 14u) << 23;
}

// The pieces of 16 elements of a slot's x, 32 at a time.
DEVICE void scale_x(u32 x_at, u32 unscale_at, int lane) {
#pragma unroll 2
    for (int first = 0; first < 16 * X_ROWS; first += 32) {
        const int piece = first + lane, row = piece >> 4, unit = piece >> 2 & 3;
        const bool mine = row < X_ROWS;
        const u32 unscale = scale_piece(x_at + min(row, X_ROWS - 1) * X_PITCH + (piece & 15) * 16 * X_BYTES_EACH, mine);
        if (mine && (lane & 3) == 0) sts32(unscale_at + (unit * X_ROWS + row) * 4, unscale);
    }
}

// ---- multiplying

// A word of 8 codes -> 4 registers of two fp16 weights, in the order of memory. Byte i of the word becomes bits 8..15 of
// the address, `bank` the rest but TABLE_OFFSET: no addition is left to do.
template <int OFFSET>
DEVICE void decode(u32 word, u32 bank, u32 (&pairs)[4]) {
    pairs[0] = constant_word<OFFSET>(prmt(word, bank, 0x7604));
    pairs[1] = constant_word<OFFSET>(prmt(word, bank, 0x7614));
    pairs[2] = constant_word<OFFSET>(prmt(word, bank, 0x7624));
    pairs[3] = constant_word<OFFSET>(prmt(word, bank, 0x7634));
}

DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A lane's B fragments of a group of 8 rows of x in one unit, in the order in which codes are decoded.
struct Activations {
    u32 word[8 * X_TERMS];
    float unscale[2];    // of the two columns of a lane's sums
};

DEVICE void lds128(u32 address, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address));
}

DEVICE void read_x(u32 x_at, u32 unscale_at, Activations& x) {
    // a lane's 16 elements, or its 8 of each scale block; fp32's second terms follow each 16 elements' first
    constexpr int second = BLOCK == 64 ? 16 : 32 * X_BYTES_EACH;
#pragma unroll
    for (int term = 0; term < X_TERMS; ++term)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32* w = x.word + 8 * term + 4 * i;
            lds128(x_at + i * second + term * 32, w[0], w[1], w[2], w[3]);
        }
    u32 a = 0x3F800000u, b = a;    // 1
    if (X_TYPE != 0 && X_ROWS == 1) a = b = lds32(unscale_at);
    if (X_TYPE != 0 && X_ROWS > 1) lds64(unscale_at, a, b);
    x.unscale[0] = __uint_as_float(a), x.unscale[1] = __uint_as_float(b);
}

// Adds the products of one unit to the accumulators of all tiles.
DEVICE void multiply_unit(u32 codes, u32 scales, u32 bank, const Activations (&x)[GROUPS], float (&acc)[TILES][GROUPS][4]) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        u32 word[2][2];    // [row or row + 8][half of the lane's 8 bytes, or scale block]
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 at = codes + t * 2048 + h * 1024;
            if (BLOCK == 64) {
                lds64(at, word[h][0], word[h][1]);
            } else {
                word[h][0] = lds32(at);
                word[h][1] = lds32(at ^ 16);
            }
        }
        float sum[SUMS][GROUPS][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half == 0 || SUBS == 2) {
#pragma unroll
                for (int i = 0; i < SUMS * GROUPS * 4; ++i) (&sum[0][0][0])[i] = 0.f;
            }
            u32 a[2][4], low[2][4];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                decode<TABLE_OFFSET>(word[h][half], bank, a[h]);
                if (TERMS == 2) decode<TABLE_OFFSET + 128>(word[h][half], bank, low[h]);
            }
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const int b = 4 * half + 2 * s;
#pragma unroll
                for (int j = 0; j < GROUPS; ++j) {
                    mma(sum[0][j], a[0][2 * s], a[1][2 * s], a[0][2 * s + 1], a[1][2 * s + 1], x[j].word[b], x[j].word[b + 1]);
                    if (TERMS == 2) mma(sum[SUMS - 1][j], low[0][2 * s], low[1][2 * s], low[0][2 * s + 1], low[1][2 * s + 1], x[j].word[b], x[j].word[b + 1]);
                    if (X_TERMS == 2) mma(sum[SUMS - 1][j], a[0][2 * s], a[1][2 * s], a[0][2 * s + 1], a[1][2 * s + 1], x[j].word[(X_TERMS - 1) * 8 + b], x[j].word[(X_TERMS - 1) * 8 + b + 1]);
                }
            }
            if (half == 1 || SUBS == 2) {
                u32 scale[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) scale[h] = lds32(scales + (16 * t + 8 * h) * SCALE_PITCH + (SUBS == 2 ? 4 * half : 0));
#pragma unroll
                for (int j = 0; j < GROUPS; ++j)
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        if (X_ROWS == 1 && TILES < 8 && (c & 1)) continue;    // nobody's column; with 8 tiles skipping it makes spills
                        float value = sum[0][j][c];
                        if (SUMS == 2) value = fmaf(sum[SUMS - 1][j][c], LOW_WEIGHT, value);
                        acc[t][j][c] = fmaf(value, __uint_as_float(scale[c >> 1]) * x[j].unscale[c & 1], acc[t][j][c]);
                    }
            }
        }
    }
}

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
// Warp w (of the first 8) leaves accumulator i of lane l in row w * 4 * TILES + i, word l; thread (w, l) of all warps
// then owns sums w, w + WARPS, ... Warps from the 8th on first hand theirs to the warp 8 below.
DEVICE void reduce_and_store(const Problem& p, u32 base, int warp, int lane, int row0, u32 rank, int pass, bool last, float inverse, float (&acc)[TILES][GROUPS][4]) {
    constexpr int owned = (4 * TILES + WARPS - 1) / WARPS;
    constexpr int pitch = TERMS == 2 ? 128 : 256;
    const u32 sums = (TERMS == 2 ? base + SUMS_AT : base + 128) + lane * 4;
    const int columns = p.m < 2 ? 1 : 2;    // with one row of x, half of the sums are nobody's
    float total[GROUPS][owned];
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
#pragma unroll
        for (int from = (WARPS - 1) / SUM_WARPS * SUM_WARPS; from >= 0; from -= SUM_WARPS) {
            if (warp >= from && warp < from + SUM_WARPS) {
#pragma unroll
                for (int i = 0; i < 4 * TILES; ++i) {
                    const u32 at = sums + ((warp - from) * 4 * TILES + i) * pitch;
                    if ((i & 1) >= columns) continue;
                    if (from + SUM_WARPS < WARPS) acc[i >> 2][j][i & 3] += __uint_as_float(lds32(at));
                    sts32(at, __float_as_uint(acc[i >> 2][j][i & 3]));
                }
            }
            consumers_sync();
        }
#pragma unroll
        for (int o = 0; o < owned; ++o) {
            const int i = warp + WARPS * o;
            total[j][o] = 0.f;
            if (i >= 4 * TILES || (i & 1) >= columns) continue;
#pragma unroll
            for (int w = 0; w < min(WARPS, SUM_WARPS); ++w) total[j][o] += __uint_as_float(lds32(sums + (w * 4 * TILES + i) * pitch));
        }
        consumers_sync();
    }
#if SPLIT > 1
    // Peers write their sums into the inbox of the cluster's first block, once it has emptied it of the last pass's.
    constexpr int peer_bytes = 4 * TILES * GROUPS * 128;
    const u32 inbox = base + PEERS_AT + lane * 4, inbox_full = base + BARRIERS_AT + INBOX_FULL, inbox_free = inbox_full + 8;
    if (rank > 0) {
        if (pass == 0) cluster_wait();    // its barriers are ready
        if (pass > 0) cluster_barrier_wait(inbox_free, (pass - 1) & 1);
        const u32 to = at_rank(inbox + (rank - 1) * peer_bytes, 0);
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
#pragma unroll
            for (int o = 0; o < owned; ++o)
                if (warp + WARPS * o < 4 * TILES)
                    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to + (j * 4 * TILES + warp + WARPS * o) * 128), "f"(total[j][o]) : "memory");
        remote_arrive(at_rank(inbox_full, 0));
        return;
    }
    if (pass == 0) cluster_wait();
    cluster_barrier_wait(inbox_full, pass & 1);
#pragma unroll
    for (int peer = 0; peer < SPLIT - 1; ++peer) {
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
#pragma unroll
            for (int o = 0; o < owned; ++o)
                if (warp + WARPS * o < 4 * TILES) total[j][o] += __uint_as_float(lds32(inbox + peer * peer_bytes + (j * 4 * TILES + warp + WARPS * o) * 128));
        if (!last) remote_arrive(at_rank(inbox_free, peer + 1));
    }
#endif
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
        for (int o = 0; o < owned; ++o) {
            const int i = warp + WARPS * o;
            const int row = row0 + 16 * (i >> 2) + row_of(lane >> 2) + 8 * ((i >> 1) & 1), column = 8 * j + 2 * (lane & 3) + (i & 1);
            if (i < 4 * TILES && row < p.n && column < p.m) store(p, column, row, total[j][o] * inverse);
        }
}

// A place in a ring of `SLOTS`: the slot, and how often it was used before.
template <int SLOTS>
struct Place {
    int slot, turn;
    __device__ __forceinline__ void step(int by) {    // at most SLOTS
        slot += by;
        if (slot >= SLOTS) slot -= SLOTS, ++turn;
    }
    __device__ __forceinline__ u32 filled() const { return turn & 1; }          // parities to wait for
    __device__ __forceinline__ u32 emptied() const { return (turn & 1) ^ 1; }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
codebook_mma(const __grid_constant__ TensorMap code_map, const __grid_constant__ TensorMap scale_map,
             const __grid_constant__ Codebook codebook, const __grid_constant__ Scales scales, const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 base = shared_address(shared), barriers = base + BARRIERS_AT;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 rank = blockIdx.x % SPLIT;
    const int slab = blockIdx.x / SPLIT * p.slab, slab_end = min(p.n, slab + p.slab);
    const int passes = slab < slab_end ? (slab_end - slab + ROWS - 1) / ROWS : 0;
    const int unit_begin = rank * p.units, unit_end = min(p.k / UNIT, unit_begin + p.units);
    const int groups = unit_begin < unit_end ? (unit_end - unit_begin + WARPS - 1) / WARPS : 0;    // of a pass
    const int stages = groups * TEAMS;    // the last ones may lie beyond K: they are handed on empty

    Place<STAGES> code_place = {0, 0};
    Place<2> scale_copy_place = {0, 0};
    auto copy_group = [&](int row0, int unit0) {    // by the code warp; waits for slots, never for what it copies
#if !SCALE_SIDE
        const u32 scales_full = barriers + SCALES_FULL(scale_copy_place.slot);
        barrier_wait(scales_full + 8, scale_copy_place.emptied());
        if (lane == 0) {
            expect_bytes(scales_full, SCALE_BYTES);
            copy_tile(&scale_map, unit0 * SUBS, row0, base + SCALES_AT + scale_copy_place.slot * SCALE_BYTES, scales_full);
        }
        scale_copy_place.step(1);
#endif
        for (int s = 0; s < TEAMS; ++s, code_place.step(1)) {
            const u32 full = barriers + SLOT_FULL(code_place.slot);
            barrier_wait(full + 8, code_place.emptied());
            copy_codes(&code_map, p, row0, unit0 + s * TEAM, base + CODES_AT + code_place.slot * CODE_BYTES, full, lane);
        }
    };
    const int early = passes ? min(groups, min(STAGES / TEAMS, 2)) : 0;    // groups that need no slot to be emptied

    if (warp == CODE_WARP) {    // sets the barriers up and is off before the others have set up their part
        if (lane == 0) {
            for (int slot = 0; slot < STAGES; ++slot) {
                barrier_init(barriers + SLOT_FULL(slot), COPY_ARRIVALS + (X_TYPE == 0 ? COPY_ARRIVALS : 1));
                barrier_init(barriers + X_COPIED(slot), COPY_ARRIVALS);
                barrier_init(barriers + SLOT_FULL(slot) + 8, TEAM);
            }
            for (int slot = 0; slot < 2; ++slot) {
                barrier_init(barriers + SCALES_FULL(slot), 1);
                barrier_init(barriers + SCALES_FULL(slot) + 8, WARPS);
            }
            barrier_init(barriers + INBOX_FULL, 32 * WARPS * (SPLIT - 1) + (SPLIT == 1));
            barrier_init(barriers + INBOX_FULL + 8, 32 * WARPS);
            barriers_visible();
        }
        __syncwarp();
        for (int group = 0; group < early; ++group) copy_group(slab, unit_begin + group * WARPS);
    } else if (warp < WARPS) {    // builds its share of the table, one copy of each pair of weights a bank
        constexpr int entries = 256 / WARPS;
        const int entry = warp * entries + lane % entries;
        const int first = HIGH_FIRST ? entry >> 4 : entry & 15, second = HIGH_FIRST ? entry & 15 : entry >> 4;
        const u32 pair = codebook.high[first] | (u32)codebook.high[second] << 16;
        const u32 low = codebook.low[first] | (u32)codebook.low[second] << 16;
#pragma unroll
        for (int i = 0; i < entries; ++i) {
            const u32 at = base + (warp * entries + i) * 256 + lane * 4;
            sts32(at, __shfl_sync(~0u, pair, i));
            if (TERMS == 2) sts32(at + 128, __shfl_sync(~0u, low, i));
        }
    }
#if SCALE_KIND == 1
    for (int i = threadIdx.x; i < 256; i += THREADS) sts32(base + MAP256_AT + 4 * i, __float_as_uint(__ldg(scales.map + i)));
#endif
    __syncthreads();
    cluster_arrive();

    if (warp == CODE_WARP) {
        for (int pass = 0; pass < passes; ++pass)
            for (int group = pass ? 0 : early; group < groups; ++group) copy_group(slab + pass * ROWS, unit_begin + group * WARPS);
        __syncwarp();
        cluster_wait();
        return;
    }
    if (warp == X_WARP) {
        previous_kernel_done();    // from here on x is read
        Place<STAGES> place = {0, 0};
        for (int i = 0; i < passes; ++i)
            for (int stage = 0; stage < stages; ++stage, place.step(1)) {
                const u32 full = barriers + SLOT_FULL(place.slot);
                barrier_wait(full + 8, place.emptied());
                const u32 copied = X_TYPE == 0 ? full : barriers + X_COPIED(place.slot);
                copy_x(p, unit_begin + stage * TEAM, base + X_AT + place.slot * X_BYTES, copied, lane);
            }
        __syncwarp();
        cluster_wait();
        return;
    }
#if X_TYPE != 0
    if (warp < SIDE_WARP && warp >= SCALING_WARP) {    // with two, every other stage: the same slots, their number is even
        Place<STAGES> place = {0, 0};
        place.step(warp - SCALING_WARP);
        for (int i = warp - SCALING_WARP; i < passes * stages; i += SCALINGS, place.step(SCALINGS)) {
            barrier_wait(barriers + X_COPIED(place.slot), place.filled());
            scale_x(base + X_AT + place.slot * X_BYTES, base + UNSCALE_AT + place.slot * UNSCALE_BYTES, lane);
            written_before_copies();
            __syncwarp();
            if (lane == 0) barrier_arrive(barriers + SLOT_FULL(place.slot));
        }
        __syncwarp();
        cluster_wait();
        return;
    }
#endif
#if SCALE_SIDE
    if (warp >= SIDE_WARP) {    // with two, every other group: a slot each
        constexpr int rows = (ROWS + 31) / 32;
        const float offset = SCALE_KIND == 1 ? __ldg(scales.offset) : 0.f;
        Place<2> place = {0, 0};
        place.step(warp - SIDE_WARP);
        for (int i = warp - SIDE_WARP; i < passes * groups; i += SIDES, place.step(SIDES)) {
            const u32 full = barriers + SCALES_FULL(place.slot);
            const int row0 = slab + i / groups * ROWS + lane, block0 = (unit_begin + i % groups * WARPS) * SUBS;
            RawScales raw[rows];
#pragma unroll
            for (int r = 0; r < rows; ++r) load_scales(scales, p, row0 + 32 * r, block0, raw[r]);
            barrier_wait(full + 8, place.emptied());
#pragma unroll
            for (int r = 0; r < rows; ++r)
                if (ROWS % 32 == 0 || 32 * r + lane < ROWS)
                    write_scales(raw[r], 32 * r + lane, offset, base + MAP256_AT, base + SCALES_AT + place.slot * SCALE_BYTES);
            __syncwarp();
            if (lane == 0) barrier_arrive(full);
        }
        __syncwarp();
        cluster_wait();
        return;
    }
#endif

    // a multiplying warp
    const u32 bank = (base & ~0xFF00u) | (lane * 4);
    if ((base & 0xFF00u) != TABLE_OFFSET) __trap();    // no device known puts its shared memory elsewhere
    previous_kernel_done();    // from here on out is written

    const int g = lane >> 2, q = lane & 3, row = row_of(g), team = warp / TEAM, mine = warp % TEAM;
    // this warp's 32 bytes of each row: chunks 2 mine and 2 mine + 1 of a slot; its 4 SUBS bytes of a row of scales
    const int chunk = 2 * mine + (BLOCK == 64 ? q >> 1 : 0), scale_byte = warp * SUBS * 4;
    const u32 codes_at = base + CODES_AT + row * 128 + ((chunk ^ row) << 4) + (BLOCK == 64 ? (q & 1) * 8 : q * 4);
    const u32 scales_at = base + SCALES_AT + scale_chunk(row, scale_byte >> 4) + (scale_byte & 15);
    const u32 x_at = base + X_AT + (g % X_ROWS) * X_PITCH + mine * UNIT * X_BYTES_EACH + (BLOCK == 64 ? q * 16 * X_BYTES_EACH : X_TERMS == 1 ? q * 16 : (q >> 1) * 64 + (q & 1) * 16);
    const u32 unscale_at = base + UNSCALE_AT + (mine * X_ROWS + 2 * q % X_ROWS) * 4;

    Place<STAGES> place = {team, 0};
    Place<2> scale_place = {0, 0};
    for (int row0 = slab; row0 < slab_end; row0 += ROWS) {
        float acc[TILES][GROUPS][4] = {};
        for (int group0 = unit_begin; group0 < unit_end; group0 += WARPS, place.step(TEAMS), scale_place.step(1)) {
            const u32 scales_full = barriers + SCALES_FULL(scale_place.slot), full = barriers + SLOT_FULL(place.slot);
            barrier_wait(scales_full, scale_place.filled());
            barrier_wait(full, place.filled());
            if (group0 + warp < unit_end) {
                Activations x[GROUPS];
#pragma unroll
                for (int j = 0; j < GROUPS; ++j) read_x(x_at + place.slot * X_BYTES + 8 * j * X_PITCH, unscale_at + place.slot * UNSCALE_BYTES + 32 * j, x[j]);
                multiply_unit(codes_at + place.slot * CODE_BYTES, scales_at + scale_place.slot * SCALE_BYTES, bank, x, acc);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(full + 8), barrier_arrive(scales_full + 8);
        }
        reduce_and_store(p, base, warp, lane, row0, rank, (row0 - slab) / ROWS, row0 + ROWS >= slab_end, codebook.inverse, acc);
    }
}
