// From codes to A fragments of mma.m16n8k16 (and of wgmma, of which each warp has 16 rows): by a table of pairs.

template <int OFFSET>
DEVICE u32 table_word(u32 address) {
    u32 d;
    asm volatile("ld.shared.u32 %0, [%1 + %2];" : "=r"(d) : "r"(address), "n"(OFFSET));
    return d;
}

// Lane group g of a warp owns rows row_of(g) and row_of(g) + 8 of a tile: even rows first, which keeps the swizzled codes
// free of bank conflicts.
DEVICE int row_of(int g) { return g < 4 ? 2 * g : 2 * g - 7; }

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

// Entries of the table are 128 bytes apart, one copy a bank; where there is room, 256, so that one PRMT makes an address.
#ifndef TABLE_PITCH
#define TABLE_PITCH 128
#endif

// The A fragment of step `step` of the four of a unit, by the table: two bytes of each of two words, in the order of memory.
// `bank` holds what an entry's address is beside the entry's place, but the table's offset.
template <int OFFSET>
DEVICE void decode(const u32 (&word)[2][2], int step, u32 bank, u32 (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 w = word[i & 1][step >> 1];
        const int byte = 2 * (step & 1) + (i >> 1);
#if TABLE_PITCH == 256
        a[i] = table_word<OFFSET>(__byte_perm(w, bank, 0x5504 | byte << 4));
#else
        a[i] = table_word<OFFSET>((byte == 0 ? w << 7 : w >> (8 * byte - 7)) & 0x7F80 | bank);
#endif
    }
}

// A warp's share of the table, if so many build it: its pairs of weights, one copy a bank.
template <int BUILDERS>
DEVICE void build_table(const Codebook& codebook, u32 base, int warp, int lane) {
    constexpr int entries = 256 / BUILDERS;
    const int entry = warp * entries + lane % entries;
    const int first = HIGH_FIRST ? entry >> 4 : entry & 15, second = HIGH_FIRST ? entry & 15 : entry >> 4;
    const u32 pair = codebook.high[first] | (u32)codebook.high[second] << 16;
    const u32 low = codebook.low[first] | (u32)codebook.low[second] << 16;
#pragma unroll
    for (int i = 0; i < entries; ++i) {
        const u32 at = base + (warp * entries + i) * TABLE_PITCH + lane * 4;
        sts32(at, __shfl_sync(~0u, pair, i));
        if (TERMS == 2) sts32(at + 32768, __shfl_sync(~0u, low, i));
    }
}
