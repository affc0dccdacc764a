// Activations as bytes. Included behind simd_<lanes>.h, which defines `Simd`, by files that are compiled for its
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "layout.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {
namespace {

// The sums of two groups that follow each other, as int16 side by side.
template <int group> PYFLY_INLINE int32_t pair_of_sums(const int8_t * q) {
    const int16_t pair[2] = {static_cast<int16_t>(Simd::template sum_of<group>(q)),
                             static_cast<int16_t>(Simd::template sum_of<group>(q + group))};
    int32_t word;
    std::memcpy(&word, pair, sizeof(word));
    return word;
}

// Calls put(word, value) for d and for the sums of a block's bytes q that minima are multiplied by. The words of a
// strip are S::d, and S::sums or S::d_sum.
template <class F, class S, class Put> PYFLY_INLINE void put_sums(const int8_t * q, float d, Put put) {
    if constexpr (F::has_mins && F::has_groups) {
        for (int p = 0; p < PackedBlock<F>::n_pairs; p++) {
            const int32_t pair = pair_of_sums<F::group>(q + 2 * p * F::group);
            put(S::sums + p, &pair);
        }
    } else if constexpr (F::has_mins) {
        const float d_sum = d * static_cast<float>(Simd::template sum_of<F::block>(q));
        put(S::d_sum, &d_sum);
    }
    put(S::d, &d);
}

// x[block] as bytes, and d; NaN if a number is not finite. All are zeros if all are below 2^-121 or so, where the scale
// would be infinite.
template <int block> PYFLY_INLINE float quantise_block(const float * x, int8_t * q) {
    const int32_t largest_bits = Simd::template largest_bits<block>(x);
    float largest;
    std::memcpy(&largest, &largest_bits, sizeof(largest));
    const float scale = largest > 127.0f / 3.4e38f ? 127.0f / largest : 0.0f;
    Simd::template round_to_bytes<block>(x, scale, q);
    return largest_bits < 0x7F800000 ? largest / 127.0f : __builtin_nanf("");
}

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
