#define HB_ISA avx2
#include "simd_avx2.hpp"
#include "kernel.hpp"
HB_DEFINE_ISA(avx2)
