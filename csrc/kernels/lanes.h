// Nothing of these functions may be left to be called: they have their file's instruction set.
#pragma once

#include <cstdint>

#define PYFLY_INLINE inline __attribute__((always_inline))
#define PYFLY_LANES inline static __attribute__((always_inline))

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {
namespace {

// The sum of q[n].
PYFLY_INLINE int sum_of(const int8_t * q, int n) {
    int sum = 0;
    for (int i = 0; i < n; i++) {
        sum += q[i];
    }
    return sum;
}

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
