// Activations as bytes. Included behind simd_<level>.h by files that are compiled for its instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "lanes.h"
#include "layout.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {
namespace {

// The sum of q[n].
template <int n> PYFLY_INLINE int sum_of(const int8_t * q) {
    static_assert(n % 16 == 0, "");
    __m128i sums = _mm_setzero_si128(); // of unsigned bytes, q + 128
    for (int i = 0; i < n; i += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(q + i));
        sums = _mm_add_epi64(sums, _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128()));
    }
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 128 * n;
}

// The sums of two groups that follow each other, as int16 side by side.
template <int group> PYFLY_INLINE int32_t pair_of_sums(const int8_t * q) {
    const int16_t pair[2] = {static_cast<int16_t>(sum_of<group>(q)), static_cast<int16_t>(sum_of<group>(q + group))};
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
        const float d_sum = d * static_cast<float>(sum_of<F::block>(q));
        put(S::d_sum, &d_sum);
    }
    put(S::d, &d);
}

// x[block] as bytes, and d; NaN if a number is not finite.
template <int block> PYFLY_INLINE float quantise_block(const float * x, int8_t * q) {
    // Magnitudes are ordered as their bits are, and what is not finite comes last.
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < block; i += 8) {
        const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
        most = _mm256_max_epi32(most, _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF)));
    }
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
    const int32_t largest_bits = _mm_cvtsi128_si32(four);
    float largest;
    std::memcpy(&largest, &largest_bits, sizeof(largest));
    const __m256 scale = _mm256_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    for (int i = 0; i < block; i += 32) {
        const auto rounded = [&](int at) {
            return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + at), scale));
        };
        const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(rounded(0), rounded(8)),
                                                 _mm256_packs_epi32(rounded(16), rounded(24)));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(q + i), _mm256_permutevar8x32_epi32(bytes, order));
    }
    return largest_bits < 0x7F800000 ? largest / 127.0f : __builtin_nanf("");
}

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
