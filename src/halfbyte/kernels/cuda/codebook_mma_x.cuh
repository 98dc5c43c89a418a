// Part of codebook_mma.cu: x, from memory to B fragments.

// A lane's B fragments of a group of 8 rows of x in one unit, in the order in which codes are decoded.
struct Activations {
    u32 word[8 * X_TERMS];
    float unscale[2];    // of the two columns of a lane's sums
};

// A unit's x in B fragments. Scaling brings the largest of each row to 2^14: bf16's 8 bits then fit fp16 exactly, and fp32's
// 24 bits fit two fp16 numbers to 22. x is fetched while units before are multiplied.
//
// A warp's units follow one another, pass after pass the same: `next` sends for the X_GROUP units that come next, `finish` has
// them in the warp's buffer.
struct Sequence {
    u32 from;    // of a lane, in a row of x and the first unit of a pass: bytes
    u32 buffer;
    int ahead;    // the number in a pass of the unit that is sent for next

    METHOD Sequence(u32 from, u32 buffer) : from(from), buffer(buffer), ahead(0) {}

    // Where the lane's part of what is sent for next is in the first row of x; null beyond K.
    METHOD const char* step(const Problem& p) {
        const Share share = share_of(p);
        const u32 at = from + ahead * (TEAM * UNIT * X_BYTES);
        ahead = ahead + X_GROUP < share.stages / TEAMS ? ahead + X_GROUP : 0;
        return at < share.unit_end * (UNIT * X_BYTES) ? (const char*)p.x + at : nullptr;
    }
};
#if X_STAGED
struct Fetch : Sequence {    // by asynchronous copies, as it is in memory
    METHOD Fetch(u32 buffer, int unit, int) : Sequence(unit * UNIT * X_BYTES, buffer) {}

    METHOD void next(const Problem& p) {    // all lanes have read what was there
        constexpr int chunks = UNIT * X_BYTES / 16;    // of a row
        const int lane = this_thread() & 31;
        const char* unit = step(p);
        if (unit == nullptr) return;
#pragma unroll
        for (int i = 0; i < GROUPS * X_ROWS * chunks; i += 32) {
            const int row = (i + lane) / chunks, chunk = (i + lane) % chunks;
            if (i + 32 > GROUPS * X_ROWS * chunks && row >= GROUPS * X_ROWS) continue;
            const char* at = unit + min(row, p.m - 1) * p.x_stride * X_BYTES + chunk * 16;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(buffer + row * X_PITCH + chunk * 16), "l"(at) : "memory");
        }
    }

    METHOD void finish() { asm volatile("cp.async.wait_all;" ::: "memory"); }

    METHOD void read(Activations (&x)[GROUPS], int, int lane) {
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
// By loads of 8 or 16 bytes a lane, which it scales when the units before have been multiplied and shares through the buffer: there a
// row of x in a unit has X_PITCH bytes, at the end of which lies what undoes its scaling.
struct Fetch : Sequence {
    static constexpr int lanes = 32 / X_LANE_WORDS, parts = X_GROUP * X_ROWS / X_LANE_WORDS;    // of a row in a unit; of a lane
    u32 word[parts][X_LANE_WORDS];

    METHOD Fetch(u32 buffer, int unit, int lane)
        : Sequence((unit + TEAM * (lane / (lanes * X_ROWS))) * UNIT * X_BYTES + lane % lanes * (4 * X_LANE_WORDS), buffer) {}

    METHOD void next(const Problem& p) {
        const int lane = this_thread() & 31;
        const char* unit = step(p);
        if (unit == nullptr) return;
#pragma unroll
        for (int i = 0; i < parts; ++i) {
            const int row = X_LANE_WORDS * i + lane / lanes % X_ROWS;
            const char* at = unit + (X_ROWS == 1 ? 0 : min(row, p.m - 1) * p.x_stride * X_BYTES);
            u32(&w)[X_LANE_WORDS] = word[i];
            if (X_LANE_WORDS == 2)
                asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(at));
            else
                asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[X_LANE_WORDS - 2]), "=r"(w[X_LANE_WORDS - 1]) : "l"(at));
        }
    }

    METHOD void finish() {    // all lanes have read what was there
        const int lane = this_thread() & 31;
#pragma unroll
        for (int i = 0; i < parts; ++i) {
            const u32 row = buffer + (X_LANE_WORDS * i + lane / lanes) * X_PITCH;
            u32(&w)[X_LANE_WORDS] = word[i];
#if X_TYPE == 1
            u32 top = 0;
#pragma unroll
            for (int j = 0; j < X_LANE_WORDS; ++j) top = max_bf16x2(top, w[j] & 0x7FFF7FFFu);
            const PowerOfTwo power = power_for<lanes>(magnitude(0, top));
#pragma unroll
            for (int j = 0; j < X_LANE_WORDS; ++j) w[j] = scaled_bf16x2(w[j], power.scale);
            if (lane % lanes == 0) sts32(row + UNIT * X_BYTES, power.inverse);
#endif
            const u32 at = row + lane % lanes * (4 * X_LANE_WORDS);
            if (X_LANE_WORDS == 2)
                asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(w[0]), "r"(w[1]) : "memory");
            else
                sts128(at, w[0], w[1], w[X_LANE_WORDS - 2], w[X_LANE_WORDS - 1]);
        }
    }

    METHOD void read(Activations (&x)[GROUPS], int place, int lane) {
        const u32 rows = buffer + place * X_ROWS * X_PITCH, at = rows + (lane >> 2) * X_PITCH + (lane & 3) * (BLOCK == 64 ? 32 : 16);
        u32(&word)[8] = x[0].word;
        if (lane >> 2 < X_ROWS)    // whose column of sums is somebody's
#pragma unroll
            for (int i = 0; i < 8; i += 4) lds128(at + i * (BLOCK == 64 ? 4 : 16), word[i], word[i + 1], word[i + 2], word[i + 3]);
#pragma unroll
        for (int c = 0; c < 2; ++c)    // a lane's sums are of rows 2q and 2q + 1
            x[0].unscale[c] = X_TYPE == 0 ? 1.f : __uint_as_float(lds32(rows + (2 * (lane & 3) + c) % X_ROWS * X_PITCH + UNIT * X_BYTES));
    }
};
#endif
