// What LoRA adapters add to a kernel's outputs, each row of x with its own: scaling * B h, h = A x from adapters_shrink.cu.

struct Expand {
    const float* shrunk;      // [m, width]: h
    const void* b;            // a slot's B is [n, stride] from element first * n on; null where there are no adapters
    const int4* table;        // a slot's first column of h, rank, first, stride
    const float* scalings;    // of each slot
    const int* index;         // each row's slot, none where that is out of range; null: all take slot 0
    int width, slots;
    int b_type;               // 0 fp16, 1 bf16, 2 fp32
};

// Number i of a word of two.
static __device__ __forceinline__ float half_of_b(int type, unsigned word, int i) {
    if (type == 1) return __uint_as_float(i ? word & 0xFFFF0000u : word << 16);
    float value;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(i ? word >> 16 : word & 0xFFFFu));
    return value;
}

static __device__ __forceinline__ float number_of_b(const Expand& e, long long at) {
    return e.b_type == 2 ? ((const float*)e.b)[at] : half_of_b(e.b_type, ((const unsigned short*)e.b)[at], 0);
}

// A warp sends for the rows row0 .. row0 + rows - 1 of B of all slots that m rows of x take: into the L2, so that outputs need
// not wait for memory. Not inlined, as it would cost the main loop registers.
static __device__ __noinline__ void prefetch_rows(const Expand& e, int m, int row0, int rows, int outputs) {
    const int lane = threadIdx.x & 31, size = e.b_type == 2 ? 4 : 2;
    rows = min(rows, outputs - row0);
    for (int first = 0; first < m; first += 32) {
        int slot = first + lane >= m ? -1 : e.index ? e.index[first + lane] : 0;
        if ((unsigned)slot >= (unsigned)e.slots) slot = -1;
        const int4 at = slot < 0 ? make_int4(0, 0, 0, 0) : e.table[slot];
        const unsigned alike = __match_any_sync(~0u, slot);    // asked by all lanes
        unsigned left = __ballot_sync(~0u, slot >= 0 && __ffs(alike) == lane + 1);    // each slot once
        for (; left; left &= left - 1) {
            const int from = __ffs(left) - 1, place = __shfl_sync(~0u, at.z, from), stride = __shfl_sync(~0u, at.w, from);
            const char* begin = (const char*)e.b + ((long long)place * outputs + (long long)row0 * stride) * size;
            const long long bytes = (long long)rows * stride * size;
            for (long long line = lane * 128; line < bytes; line += 32 * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(begin + line));
        }
    }
}

// What is added to output n of rows m, m + step, m + 2 step ... of x (those from `rows` on are nobody's), of a weight with
// `outputs` rows. A sum runs over the ranks in their order, so it has the same bits in every kernel and whatever the other
// rows take. Rows without an adapter get -0, which changes no bit of what it is added to. A thread reads what other kernels
// wrote, so it has waited for them itself.
template <int COUNT>
static __device__ __forceinline__ void expand_rows(const Expand& e, int m, int step, int rows, int n, int outputs, float (&added)[COUNT]) {
    int rank[COUNT];
    const float* h[COUNT];
    long long b[COUNT];    // where its row of B is
    int slot[COUNT], most = 0;
    bool same = true, aligned = e.b_type != 2;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) slot[i] = m + i * step >= rows ? -1 : e.index ? e.index[m + i * step] : 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int4 at = (unsigned)slot[i] < (unsigned)e.slots ? e.table[slot[i]] : make_int4(0, 0, 0, 0);
        rank[i] = at.y;
        h[i] = e.shrunk + (long long)(m + i * step) * e.width + at.x;
        b[i] = (long long)at.z * outputs + (long long)n * at.w;
        same &= slot[i] == slot[0];
        aligned &= (((unsigned long long)h[i] | (unsigned long long)e.b + 2 * b[i]) & 15) == 0;
        most = max(most, rank[i]);
        added[i] = 0.f;
    }
    if (aligned)
#pragma unroll 1
        for (int r = 0; r + 8 <= most; r += 8) {
            uint4 word[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                word[i] = word[0];
                if ((i == 0 || !same) && r + 8 <= rank[i]) word[i] = *(const uint4*)((const unsigned short*)e.b + b[i] + r);
            }
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if (r + 8 > rank[i]) continue;
                const unsigned pairs[4] = {word[i].x, word[i].y, word[i].z, word[i].w};
#pragma unroll
                for (int quad = 0; quad < 2; ++quad) {
                    const float4 four = *(const float4*)(h[i] + r + 4 * quad);
                    added[i] = fmaf(half_of_b(e.b_type, pairs[2 * quad], 0), four.x, added[i]);
                    added[i] = fmaf(half_of_b(e.b_type, pairs[2 * quad], 1), four.y, added[i]);
                    added[i] = fmaf(half_of_b(e.b_type, pairs[2 * quad + 1], 0), four.z, added[i]);
                    added[i] = fmaf(half_of_b(e.b_type, pairs[2 * quad + 1], 1), four.w, added[i]);
                }
            }
        }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll 1
        for (int r = aligned ? rank[i] & ~7 : 0; r < rank[i]; ++r) added[i] = fmaf(number_of_b(e, b[i] + r), h[i][r], added[i]);
        added[i] = rank[i] > 0 ? __fmul_rn(e.scalings[slot[i]], added[i]) : -0.f;
    }
}
