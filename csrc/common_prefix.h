// How far two texts agree. No llama.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace pyfly {

// How many of the first tokens of a[n_a] and b[n_b] are the same.
inline size_t n_common(const int32_t * a, size_t n_a, const int32_t * b, size_t n_b) {
    const size_t n = std::min(n_a, n_b);
    if (std::equal(a, a + n, b)) {
        return n; // as in nearly every step, and several times as fast as a search
    }
    return static_cast<size_t>(std::mismatch(a, a + n, b).first - a);
}

} // namespace pyfly
