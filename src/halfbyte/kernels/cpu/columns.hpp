// COLUMNS: lanes along N, for words of eight (GPTQ, AWQ). A strip is eight vectors of columns; a group's partial sums
// get their scale and offset once. As in UNITS, each output is the same chain of operations whatever m is.
#pragma once
#include "decode.hpp"
#include "job.hpp"

namespace halfbyte::HB_ISA {

constexpr int STRIP = 8 * Simd::LANES;

struct Strip {
    const HbWeight &w;
    int64_t first, count;  // columns, count <= STRIP
    int inverse[8];        // which weight of a word a nibble holds

    Strip(const HbWeight &w, int64_t task) : w(w), first(task * STRIP), count(smaller(STRIP, w.n - first)) {
        for (int i = 0; i < 8; ++i) inverse[w.order[i]] = i;
    }
    // Column, counted from `first`, of a lane of a vector.
    HB_INLINE int64_t column(int vector, int lane) const {
        return w.layout == HB_WORDS_K ? vector * Simd::LANES + lane : lane * 8 + inverse[vector];
    }
    // Scales and offsets of a group, [8][LANES] each, in the order of the vectors; zeros beyond the last column.
    void scales(int64_t group, float *scale, float *offset) const {
        if (w.layout == HB_WORDS_K) {
            read_group(w, group, first, count, scale, offset);
            for (int64_t i = count; i < STRIP; ++i) scale[i] = offset[i] = 0;
            return;
        }
        float plain[2][STRIP] = {};
        read_group(w, group, first, count, plain[0], plain[1]);
        for (int v = 0; v < 8; ++v)
            for (int lane = 0; lane < Simd::LANES; ++lane) {
                scale[v * Simd::LANES + lane] = plain[0][column(v, lane)];
                offset[v * Simd::LANES + lane] = plain[1][column(v, lane)];
            }
    }
};

// Words along K: adds k [begin, end) of V vectors of columns, all eight nibbles of each word.
template <int V, int M> struct AlongK {
    Simd::F part[V][M];

    template <int NIBBLE> HB_INLINE void multiply(const Simd::Codes *words, const Simd::Table &table, const float *x) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const Simd::F w = Simd::template lookup<NIBBLE>(words[v], table);
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m)
                part[v][m] = Simd::mul_add(w, Simd::set(x[NIBBLE * M + m]), part[v][m]);
        }
        if constexpr (NIBBLE < 7) multiply<NIBBLE + 1>(words, table, x);
    }

    template <int> HB_INLINE void add(const Strip &strip, int set, const Simd::Table &table, const float *x,
                                      int64_t begin, int64_t end) {
        int filled[V];
        for (int v = 0; v < V; ++v)
            filled[v] = int(larger(0, smaller(Simd::LANES, strip.count - (set * V + v) * Simd::LANES)));
        const uint8_t *at = bytes(strip.w.codes) + (begin / 8 * strip.w.n + strip.first + set * V * Simd::LANES) * 4;
        for (int64_t k = begin; k < end; k += 8, at += strip.w.n * 4) {
            Simd::Codes words[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                words[v] = Simd::load_words(at + v * Simd::LANES * 4, filled[v]);
                Simd::prefetch(at + v * Simd::LANES * 4 + 8 * strip.w.n * 4);
            }
            multiply<0>(words, table, x + k * M);
        }
    }
};

// Words along N: adds k [begin, end) of nibbles [SET * V, SET * V + V) of the strip's words.
template <int V, int M> struct AlongN {
    Simd::F part[V][M];

    template <int NIBBLE, int FIRST>
    HB_INLINE void multiply(const Simd::Codes &words, const Simd::Table &table, const float *x) {
        const Simd::F w = Simd::template lookup<NIBBLE>(words, table);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
            part[NIBBLE - FIRST][m] = Simd::mul_add(w, Simd::set(x[m]), part[NIBBLE - FIRST][m]);
        if constexpr (NIBBLE + 1 < FIRST + V) multiply<NIBBLE + 1, FIRST>(words, table, x);
    }

    template <int SET> HB_INLINE void add(const Strip &strip, int, const Simd::Table &table, const float *x,
                                          int64_t begin, int64_t end) {
        const int filled = int(strip.count / 8);
        const int64_t stride = strip.w.n / 8 * 4;
        const uint8_t *at = bytes(strip.w.codes) + begin * stride + strip.first / 8 * 4;
        for (int64_t k = begin; k < end; ++k, at += stride) {
            const Simd::Codes words = Simd::load_words(at, filled);
            Simd::prefetch(at + 16 * stride);
            multiply<SET * V, SET * V>(words, table, x + k * M);
        }
    }
};

// One group of k for the vectors of set SET and the sets after it; totals [8][M][LANES].
template <template <int, int> class Along, int M, int SET>
void add_group(const Strip &strip, const Simd::Table &table, const float *x, const float *sums, int64_t group,
               const float *scale, const float *offset, float *totals) {
    constexpr int V = 8 / M;
    Along<V, M> a;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) a.part[v][m] = Simd::zero();
    a.template add<SET>(strip, SET, table, x, group * strip.w.blocksize, (group + 1) * strip.w.blocksize);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const int vector = SET * V + v;
            float *at = totals + (vector * M + m) * Simd::LANES;
            const Simd::F moved = Simd::fused(Simd::load(offset + vector * Simd::LANES),
                                              Simd::set(sums[group * M + m]), Simd::load(at));
            Simd::store(at, Simd::fused(Simd::load(scale + vector * Simd::LANES), a.part[v][m], moved));
        }
    if constexpr (SET + 1 < M) add_group<Along, M, SET + 1>(strip, table, x, sums, group, scale, offset, totals);
}

template <int M> void strip_block(const Job &job, const Strip &strip, int64_t start, const float *scales) {
    const HbWeight &w = strip.w;
    const int64_t groups = w.k / w.blocksize;
    const float *x = job.x + start * (w.k + groups), *sums = x + M * w.k;
    const Simd::Table table = Simd::table(w.codebook);
    float totals[8 * M * Simd::LANES] = {};
    for (int64_t g = 0; g < groups; ++g) {
        const float *scale = scales + g * 2 * STRIP;
        if (w.layout == HB_WORDS_K)
            add_group<AlongK, M, 0>(strip, table, x, sums, g, scale, scale + STRIP, totals);
        else
            add_group<AlongN, M, 0>(strip, table, x, sums, g, scale, scale + STRIP, totals);
    }
    const HbCall &call = *job.call;
    for (int v = 0; v < 8; ++v)
        for (int lane = 0; lane < Simd::LANES; ++lane) {
            const int64_t column = strip.column(v, lane), n = strip.first + column;
            if (column >= strip.count) continue;
            for (int m = 0; m < M && start + m < call.m; ++m) {
                const float y = totals[(v * M + m) * Simd::LANES + lane] * job.factor[start + m];
                store_float(call.out, (start + m) * call.out_stride + n, y + bias_at(call, start + m, n), call.dtype);
            }
        }
}

// scratch: the scales and offsets of all groups of the strip.
inline void run_strip(const Job &job, int64_t task, float *scratch) {
    const Strip strip(*job.weight, task);
    for (int64_t g = 0; g < job.weight->k / job.weight->blocksize; ++g)
        strip.scales(g, scratch + g * 2 * STRIP, scratch + g * 2 * STRIP + STRIP);
    for (int64_t start = 0; start < job.call->m; start += Simd::MAX_M) {
        const int m = block_rows(job.call->m - start, Simd::MAX_M);
        if (m == 1) strip_block<1>(job, strip, start, scratch);
        if (m == 2) strip_block<2>(job, strip, start, scratch);
        if (m == 4) strip_block<4>(job, strip, start, scratch);
        if constexpr (Simd::MAX_M == 8)
            if (m == 8) strip_block<8>(job, strip, start, scratch);
    }
}

}  // namespace halfbyte::HB_ISA
