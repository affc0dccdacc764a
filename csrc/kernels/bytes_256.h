// Floats as bytes, and sums of bytes, with AVX2: where vectors of sixteen lanes are no faster, these serve them as
// well.
#pragma once

#include <cstdint>

#include <immintrin.h>

#include "lanes.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {
namespace {

struct Bytes256 {
    // The sum of q[n], for a multiple of 16.
    template <int n> PYFLY_LANES int sum_of(const int8_t * q) {
        static_assert(n % 16 == 0, "");
        __m128i sums = _mm_setzero_si128(); // of unsigned bytes, q + 128
        for (int i = 0; i < n; i += 16) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(q + i));
            sums = _mm_add_epi64(sums, _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128()));
        }
        return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 128 * n;
    }

    // The bits of the largest magnitude of x[n], for a multiple of 8: magnitudes are ordered as their bits are, and
    // what is not finite comes last.
    template <int n> PYFLY_LANES int32_t largest_bits(const float * x) {
        __m256i most = _mm256_setzero_si256();
        for (int i = 0; i < n; i += 8) {
            const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
            most = _mm256_max_epi32(most, _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF)));
        }
        __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
        return _mm_cvtsi128_si32(four);
    }

    // q[n] become x[n] times `scale`, rounded to the nearest whole number, to the even one of two; n is a multiple of
    // 32. Products must be in -127..127; for one that is no number, q may be any byte.
    template <int n> PYFLY_LANES void round_to_bytes(const float * x, float scale, int8_t * q) {
        const __m256 scales = _mm256_set1_ps(scale);
        for (int i = 0; i < n; i += 32) {
            const auto rounded = [&](int at) {
                return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + at), scales));
            };
            const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(rounded(0), rounded(8)),
                                                     _mm256_packs_epi32(rounded(16), rounded(24)));
            const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(q + i), _mm256_permutevar8x32_epi32(bytes, order));
        }
    }
};

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
