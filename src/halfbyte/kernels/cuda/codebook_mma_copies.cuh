// Part of codebook_mma.cu: codes and scales, from memory to the ring.

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
