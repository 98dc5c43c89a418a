// Runs one kernel of the ladder on the CPU, and the reference. KERNEL, Q4 and the kernel's macros come from the compiler's
// command line; source.cu is the kernel as NVRTC gets it. Arguments: n k blocks order (see run_grid). Standard input: the
// weights' arrays and x; standard output: y in fp16, then the reference in double.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda_on_cpu.hpp"
#include "ladder_reference.hpp"

inline float widen(std::uint16_t bits) { return half_to_float(bits); }
inline std::uint16_t narrow(float value) { return float_to_half(value); }

#include "source.cu"

template <class T>
T* read(std::size_t count) {    // into memory of its own, so that the address sanitizer sees where it ends
    T* values = static_cast<T*>(std::aligned_alloc(16, (count * sizeof(T) + 15) / 16 * 16));
    if (std::fread(values, sizeof(T), count, stdin) != count) std::exit(2);
    return values;
}

// Runs `kernel`, whose x is in shared memory where ROWS is defined.
template <class Kernel>
void run(const Kernel& kernel, char** arguments) {
    const int k = std::atoi(arguments[2]), blocks = std::atoi(arguments[3]), order = std::atoi(arguments[4]);
#ifdef ROWS
    const unsigned shared_bytes = 2 * k;
#else
    const unsigned shared_bytes = 0;
#endif
    auto body = [](const void* argument) { (*static_cast<const Kernel*>(argument))(); };
    const char* error = cuda_on_cpu::run_grid(body, &kernel, blocks, THREADS, shared_bytes, order, nullptr, 0);
    if (!*error) return;
    std::fprintf(stderr, "%s\n", error);
    std::exit(3);
}

int main(int, char** arguments) {
    const int n = std::atoi(arguments[1]), k = std::atoi(arguments[2]);
    std::vector<half_bits> y(n, 0x7e00);
    std::vector<double> exact(n);
#if Q4
    const byte* codes = read<byte>(std::size_t(n) * k / 2);
    const half_bits* scales = read<half_bits>(std::size_t(n) * k / 32);
    const half_bits* x = read<half_bits>(k);
#ifdef ROWS
    run([&] { KERNEL(codes, scales, x, y.data(), k, n); }, arguments);
#else
    run([&] { KERNEL(codes, scales, x, y.data(), k); }, arguments);
#endif
    ladder::reference(codes, scales, x, exact.data(), n, k);
#else
    const half_bits* weights = read<half_bits>(std::size_t(n) * k);
    const half_bits* x = read<half_bits>(k);
    run([&] { KERNEL(weights, x, y.data(), k); }, arguments);
    ladder::reference(weights, x, exact.data(), n, k);
#endif
    std::fwrite(y.data(), 2, n, stdout);
    std::fwrite(exact.data(), 8, n, stdout);
}
