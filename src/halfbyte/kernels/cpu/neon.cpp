#define HB_ISA neon
#include "simd_neon.hpp"
#include "kernel.hpp"
HB_DEFINE_ISA(neon)
