// kernels/cuda/codebook_gemv.cu as a library for the CPU; compiled by tests/gemv_on_cpu.py with the kernel's macros.
#include "cuda_on_cpu.hpp"
#include "codebook_gemv.cu"

extern "C" const char* run_on_cpu(const Problem* problem, int blocks, int threads, int shared_bytes, int order,
                                  const cuda_on_cpu::Range* ranges, int range_count) {
    if (threads != THREADS || shared_bytes != SHARED_BYTES) return "the launcher and the kernel disagree about their sizes";
    auto body = [](const void* argument) { codebook_gemv(*static_cast<const Problem*>(argument)); };
    return cuda_on_cpu::run_grid(body, problem, blocks, threads, shared_bytes, order, ranges, range_count);
}
