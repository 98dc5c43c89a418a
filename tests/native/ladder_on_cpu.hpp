// Enough of CUDA to run the ladder's kernels on a CPU: each thread of a block is a fiber, blocks run one after the other.
// A fiber runs until it waits; a round in which all wait and nothing moves means that a barrier is not reached by all.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __shared__ static

using std::min;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct Index {
    unsigned x;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

inline Index threadIdx, blockIdx, gridDim;

typedef unsigned short half_bits;

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float widen(half_bits value) {
    const unsigned magnitude = value & 0x7fff, sign = unsigned(value & 0x8000) << 16;
    if (magnitude >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    const float scaled = __uint_as_float(magnitude << 13) * 0x1p112f;  // subnormal numbers, too
    return sign ? -scaled : scaled;
}

// To the nearest, ties to even.
inline half_bits narrow(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    const unsigned sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;
    if (magnitude < 0x38800000) {  // adding 2^-1 leaves multiples of 2^-24 in the low bits
        const float shifted = __uint_as_float(magnitude) + 0.5f;
        std::memcpy(&bits, &shifted, 4);
        return sign | (bits - 0x3f000000);
    }
    const unsigned rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return sign | ((rounded - 0x38000000) >> 13);
}

namespace on_cpu {

constexpr int WARP = 32;
constexpr std::size_t STACK = 64 << 10;

struct Barrier {
    int size, arrived = 0;
    long turn = 0;
};

inline ucontext_t scheduler;
inline std::vector<ucontext_t> fibers;
inline std::vector<bool> done;
inline std::vector<Barrier> warps;
inline Barrier block;
inline std::vector<float> exchanged;
inline std::function<void()> body;
inline bool moved;

inline void wait(Barrier& barrier) {
    const unsigned self = threadIdx.x;
    const long turn = barrier.turn;
    moved = true;
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        ++barrier.turn;
        return;
    }
    while (barrier.turn == turn) swapcontext(&fibers[self], &scheduler);
}

inline void start() {
    body();
    done[threadIdx.x] = true;
    moved = true;
    setcontext(&scheduler);
}

// Runs `kernel` for `blocks` blocks of `threads` threads.
inline void run(int blocks, int threads, std::function<void()> kernel) {
    body = std::move(kernel);
    std::vector<char> stacks(threads * STACK);
    gridDim.x = blocks;
    for (int b = 0; b < blocks; ++b) {
        fibers.assign(threads, {});
        done.assign(threads, false);
        warps.assign(threads / WARP, {WARP});
        block = {threads};
        exchanged.assign(threads, 0);
        for (int t = 0; t < threads; ++t) {
            getcontext(&fibers[t]);
            fibers[t].uc_stack.ss_sp = stacks.data() + t * STACK;
            fibers[t].uc_stack.ss_size = STACK;
            makecontext(&fibers[t], start, 0);
        }
        blockIdx.x = b;
        while (std::count(done.begin(), done.end(), false)) {
            moved = false;
            for (int t = 0; t < threads; ++t)
                if (!done[t]) {
                    threadIdx.x = t;
                    swapcontext(&scheduler, &fibers[t]);
                }
            if (!moved) {
                std::fprintf(stderr, "block %d: threads wait at a barrier that others do not reach\n", b);
                std::exit(3);
            }
        }
    }
}

}  // namespace on_cpu

inline void __syncthreads() { on_cpu::wait(on_cpu::block); }

inline float __shfl_down_sync(unsigned mask, float value, int step) {
    const int self = threadIdx.x, lane = self % on_cpu::WARP;
    if (mask != 0xffffffff) std::exit(4);
    on_cpu::exchanged[self] = value;
    on_cpu::wait(on_cpu::warps[self / on_cpu::WARP]);
    const float other = lane + step < on_cpu::WARP ? on_cpu::exchanged[self + step] : value;
    on_cpu::wait(on_cpu::warps[self / on_cpu::WARP]);
    return other;
}
