// Part of codebook_mma.cu: x, from memory to B fragments.

// A lane's B fragments of a group of 8 rows of x in one unit, in the order in which codes are decoded.
struct Activations {
    u32 word[8 * X_TERMS];
    float unscale[2];    // of the two columns of a lane's sums
};

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
        from += TEAM * UNIT * X_BYTES;
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
        from += TEAM * UNIT * X_BYTES;
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
