#define PYFLY_KERNELS_LEVEL avxvnni
#include "dots.h"
#include "simd_256.h"

namespace pyfly::kernels {
namespace avxvnni {
namespace {

struct Simd : Dots<Lanes256, Simd> {
    static constexpr size_t strip_rows = 4, dense_strip_rows = 6, worth_unpacking = 11;
    static constexpr int dense_sums = 12, parts_together = 1;

    PYFLY_LANES I dot(I sum, I a, I b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
    PYFLY_LANES I dot_pairs(I sum, I a, I b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }
    PYFLY_LANES I multiply_32(I a, I b) { return _mm256_mullo_epi32(a, b); }
    PYFLY_LANES I shift_right_32(I a, int n) { return _mm256_srai_epi32(a, n); }
};

} // namespace
} // namespace avxvnni
} // namespace pyfly::kernels

#include "product.h"
