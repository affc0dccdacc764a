#define PYFLY_KERNELS_LEVEL avx512vnni
#include "dots.h"
#include "simd_512.h"

namespace pyfly::kernels {
namespace avx512vnni {
namespace {

struct Simd : Dots<Lanes512, Simd> {
    // Unpacking before: 12, 16, 24 and 32 rows of Q4_K took 1.6, 1.4, 1.5 and 1.1 times as long (Zen 4).
    static constexpr size_t strip_rows = 8, dense_strip_rows = 4, worth_unpacking = 32;
    static constexpr int dense_sums = 16, parts_together = 1;

    PYFLY_LANES I dot(I sum, I a, I b) { return _mm512_dpbusd_epi32(sum, a, b); }
    PYFLY_LANES I dot_pairs(I sum, I a, I b) { return _mm512_dpwssd_epi32(sum, a, b); }
    PYFLY_LANES I multiply_32(I a, I b) { return _mm512_mullo_epi32(a, b); }
    PYFLY_LANES I shift_right_32(I a, int n) { return _mm512_srai_epi32(a, static_cast<unsigned>(n)); }
};

} // namespace
} // namespace avx512vnni
} // namespace pyfly::kernels

#include "product.h"
