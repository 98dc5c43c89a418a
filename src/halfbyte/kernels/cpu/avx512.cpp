#define HB_ISA avx512
#include "simd_avx512.hpp"
#include "kernel.hpp"
HB_DEFINE_ISA(avx512)
