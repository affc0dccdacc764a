// What attention needs of vectors of sixteen lanes. See attention_256.h for what the functions are.
#include "attention_256.h"
#include "simd_512.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {
namespace {

struct Sixteen : Lanes512 {
    static constexpr int queries_together = 4;

    PYFLY_LANES F fill(float value) { return _mm512_set1_ps(value); }
    PYFLY_LANES F subtract_floats(F a, F b) { return _mm512_sub_ps(a, b); }

    PYFLY_LANES F numbers(const float * p) { return _mm512_loadu_ps(p); }
    PYFLY_LANES F numbers(const uint16_t * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }

    PYFLY_LANES F repeat_eight(const float * p) {
        const __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
        return _mm512_castsi512_ps(_mm512_broadcast_i64x4(eight));
    }
    PYFLY_LANES F join(const __m256 * eights) {
        const __m512d low = _mm512_castpd256_pd512(_mm256_castps_pd(eights[0]));
        return _mm512_castpd_ps(_mm512_insertf64x4(low, _mm256_castps_pd(eights[1]), 1));
    }

    // The sums of neighbours, those of a and of b by turns in each four lanes: as _mm256_hadd_ps.
    PYFLY_LANES F add_neighbours(F a, F b) {
        return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
    }
    PYFLY_LANES void store_sums_of_eights(float * out, const F * v) {
        const F a = add_neighbours(add_neighbours(v[0], v[1]), add_neighbours(v[2], v[3]));
        const F sums = _mm512_add_ps(_mm512_shuffle_f32x4(a, a, 0x88), _mm512_shuffle_f32x4(a, a, 0xDD));
        _mm256_storeu_ps(out, _mm512_castps512_ps256(sums));
    }

    PYFLY_LANES F larger(F a, F b) { return _mm512_max_ps(a, b); }
    PYFLY_LANES float largest_lane(F v) { return _mm512_reduce_max_ps(v); }
    PYFLY_LANES F equal_or(F a, F value, F other) {
        return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(a, value, _CMP_EQ_OQ), value);
    }
    PYFLY_LANES F zero_below(F v, F least, F value) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, least, _CMP_NLT_UQ), value);
    }
    PYFLY_LANES F round(F v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    PYFLY_LANES F power_of_two(F n) {
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
    }

    using Sum = __m512i;
    PYFLY_LANES Sum zero_sum() { return _mm512_setzero_si512(); }
    PYFLY_LANES Sum add_rounded(Sum sum, F weights) {
        const __m512d large = _mm512_set1_pd(large_weight);
        const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(weights), 1));
        const __m512d low = _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(weights)), large);
        const __m512d high = _mm512_add_pd(_mm512_cvtps_pd(upper), large);
        return _mm512_add_epi64(sum, _mm512_add_epi64(_mm512_castpd_si512(low), _mm512_castpd_si512(high)));
    }
    PYFLY_LANES int64_t total(Sum sum, int n) {
        return without_large(static_cast<uint64_t>(_mm512_reduce_add_epi64(sum)), n);
    }
};

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
