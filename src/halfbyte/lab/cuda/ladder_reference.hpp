// y = W x as it is meant, in plain C++: planar Q4 (see ladder.cuh) decoded one weight at a time, summed in double.
// The kernels are checked against this; nothing here is fast.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace ladder {

// An fp16 number from its bits: sign, five bits of exponent, ten of fraction.
inline double half_value(std::uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(fraction, -24);
    return sign * std::ldexp(1024 + fraction, exponent - 25);
}

// codes [n, k / 2], scales [n, k / 32], x [k], y [n].
inline void reference(const std::uint8_t* codes, const std::uint16_t* scales, const std::uint16_t* x, double* y, int n,
                      int k) {
    for (int row = 0; row < n; ++row) {
        y[row] = 0;
        for (int i = 0; i < k; ++i) {
            const std::size_t weight = std::size_t(row) * k + i;
            const int byte = codes[weight / 2];
            const int code = i % 2 ? byte >> 4 : byte & 15;
            y[row] += half_value(scales[weight / 32]) * (code - 8) * half_value(x[i]);
        }
    }
}

// The same for W in fp16 [n, k].
inline void reference(const std::uint16_t* weights, const std::uint16_t* x, double* y, int n, int k) {
    for (int row = 0; row < n; ++row) {
        y[row] = 0;
        for (int i = 0; i < k; ++i) y[row] += half_value(weights[std::size_t(row) * k + i]) * half_value(x[i]);
    }
}

}  // namespace ladder
