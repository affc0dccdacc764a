// What attention needs of vectors of eight lanes, beside what products have of them.
#include "large_weights.h"
#include "simd_256.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {
namespace {

struct Eight : Lanes256 {
    static constexpr int queries_together = 3; // in dot products: their sums and what they read fill the registers

    PYFLY_LANES F fill(float value) { return _mm256_set1_ps(value); }
    PYFLY_LANES F subtract_floats(F a, F b) { return _mm256_sub_ps(a, b); }
    PYFLY_LANES F fill_with_half(const uint8_t * p) {
        uint16_t half;
        std::memcpy(&half, p, sizeof(half));
        return _mm256_set1_ps(_cvtsh_ss(half));
    }
    // Eight signed bytes.
    PYFLY_LANES I from_bytes(const uint8_t * p) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
    }
    // The lower or the upper halves of eight bytes, less 8.
    PYFLY_LANES I from_nibbles(const uint8_t * p, bool is_upper) {
        const I bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
        const I nibbles = is_upper ? _mm256_srli_epi32(bytes, 4) : _mm256_and_si256(bytes, _mm256_set1_epi32(15));
        return _mm256_sub_epi32(nibbles, _mm256_set1_epi32(8));
    }

    PYFLY_LANES F numbers(const float * p) { return _mm256_loadu_ps(p); }
    PYFLY_LANES F numbers(const uint16_t * p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }

    // The same eight numbers as often as they fit, and different ones side by side.
    PYFLY_LANES F repeat_eight(const float * p) { return _mm256_loadu_ps(p); }
    PYFLY_LANES F join(const F * eights) { return eights[0]; }

    // The sums of every eight lanes of four vectors: of the first eights of all four, then of the second ones.
    PYFLY_LANES void store_sums_of_eights(float * out, const F * v) {
        const F a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)));
    }

    // The larger; b where a is no number.
    PYFLY_LANES F larger(F a, F b) { return _mm256_max_ps(a, b); }
    PYFLY_LANES float largest_lane(F v) {
        float lanes[8];
        _mm256_storeu_ps(lanes, v);
        for (int i = 1; i < 8; i++) {
            lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
        }
        return lanes[0];
    }

    // `value` where a is b, else `other`.
    PYFLY_LANES F equal_or(F a, F value, F other) {
        return _mm256_blendv_ps(other, value, _mm256_cmp_ps(a, value, _CMP_EQ_OQ));
    }
    PYFLY_LANES F zero_below(F v, F least, F value) {
        return _mm256_and_ps(value, _mm256_cmp_ps(v, least, _CMP_NLT_UQ));
    }
    PYFLY_LANES F round(F v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // 2^n of whole numbers n.
    PYFLY_LANES F power_of_two(F n) {
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
    }

    // Sums for without_large, in lanes of 64 bits.
    using Sum = __m256i;
    PYFLY_LANES Sum zero_sum() { return _mm256_setzero_si256(); }
    PYFLY_LANES Sum add_rounded(Sum sum, F weights) {
        const __m256d large = _mm256_set1_pd(large_weight);
        const __m256d low = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(weights)), large);
        const __m256d high = _mm256_add_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(weights, 1)), large);
        return _mm256_add_epi64(sum, _mm256_add_epi64(_mm256_castpd_si256(low), _mm256_castpd_si256(high)));
    }
    // Of n weights.
    PYFLY_LANES int64_t total(Sum sum, int n) {
        uint64_t lanes[4];
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(lanes), sum);
        return without_large(lanes[0] + lanes[1] + lanes[2] + lanes[3], n);
    }
};

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
