#define HB_ISA portable
#include "simd_portable.hpp"
#include "kernel.hpp"
HB_DEFINE_ISA(portable)
