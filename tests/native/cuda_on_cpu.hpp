// Just enough of CUDA C++ to run a kernel's own source on a CPU, one thread block at a time, in tests.
//
// Every CUDA thread is a fibre that runs until it meets a barrier; then the next one runs, in an order that the caller
// chooses, so that a missing barrier shows. Checked on the way, with words for what is wrong: global reads lie within the
// given tensors and are aligned, all lanes of a warp (all threads of a block) meet at the same barrier, nobody writes
// beyond the block's shared memory. Reads are checked where a kernel uses __ldg or an asynchronous copy; for plain ones
// compile with the address sanitizer. Shared memory whose size is set at launch starts as NaNs; a __shared__ array of fixed
// size holds what the block before left there. Asynchronous copies arrive as late as they may, when they are waited for;
// until then their destination holds rubbish.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define CUDA_ON_CPU 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static    // blocks run one after the other
#define threadIdx (cuda_on_cpu::now.thread)
#define blockIdx (cuda_on_cpu::now.block)
#define gridDim (cuda_on_cpu::now.grid)
#define DYNAMIC_SHARED(name) uint4* name = reinterpret_cast<uint4*>(cuda_on_cpu::now.shared)

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

namespace cuda_on_cpu {

constexpr unsigned SHARED_BASE = 1024;    // where a block's own shared memory begins on sm_90

struct Index {
    unsigned x, y, z;
};

struct Now {    // the thread that runs
    Index thread, block, grid;
    char* shared;
    unsigned shared_bytes;
    unsigned* exchanged;    // by shuffles: one word a thread
};
extern Now now;

struct Range {    // of global memory that may be read
    const char* begin;
    long long bytes;
};

// Runs a grid; returns what went wrong, or an empty text. order 0: threads take turns upwards, 1: downwards.
const char* run_grid(void (*body)(const void*), const void* argument, int blocks, int threads, unsigned shared_bytes, int order,
                     const Range* ranges, int range_count);

[[noreturn]] void fail(const char* what);
void wait_for_warp();
void wait_for_block();
void check_read(const void* from, unsigned bytes);
void copy_later(void* to, const void* from, unsigned bytes);
void commit_copies();
void finish_copies(unsigned left);

}    // namespace cuda_on_cpu

template <class T>
T __ldg(const T* from) {
    cuda_on_cpu::check_read(from, sizeof(T));
    return *from;
}

inline void __syncwarp() { cuda_on_cpu::wait_for_warp(); }
inline void __syncthreads() { cuda_on_cpu::wait_for_block(); }

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

namespace cuda_on_cpu {

// What lane `from` of the warp holds.
inline float exchange(unsigned mask, float value, unsigned from) {
    if (mask != 0xFFFFFFFF) fail("a shuffle among some lanes only");
    const unsigned thread = now.thread.x;
    now.exchanged[thread] = __float_as_uint(value);
    wait_for_warp();
    const float result = __uint_as_float(now.exchanged[thread / 32 * 32 + from]);
    wait_for_warp();
    return result;
}

}    // namespace cuda_on_cpu

inline float __shfl_xor_sync(unsigned mask, float value, int other) {
    return cuda_on_cpu::exchange(mask, value, threadIdx.x % 32 ^ other);
}

inline float __shfl_down_sync(unsigned mask, float value, int step) {    // past the end, a lane keeps its own
    const unsigned lane = threadIdx.x % 32;
    return cuda_on_cpu::exchange(mask, value, lane + step < 32 ? lane + step : lane);
}

inline float __fmul_rn(float a, float b) { return a * b; }    // compiled without contraction
inline float __fadd_rn(float a, float b) { return a + b; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline int min(int a, int b) { return a < b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- what kernels do in PTX

inline float half_to_float(unsigned bits) {
    const unsigned magnitude = bits & 0x7FFF, sign = (bits & 0x8000) << 16;
    if (magnitude >= 0x7C00) return __uint_as_float(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 13) * 0x1p112f));
}

inline std::uint16_t float_to_half(float value) {    // to nearest, ties to even
    const unsigned sign = __float_as_uint(value) >> 16 & 0x8000;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return 0x7FFF;
    if (magnitude == 0) return static_cast<std::uint16_t>(sign);
    if (magnitude >= 65520.f) return static_cast<std::uint16_t>(sign | 0x7C00);
    int exponent;
    std::frexp(magnitude, &exponent);    // magnitude is in [2^(exponent - 1), 2^exponent)
    if (exponent < -13) exponent = -13;  // below 2^-14 the step stays 2^-24
    const float steps = std::nearbyint(std::ldexp(magnitude, 11 - exponent));
    return static_cast<std::uint16_t>(sign | (static_cast<unsigned>(steps) + (static_cast<unsigned>(exponent + 13) << 10)));
}

inline unsigned shared_address(const void* place) {
    return static_cast<unsigned>(static_cast<const char*>(place) - cuda_on_cpu::now.shared) + cuda_on_cpu::SHARED_BASE;
}

inline float constant_at(unsigned address) {
    const unsigned at = address - cuda_on_cpu::SHARED_BASE;
    if (at + 4 > cuda_on_cpu::now.shared_bytes || at % 4) cuda_on_cpu::fail("shared read outside or not aligned");
    float value;
    std::memcpy(&value, cuda_on_cpu::now.shared + at, 4);
    return value;
}

template <int BYTES>
void copy_async(void* to, const void* from) {
    if (shared_address(to) % BYTES) cuda_on_cpu::fail("destination of a copy is not aligned");
    cuda_on_cpu::copy_later(to, from, BYTES);
}

inline void copies_commit() { cuda_on_cpu::commit_copies(); }

template <int LEFT>
void copies_wait() {
    cuda_on_cpu::finish_copies(LEFT);
}
