#define PYFLY_KERNELS_LEVEL i8mm
#include "dots_128.h"

namespace pyfly::kernels {
namespace i8mm {
namespace {

// SMMLA multiplies eight inputs of two rows by those of two outputs. Two quads of four outputs, zipped, are the eight
// inputs of each; a row without a second one is multiplied by SDOT.
struct Simd : Dots128<Simd> {
    template <int m, int n_parts, int n_quads, class Quad>
    PYFLY_LANES void add_quads(I (*own)[m], Quad quad, const int32_t * strip) {
        if constexpr (m == 1) {
            return Dots128<Simd>::add_quads<m, n_parts, n_quads>(own, quad, strip);
        } else {
            constexpr int n_twos = m / 2;
            I sums[n_parts][n_twos][2]; // of outputs 0 and 1, and 2 and 3: [row of the two][output of the two]
            for (int part = 0; part < n_parts; part++) {
                for (int r = 0; r < n_twos; r++) {
                    sums[part][r][0] = sums[part][r][1] = zero();
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < n_quads; i += 2) {
                int8x16_t rows[n_twos]; // eight inputs of each
#pragma GCC unroll 2
                for (int r = 0; r < n_twos; r++) {
                    const int32x2_t even = vld1_s32(strip + i * m + 2 * r), odd = vld1_s32(strip + (i + 1) * m + 2 * r);
                    rows[r] = vreinterpretq_s8_s32(vcombine_s32(vzip1_s32(even, odd), vzip2_s32(even, odd)));
                }
#pragma GCC unroll 2
                for (int part = 0; part < n_parts; part++) {
                    const I even = quad(part, i), odd = quad(part, i + 1);
                    const int8x16_t first = vreinterpretq_s8_s32(vzip1q_s32(even, odd)),
                                    last = vreinterpretq_s8_s32(vzip2q_s32(even, odd));
#pragma GCC unroll 2
                    for (int r = 0; r < n_twos; r++) {
                        sums[part][r][0] = vmmlaq_s32(sums[part][r][0], rows[r], first);
                        sums[part][r][1] = vmmlaq_s32(sums[part][r][1], rows[r], last);
                    }
                    if constexpr (m % 2 != 0) {
                        I & one = own[part][m - 1];
                        one = dot(one, even, broadcast(strip + i * m + m - 1), 0);
                        one = dot(one, odd, broadcast(strip + (i + 1) * m + m - 1), 0);
                    }
                }
            }
            for (int part = 0; part < n_parts; part++) {
#pragma GCC unroll 2
                for (int r = 0; r < n_twos; r++) {
                    const int64x2_t first = vreinterpretq_s64_s32(sums[part][r][0]),
                                    last = vreinterpretq_s64_s32(sums[part][r][1]);
                    own[part][2 * r] = add(own[part][2 * r], vreinterpretq_s32_s64(vtrn1q_s64(first, last)));
                    own[part][2 * r + 1] = add(own[part][2 * r + 1], vreinterpretq_s32_s64(vtrn2q_s64(first, last)));
                }
            }
        }
    }
};

} // namespace
} // namespace i8mm
} // namespace pyfly::kernels

#include "product.h"
