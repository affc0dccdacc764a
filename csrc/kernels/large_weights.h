// Sums of weights as integers: a double of a large weight and a weight has the weight, rounded to whole weight units
// (attention.h), in its lowest bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {
namespace {

// Doubles from here to the next power of two are whole weight units.
constexpr double large_weight = 1.5 * 4096.0;

// The sum of n weights, from that of the bits of as many doubles, each a large weight and a weight.
PYFLY_INLINE int64_t without_large(uint64_t sum, int n) {
    uint64_t bits;
    std::memcpy(&bits, &large_weight, sizeof(bits));
    return static_cast<int64_t>(sum - bits * static_cast<uint64_t>(n));
}

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
