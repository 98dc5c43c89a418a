// Single instructions of kernels that multiply with wgmma: weights from registers, COLUMNS rows of x from shared memory.

DEVICE void bulk_copy(const void* from, u32 to, u32 bytes, u32 full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(full) : "memory");
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// Rows of x in shared memory, 128 bytes each, as wgmma describes them: chunks of 16 bytes swizzled by row, 8 rows in 1024 bytes.
// These are the lower 32 bits; the others are always the same.
DEVICE u32 descriptor(u32 address) { return address >> 4 & 0x3FFF | 1 << 16; }
#define WHOLE_DESCRIPTOR(low) ".reg .b64 b; mov.b64 b, {" low ", 0x40000040};\n"

// d = a * b, or d += a * b: 64 rows of W, COLUMNS rows of x, 16 k.
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define A_AND_B "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(more)
DEVICE void wgmma(float (&d)[SUMS], const u32 (&a)[4], u32 b, int more) {
#if COLUMNS == 16
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0;\n" WHOLE_DESCRIPTOR("%12")
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, b, p, 1, 1, 0; }"
                 : D4(0), D4(4) : A_AND_B);
#elif COLUMNS == 32
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0;\n" WHOLE_DESCRIPTOR("%20")
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, b, p, 1, 1, 0; }"
                 : D4(0), D4(4), D4(8), D4(12) : A_AND_B);
#elif COLUMNS == 64
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n" WHOLE_DESCRIPTOR("%36")
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, b, p, 1, 1, 0; }"
                 : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28) : A_AND_B);
#elif COLUMNS == 128
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n" WHOLE_DESCRIPTOR("%68")
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
                 "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, b, p, 1, 1, 0; }"
                 : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28), D4(32), D4(36), D4(40), D4(44),
                   D4(48), D4(52), D4(56), D4(60) : A_AND_B);
#elif COLUMNS == 256
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %133, 0;\n" WHOLE_DESCRIPTOR("%132")
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
                 "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, "
                 "%71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, "
                 "%94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, "
                 "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                 "{%128, %129, %130, %131}, b, p, 1, 1, 0; }"
                 : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28), D4(32), D4(36), D4(40), D4(44),
                   D4(48), D4(52), D4(56), D4(60), D4(64), D4(68), D4(72), D4(76), D4(80), D4(84), D4(88), D4(92),
                   D4(96), D4(100), D4(104), D4(108), D4(112), D4(116), D4(120), D4(124) : A_AND_B);
#else
#error "COLUMNS is 16, 32, 64, 128 or 256"
#endif
}
