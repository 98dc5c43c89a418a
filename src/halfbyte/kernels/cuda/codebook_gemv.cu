// out[M, N] = x[M, K] * W[N, K]^T for up to 8 rows of x, W a 4-bit weight of any format, read where the checkpoint left it.
//
// A block of threads owns TILE_ROWS rows of W. Its warps share K: warp w takes every WARPS-th run of TILE_K weights and
// needs nobody else until the end. It copies its runs of all rows ("a tile", about 2 KiB) into a ring of its own in shared
// memory, as whole aligned pieces of 16 bytes, STAGES - 1 ahead, and x as fp32 beside it. A lane then takes a chunk of 32
// weights of each of 4 rows:
//
//   weight = fma(table[code], scale, offset)      the true value, rounded once
//   sum[row][m] = fma(weight, x[m], sum[row][m])
//
// and at the end lanes, then warps, are added in a fixed order. That order depends on N and K alone, not on M.
// The table of 16 fp32 values has a copy for each bank of shared memory.
//
// A format is how the codes of a chunk are found (copy_tile, load_chunk, nibble_of, x_quad) and how a block's scale and offset
// are read (load_raw, scales_of); all else is common. Macros, set by codebook_gemv.py:
//   LAYOUT      PLANAR, RECORD32 (GGUF), SUPERBLOCK (Q4_K), WORDS_K (GPTQ), WORDS_N (AWQ)
//   RECORD      bytes of 32 weights                       CODE_START  bytes before a record's codes
//   GRAIN       largest power of two up to 16 that divides the address of every run of every row
//   READ        16, 4 or 1: the same for the codes of every chunk
//   EDGES       whether a piece may reach beyond the tensor: such pieces are copied byte by byte
//   PIECE       16, or 4 for int32 words that are not 16-byte aligned
//   STRADDLE    K is no multiple of 32 (bitsandbytes): rows begin within blocks, even within bytes
//   HIGH_FIRST  element 2j is the high nibble of byte j
//   SCALE       ABSMAX, NESTED, E8M0, E4M3, HALF, HALF_MIN, RECORD_E8M0, KQUANT, GROUP_FP16, GROUP_BF16
//   SUBS        scales that a chunk may need: 1, 2, 4     ZERO_BASE   added to zero points (1 in GPTQ's first format)
//   M_ROWS      rows of x: 1, 2, 4, 8                     X_TYPE      0 fp16, 1 bf16, 2 fp32 (also of out)
//   WARPS       of a block, which share K                 STAGES      tiles of a warp's ring
//   RESIDENT    blocks that a multiprocessor's registers shall hold

#define PLANAR 0
#define RECORD32 1
#define SUPERBLOCK 2
#define WORDS_K 3
#define WORDS_N 4
#define ABSMAX 0
#define NESTED 1
#define E8M0 2
#define E4M3 3
#define HALF 4
#define HALF_MIN 5
#define RECORD_E8M0 6
#define KQUANT 7
#define GROUP_FP16 8
#define GROUP_BF16 9

#define IN_WORDS (LAYOUT == WORDS_K || LAYOUT == WORDS_N)
#define GROUPED (SCALE == GROUP_FP16 || SCALE == GROUP_BF16)
#define IN_RECORD (SCALE == HALF || SCALE == HALF_MIN || SCALE == RECORD_E8M0 || SCALE == KQUANT)
#define HAS_OFFSET (GROUPED || SCALE == HALF_MIN || SCALE == KQUANT)

#define CHUNKS (LAYOUT == SUPERBLOCK ? 8 : LAYOUT == WORDS_N ? 2 : 4)  // of 32 weights, along K in a tile
#define GROUPS (32 / CHUNKS)                                           // of 4 rows
#define ROWS 4                                                         // of a lane
#define TILE_ROWS (ROWS * GROUPS)
#define TILE_K (32 * CHUNKS)
#define THREADS (32 * WARPS)

// A tile in shared memory: rows of whole pieces, padded against bank conflicts, or lines of int32 words.
#define PIECES ((16 - GRAIN + CHUNKS * RECORD + STRADDLE + 15) / 16)
#define PITCH (16 * (LAYOUT == SUPERBLOCK ? 10 : PIECES | 1))
#define LINES (LAYOUT == WORDS_K ? TILE_K / 8 : TILE_K)
#define LINE_WORDS (LAYOUT == WORDS_K ? TILE_ROWS : TILE_ROWS / 8)
#define LINE_AT(line) ((line) * LINE_WORDS * 4 + (line) / 32 * 32)
#define TILE_BYTES (IN_WORDS ? LINE_AT(LINES) : TILE_ROWS * PITCH)
#define X_CHUNK 36                                                     // floats from a chunk of x to the next
#define X_ROW (CHUNKS * X_CHUNK)
#define TABLE_BYTES 2048
#define WARP_BYTES (STAGES * TILE_BYTES + M_ROWS * X_ROW * 4)
#define SHARED_BYTES (2 * TABLE_BYTES + WARPS * WARP_BYTES)

static_assert(M_ROWS * TILE_ROWS * 4 <= WARP_BYTES, "the sums of all warps take the place of their tiles");
static_assert(LAYOUT != SUPERBLOCK || PIECES <= 10, "a superblock fits its pitch");

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

struct Problem {
    const u8* codes;
    const void* x;
    const void* bias;        // [n] of x's type, or fp32; or null
    void* out;               // [m, n]
    const void* scales;      // fp32, q8, E8M0 or E4M3 a block; GPTQ, AWQ: [k / group, n] in 16 bits
    const u32* zeros;        // GPTQ, AWQ: [k / group, n / 8]
    const float* outer;      // nested: absmax of each 256 blocks
    const float* map;        // nested: the 256 values of q8
    const float* constant;   // nested: added to each scale; NVFP4: multiplies each scale
    long long code_bytes;
    long long x_stride;      // elements between rows of x
    int m, n, k;
    int block_shift;         // log2 of the weights that share an absmax
    int group;               // GPTQ, AWQ: weights along k that share a scale
    int bias_is_fp32;
    int x_in_quads;          // whether every fourth element of every row of x is aligned to four elements
    float codebook[16];
};

// What a lane works on: chunk `chunk` of the rows of group `group`, in the block's rows from n0 on.
struct Lane {
    int n0, index, chunk, group;
};

#define DEVICE static __device__ __forceinline__

// ---- what needs PTX; tests/native/cuda_on_cpu.hpp has the same in C++
#ifndef CUDA_ON_CPU
#define DYNAMIC_SHARED(name) extern __shared__ uint4 name[]

DEVICE float half_to_float(u32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
    return value;
}

DEVICE u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Of a place in shared memory; opaque, so that the compiler adds nothing to it again for each weight.
DEVICE u32 shared_address(const void* place) {
    u32 address;
    asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"((u32)__cvta_generic_to_shared(place)));
    return address;
}

// Reads what never changes after set-up, so the compiler is free to move it.
DEVICE float constant_at(u32 address) {
    float value;
    asm("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
    return value;
}

// Copies of 16 or 4 bytes into shared memory that end later; before sm_80, at once.
template <int BYTES>
DEVICE void copy_async(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    const u32 address = (u32)__cvta_generic_to_shared(to);
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
#else
    if (BYTES == 16)
        *(uint4*)to = __ldg((const uint4*)from);
    else
        *(u32*)to = __ldg((const u32*)from);
#endif
}

DEVICE void copies_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all but the LEFT latest groups of this lane's copies have ended.
template <int LEFT>
DEVICE void copies_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}
#endif

// ---- numbers

DEVICE float bfloat_to_float(u32 bits) { return __uint_as_float(bits << 16); }

DEVICE u16 float_to_bfloat(float value) {
    const u32 bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
    return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);    // to nearest, ties to even
}

DEVICE float e8m0_to_float(u32 e) { return __uint_as_float(e == 255 ? 0x7FC00000u : e ? e << 23 : 0x00400000u); }

DEVICE float e4m3_to_float(u32 bits) {
    const float magnitude = __uint_as_float((bits & 127) << 20) * 0x1p120f;    // exact, subnormals too
    return (bits & 127) == 127 ? __uint_as_float(0x7FC00000u) : bits & 128 ? -magnitude : magnitude;
}

// Number `at` of an array of x's type.
DEVICE float load_one(const void* from, long long at) {
    if (X_TYPE == 2) return __ldg((const float*)from + at);
    const u32 bits = __ldg((const u16*)from + at);
    return X_TYPE == 1 ? bfloat_to_float(bits) : half_to_float(bits);
}

DEVICE float4 load_four(const void* from, long long at) {
    if (X_TYPE == 2) return __ldg((const float4*)((const float*)from + at));
    const uint2 two = __ldg((const uint2*)((const u16*)from + at));
    if (X_TYPE == 1)
        return make_float4(bfloat_to_float(two.x), __uint_as_float(two.x & 0xFFFF0000u), bfloat_to_float(two.y),
                           __uint_as_float(two.y & 0xFFFF0000u));
    return make_float4(half_to_float(two.x & 0xFFFF), half_to_float(two.x >> 16), half_to_float(two.y & 0xFFFF),
                       half_to_float(two.y >> 16));
}

// ---- codes

// Row r of a lane's group: neighbours where an int32 word, or a 16-byte load, holds several.
DEVICE int row_in_tile(int group, int r) { return IN_WORDS ? ROWS * group + r : r * GROUPS + group; }

// Of the flattened [N, K]; for rows beyond N, whose sums nobody reads, of the last row.
DEVICE long long element(const Problem& p, int n, int k) { return (long long)min(n, p.n - 1) * p.k + k; }

// The byte where a run of codes that begins at element e begins, and where that is in its row of the tile.
DEVICE long long run_start(long long e) { return LAYOUT == PLANAR ? e >> 1 : (e >> 5) * RECORD; }
DEVICE int run_offset(const Problem& p, long long e) { return GRAIN == 16 ? 0 : (int)((u64)(p.codes + run_start(e)) & 15); }

DEVICE void copy_piece(const Problem& p, u8* to, const u8* from) {
    const u8* end = p.codes + p.code_bytes;
    if (!EDGES || (from >= p.codes && from + 16 <= end)) {
        copy_async<16>(to, from);
        return;
    }
    for (int b = 0; b < 16; ++b)
        if (from + b >= p.codes && from + b < end) to[b] = __ldg(from + b);
}

// Starts the copies of a warp's tile, columns k0 and on. What lies beyond the matrix is left as it was: any nibble is a
// code, and x and scales are zero there.
DEVICE void copy_tile(const Problem& p, const Lane& lane, int k0, u8* to) {
    if (k0 >= p.k) return;
    const int n0 = lane.n0;
#if LAYOUT == WORDS_K || LAYOUT == WORDS_N
    const int lines = LAYOUT == WORDS_K ? p.k / 8 : p.k, width = LAYOUT == WORDS_K ? p.n : p.n / 8;
    const int line0 = LAYOUT == WORDS_K ? k0 / 8 : k0, word0 = LAYOUT == WORDS_K ? n0 : n0 / 8;
#pragma unroll
    for (int start = 0; start < LINES * LINE_WORDS * 4 / PIECE; start += 32) {
        const int at = (start + lane.index) * (PIECE / 4), line = at / LINE_WORDS, word = at % LINE_WORDS;
        if (line0 + line < lines && word0 + word < width)
            copy_async<PIECE>(to + LINE_AT(line) + 4 * word, p.codes + 4 * ((long long)(line0 + line) * width + word0 + word));
    }
#else
#pragma unroll
    for (int start = 0; start < TILE_ROWS * PIECES; start += 32) {
        const int i = start + lane.index, row = i / PIECES, piece = i % PIECES;
        if (TILE_ROWS * PIECES % 32 && row >= TILE_ROWS) break;
        const u8* from = (const u8*)((u64)(p.codes + run_start(element(p, n0 + row, k0))) & ~15ull) + 16 * piece;
        const u8* end = p.codes + run_start(element(p, n0 + row, p.k) + STRADDLE);
        if (from < end) copy_piece(p, to + row * PITCH + 16 * piece, from);
    }
#endif
}

// COUNT words of a row from byte `at` on, and 4 bits later if `half`.
template <int COUNT>
DEVICE void read_words(const u8* row, int at, bool half, u32 (&words)[4]) {
    const u32* from = (const u32*)row + at / 4;
#if READ == 16
    const uint4 all = *(const uint4*)from;
    words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
#elif READ == 4
#pragma unroll
    for (int i = 0; i < COUNT; ++i) words[i] = from[i];
#else
    u32 raw[COUNT + 1];
#pragma unroll
    for (int i = 0; i <= COUNT; ++i) {
        raw[i] = from[i < COUNT || (at & 3) || half ? i : i - 1];    // not beyond the words that are used: a copy may be writing there
        if (STRADDLE && HIGH_FIRST) raw[i] = (raw[i] >> 4 & 0x0F0F0F0F) | (raw[i] << 4 & 0xF0F0F0F0);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) words[i] = __funnelshift_r(raw[i], raw[i + 1], 8 * (at & 3) + (half ? 4 : 0));
#endif
}

// Four words a row, each of eight weights of the lane's chunk. (WORDS_N: none; they hold one k each.)
DEVICE void load_chunk(const Problem& p, const Lane& lane, int k0, const u8* tile, u32 (&words)[ROWS][4]) {
#if LAYOUT == WORDS_K
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint4 all = *(const uint4*)(tile + LINE_AT(4 * lane.chunk + j) + 16 * lane.group);
        words[0][j] = all.x, words[1][j] = all.y, words[2][j] = all.z, words[3][j] = all.w;
    }
#elif LAYOUT != WORDS_N
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = row_in_tile(lane.group, r);
        const long long e = element(p, lane.n0 + row, k0);
        const int at = run_offset(p, e) + CODE_START + lane.chunk * (LAYOUT == SUPERBLOCK ? 16 : RECORD);
        read_words<4>(tile + row * PITCH, at, STRADDLE && (e & 1), words[r]);
    }
#endif
}

// A word's weights come in two halves of four: low nibbles and high ones where those are 16 or 32 weights apart, else as
// they follow each other. Which nibble is weight i of half h:
DEVICE constexpr int nibble_of(int h, int i) {
    if (LAYOUT == RECORD32 || LAYOUT == SUPERBLOCK) return 2 * i + h;
    return 4 * h + (HIGH_FIRST && !STRADDLE ? i ^ 1 : i);
}

// Where the four values of x for half h of word j of a chunk are.
DEVICE int x_quad(int chunk, int j, int h) {
    if (LAYOUT == SUPERBLOCK) return (chunk / 2 * 2 + h) * X_CHUNK + chunk % 2 * 16 + 4 * j;
    return chunk * X_CHUNK + (LAYOUT == RECORD32 ? 16 * h + 4 * j : 8 * j + 4 * h);
}

// Columns 0, 1, 2, 3 of AWQ's words are in nibbles 0, 4, 1, 5; columns 4, 5, 6, 7 two further.
DEVICE constexpr int awq_nibble(int column) { return column % 2 * 4 + column / 2; }

// ---- scales

// What scales are made of, as it is in memory: on its way while the tile before is multiplied.
struct Raw {
    u32 value[ROWS][SUBS];
    float outer[ROWS][SUBS];
    u32 zeros[SUBS];
};

// The first weight, of a chunk that begins at element e, for which scale s holds; 32 or more: none does.
DEVICE int span_start(const Problem& p, long long e, int s) {
    if (s == 0 || SCALE == KQUANT) return 0;
    if (!STRADDLE) return s * (32 / SUBS);
    return (int)min((((e >> p.block_shift) + 1) << p.block_shift) - e, 32ll);
}

DEVICE void load_raw(const Problem& p, const Lane& lane, int k0, Raw& raw) {
    const int k = k0 + 32 * lane.chunk;
#if !IN_RECORD
#pragma unroll
    for (int s = 0; s < SUBS; ++s) {
        const long long line = GROUPED ? (u32)(k + s * (32 / SUBS)) / (u32)p.group : 0;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int n = min(lane.n0 + row_in_tile(lane.group, r), p.n - 1);
            const long long e = element(p, n, k);
            const int start = span_start(p, e, s);
            raw.value[r][s] = 0, raw.outer[r][s] = 0;
            if (r == 0) raw.zeros[s] = 0;
            if (start >= 32 || k + start >= p.k) continue;
            if (GROUPED) {
                raw.value[r][s] = __ldg((const u16*)p.scales + line * p.n + n);
                if (r == 0) raw.zeros[s] = __ldg(p.zeros + line * (p.n / 8) + n / 8);    // one word for all four
                continue;
            }
            const long long block = (e + start) >> (SCALE == E4M3 ? 4 : SCALE == E8M0 ? 5 : p.block_shift);
            raw.value[r][s] = SCALE == ABSMAX ? __ldg((const u32*)p.scales + block) : __ldg((const u8*)p.scales + block);
            if (SCALE == NESTED) raw.outer[r][s] = __ldg(p.outer + (block >> 8));
        }
    }
#endif
}

struct Scales {
    float scale[SUBS], offset[SUBS];
    int border;    // STRADDLE: the weight of the chunk from which the second scale holds
};

// The scales of row r of a lane's chunk; zeros beyond the end of the row. Every product and sum is one fp32 rounding.
DEVICE Scales scales_of(const Problem& p, const Lane& lane, int k0, const u8* tile, const Raw& raw, int r) {
    Scales result;
    const int row = row_in_tile(lane.group, r), k = k0 + 32 * lane.chunk;
    const long long e = element(p, lane.n0 + row, k);
    u32 head[4];    // of the record
#if IN_RECORD
    const int at = run_offset(p, e - 32 * lane.chunk) + (SCALE == KQUANT ? 0 : lane.chunk * RECORD);
    read_words<SCALE == KQUANT ? 4 : 1>(tile + row * PITCH, at, false, head);
#endif
#pragma unroll
    for (int s = 0; s < SUBS; ++s) {
        const u32 value = raw.value[r][s];
        float scale, offset = 0;
        if (SCALE == ABSMAX) scale = __uint_as_float(value);
        if (SCALE == NESTED) scale = __fadd_rn(__fmul_rn(__ldg(p.map + value), raw.outer[r][s]), __ldg(p.constant));
        if (SCALE == E8M0) scale = e8m0_to_float(value);
        if (SCALE == E4M3) scale = __fmul_rn(e4m3_to_float(value), __ldg(p.constant));
        if (SCALE == HALF || SCALE == HALF_MIN) scale = half_to_float(head[0] & 0xFFFF);
        if (SCALE == HALF_MIN) offset = half_to_float(head[0] >> 16);
        if (SCALE == RECORD_E8M0) scale = e8m0_to_float(head[0] & 255);
        if (SCALE == KQUANT) {
            // fp16 d and dmin; then bytes: four low scales, four low mins, four pairs of nibbles. Blocks 4..7 have 4 bits
            // in a nibble (scale low, min high) and two on top of the six of blocks 0..3.
            const int block = lane.chunk / 2 * 2 + s, shift = 8 * (block & 3);
            const u32 low = head[1] >> shift & 255, low_min = head[2] >> shift & 255, both = head[3] >> shift & 255;
            const u32 six = block < 4 ? low & 63 : (both & 15) | (low >> 2 & 48);
            const u32 six_min = block < 4 ? low_min & 63 : both >> 4 | (low_min >> 2 & 48);
            scale = __fmul_rn(half_to_float(head[0] & 0xFFFF), (float)six);
            offset = -__fmul_rn(half_to_float(head[0] >> 16), (float)six_min);
        }
        if (GROUPED) {
            const int second = lane.group & 1, nibble = LAYOUT == WORDS_N ? awq_nibble(r) + 2 * second : r + 4 * second;
            scale = SCALE == GROUP_BF16 ? bfloat_to_float(value) : half_to_float(value);
            offset = -__fmul_rn(scale, (float)((raw.zeros[s] >> (4 * nibble) & 15) + ZERO_BASE));
        }
        const int start = span_start(p, e, s);
        const bool there = start < 32 && k + start < p.k;
        result.scale[s] = there ? scale : 0;
        result.offset[s] = there ? offset : 0;
        result.border = start;
    }
    return result;
}

// ---- arithmetic

// The warp's TILE_K columns of x in fp32, zeros beyond M and K.
DEVICE void stage_x(const Problem& p, const Lane& lane, int k0, float* to) {
#pragma unroll
    for (int start = 0; start < M_ROWS * CHUNKS * 8; start += 32) {
        const int i = start + lane.index, m = i / (CHUNKS * 8), quad = i % (CHUNKS * 8), k = k0 + 4 * quad;
        if (M_ROWS * CHUNKS * 8 % 32 && m >= M_ROWS) break;
        const long long at = m * p.x_stride + k;
        float4 x = make_float4(0, 0, 0, 0);
        if (m < p.m && k < p.k) {
            if (p.x_in_quads && k + 4 <= p.k) {
                x = load_four(p.x, at);
            } else {
                x.x = load_one(p.x, at);
                if (k + 1 < p.k) x.y = load_one(p.x, at + 1);
                if (k + 2 < p.k) x.z = load_one(p.x, at + 2);
                if (k + 3 < p.k) x.w = load_one(p.x, at + 3);
            }
        }
        *(float4*)(to + m * X_ROW + quad / 8 * X_CHUNK + quad % 8 * 4) = x;
    }
}

// The table's value of a nibble (a constant) of a word. `table`: address of the lane's bank; bits 7..10 are zero.
DEVICE float entry(u32 table, u32 word, int nibble) {
    const u32 code = nibble < 2 ? word << (7 - 4 * nibble) : word >> (4 * nibble - 7);
    return constant_at((code & 0x780) | table);
}

// A value of half h of word j of a row, the chunk's weight at `at`, times its scale, plus its offset.
DEVICE float scaled(float value, const Scales& s, int j, int h, int at) {
    if (STRADDLE) return value * (at < s.border ? s.scale[0] : s.scale[SUBS - 1]);
    const int sub = SCALE == KQUANT ? h : j * SUBS / 4;
    return HAS_OFFSET ? fmaf(value, s.scale[sub], s.offset[sub]) : value * s.scale[sub];
}

DEVICE void multiply(const Problem& p, const Lane& lane, int k0, const u8* tile, const Raw& raw, const float* x, u32 table,
                     float (&sum)[ROWS][M_ROWS]) {
    u32 words[ROWS][4];
    load_chunk(p, lane, k0, tile, words);
    Scales scales[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) scales[r] = scales_of(p, lane, k0, tile, raw, r);
#pragma unroll
    for (int half = 0; half < 8; ++half) {
        const int j = half / 2, h = half % 2;
        float weight[ROWS][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = 4 * half + i;
#if LAYOUT == WORDS_N
            const u8* line = tile + LINE_AT(32 * lane.chunk) + at * 32;
            const u32 columns = *(const u32*)(line + lane.group / 2 * 4) >> (8 * (lane.group & 1));
#endif
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#if LAYOUT == WORDS_N
                const float value = entry(table, columns, awq_nibble(r));
#else
                const float value = entry(table, words[r][j], nibble_of(h, i));
#endif
                weight[r][i] = scaled(value, scales[r], j, h, at);
            }
        }
#pragma unroll
        for (int m = 0; m < M_ROWS; ++m) {
            const float4 four = *(const float4*)(x + m * X_ROW + x_quad(lane.chunk, j, h));
            const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int r = 0; r < ROWS; ++r) sum[r][m] = fmaf(weight[r][i], values[i], sum[r][m]);
        }
    }
}

DEVICE void store(const Problem& p, int m, int n, float y) {
    const long long at = (long long)m * p.n + n;
    if (p.bias) y += p.bias_is_fp32 ? __ldg((const float*)p.bias + n) : load_one(p.bias, n);
    if (X_TYPE == 2)
        ((float*)p.out)[at] = y;
    else
        ((u16*)p.out)[at] = X_TYPE == 1 ? float_to_bfloat(y) : float_to_half(y);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) codebook_gemv(const __grid_constant__ Problem p) {
    DYNAMIC_SHARED(memory);
    const int index = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Lane lane = {(int)blockIdx.x * TILE_ROWS, index, index / GROUPS, index % GROUPS};
    u8* begin = (u8*)memory + (-shared_address(memory) & (TABLE_BYTES - 1));
    float* table = (float*)begin;    // [16][32], aligned to its size
    u8* ring = begin + TABLE_BYTES + warp * WARP_BYTES;
    float* x = (float*)(ring + STAGES * TILE_BYTES);
    const int first = warp * TILE_K, step = WARPS * TILE_K;

#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        copy_tile(p, lane, first + s * step, ring + s * TILE_BYTES);
        copies_commit();
    }
    Raw raw, next;
    load_raw(p, lane, first, raw);
    for (int i = threadIdx.x; i < TABLE_BYTES / 4; i += THREADS) table[i] = p.codebook[i / 32];
    const u32 lane_table = shared_address(table + index);
    __syncthreads();

    float sum[ROWS][M_ROWS] = {};
    int reading = 0, writing = STAGES - 1;    // slots of the ring
    for (int k0 = first; k0 < p.k; k0 += step) {
        __syncwarp();    // all lanes have read the slot and the x that are written now
        copy_tile(p, lane, k0 + (STAGES - 1) * step, ring + writing * TILE_BYTES);
        copies_commit();
        stage_x(p, lane, k0, x);
        copies_wait<STAGES - 1>();
        __syncwarp();
        load_raw(p, lane, k0 + step, next);
        multiply(p, lane, k0, ring + reading * TILE_BYTES, raw, x, lane_table, sum);
        raw = next;
        reading = reading + 1 == STAGES ? 0 : reading + 1;
        writing = writing + 1 == STAGES ? 0 : writing + 1;
    }

    __syncthreads();                                 // all warps are done with the tiles that their sums replace
    float* sums = table + TABLE_BYTES / 4;           // [warp][m][row]
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int m = 0; m < M_ROWS; ++m) {
#pragma unroll
            for (int other = GROUPS; other < 32; other *= 2) sum[r][m] += __shfl_xor_sync(0xFFFFFFFFu, sum[r][m], other);
            if (lane.chunk == 0) sums[(warp * M_ROWS + m) * TILE_ROWS + row_in_tile(lane.group, r)] = sum[r][m];
        }
    __syncthreads();
    for (int i = threadIdx.x; i < M_ROWS * TILE_ROWS; i += THREADS) {
        const int m = i / TILE_ROWS, n = lane.n0 + i % TILE_ROWS;
        if (m >= p.m || n >= p.n) continue;
        float y = 0;
        for (int w = 0; w < WARPS; ++w) y += sums[w * M_ROWS * TILE_ROWS + i];
        store(p, m, n, y);
    }
}
