// Products of bytes with SDOT, which takes the four activations from one of four lanes: nothing is broadcast. Weights
// are signed bytes; the unsigned form of numbers is, too, as they are below 128.
#include "dots.h"
#include "simd_128.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {
namespace {

// `Own` may have its own add_quads.
template <class Own> struct Dots128 : Dots<Lanes128, Own> {
    using I = Lanes128::I;

    static constexpr size_t strip_rows = 4, dense_strip_rows = 6, worth_unpacking = 11;
    static constexpr int dense_sums = 24, parts_together = 2;

    template <int most> static constexpr bool prefers_signed = most > 127;
    static constexpr bool multiplies_pairs = false;

    PYFLY_LANES I shift_right_32(I a, int n) { return vshlq_s32(a, vdupq_n_s32(-n)); }

    // sum + the products of a's quads with that of lane `lane` of b.
    PYFLY_LANES I dot(I sum, I a, I b, int lane) {
        const int8x16_t weights = vreinterpretq_s8_s32(a), rows = vreinterpretq_s8_s32(b);
        switch (lane) {
            case 0:
                return vdotq_laneq_s32(sum, weights, rows, 0);
            case 1:
                return vdotq_laneq_s32(sum, weights, rows, 1);
            case 2:
                return vdotq_laneq_s32(sum, weights, rows, 2);
            default:
                return vdotq_laneq_s32(sum, weights, rows, 3);
        }
    }

    // own[n_parts][m] += the products of n_quads quads of each part, a multiple of four, with strip[n_quads][m].
    template <int m, int n_parts, int n_quads, class Quad>
    PYFLY_LANES void add_quads(I (*own)[m], Quad quad, const int32_t * strip) {
#pragma GCC unroll 8
        for (int i = 0; i < n_quads; i++) {
            I q[n_parts];
#pragma GCC unroll 2
            for (int part = 0; part < n_parts; part++) {
                q[part] = quad(part, i);
            }
#pragma GCC unroll 4
            for (int c = 0; c < m; c++) {
                const int word = i * m + c;
                const I four = Lanes128::load(strip + word / 4 * 4);
#pragma GCC unroll 2
                for (int part = 0; part < n_parts; part++) {
                    own[part][c] = dot(own[part][c], q[part], four, word % 4);
                }
            }
        }
    }

    // As in dots.h.
    template <int m, int n_parts, int n_quads, int most, bool is_scaled, bool has_starts, class Quad>
    PYFLY_LANES void add_products(I (*sums)[m], Quad quad, const int32_t * strip, const int32_t * starts,
                                  const I * scales) {
        I own[n_parts][m];
        for (int part = 0; part < n_parts; part++) {
#pragma GCC unroll 4
            for (int c = 0; c < m; c++) {
                own[part][c] = has_starts ? Lanes128::broadcast(starts + c) : Lanes128::zero();
            }
        }
        Own::template add_quads<m, n_parts, n_quads>(own, quad, strip);
        for (int part = 0; part < n_parts; part++) {
#pragma GCC unroll 4
            for (int c = 0; c < m; c++) {
                sums[part][c] = is_scaled ? vmlaq_s32(sums[part][c], own[part][c], scales[part])
                                          : vaddq_s32(sums[part][c], own[part][c]);
            }
        }
    }
};

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
