// Products of bytes in instruction sets that add four of them to 32 bits in one instruction: VNNI, unsigned by signed
// bytes, and SDOT, signed ones.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {
namespace {

// `Own` has the functions that differ by width: shift_right_32(a, n), which keeps the sign; unless it has its own
// add_products, dot(sum, a, b) and multiply_32(a, b); and unless that of Lanes serves, dot_pairs(sum, a, b), which adds
// the products of pairs of int16.
template <class Lanes, class Own> struct Dots : Lanes {
    using I = typename Lanes::I;

    template <int most> static constexpr bool prefers_signed = false;
    static constexpr bool multiplies_pairs = true;

    PYFLY_LANES I no_scale() { return Lanes::zero(); }

    // The scale of group h of each pair, as int32.
    PYFLY_LANES I scale_of(I pairs, int h) {
        return Own::shift_right_32(h == 0 ? Lanes::shift_left_32(pairs, 16) : pairs, 16);
    }

    // The negated amount by which the products of unsigned weights with q[n] exceed those of the signed ones.
    template <int n, int offset> PYFLY_LANES int32_t start_of(const int8_t * q) {
        return -offset * Lanes::template sum_of<n>(q);
    }

    // Adds the products of n_quads quads of each part with m rows: times its scale if is_scaled, of the signed weights
    // if has_starts. strip[n_quads][m]; starts[m].
    template <int m, int n_parts, int n_quads, int most, bool is_scaled, bool has_starts, class Quad>
    PYFLY_LANES void add_products(I (*sums)[m], Quad quad, const int32_t * strip, const int32_t * starts,
                                  const I * scales) {
        for (int part = 0; part < n_parts; part++) {
            I own[m];
#pragma GCC unroll 8
            for (int c = 0; c < m; c++) {
                own[c] = has_starts ? Lanes::broadcast(starts + c) : Lanes::zero();
            }
#pragma GCC unroll 8
            for (int i = 0; i < n_quads; i++) {
                const I q = quad(part, i);
#pragma GCC unroll 8
                for (int c = 0; c < m; c++) {
                    own[c] = Own::dot(own[c], q, Lanes::broadcast(strip + i * m + c));
                }
            }
#pragma GCC unroll 8
            for (int c = 0; c < m; c++) {
                sums[part][c] = Lanes::add(sums[part][c], is_scaled ? Own::multiply_32(own[c], scales[part]) : own[c]);
            }
        }
    }

    // The same, without starts, for two groups of n_quads quads that follow each other, whose sums fit in 16 bits;
    // scales are pairs. The sum of the second group is moved to the upper half, and that of the first one is added to
    // the lower half, which begins in the middle, so that it borrows nothing.
    template <int m, int n_parts, int n_quads, class Quad>
    PYFLY_LANES void add_pairs(I (*sums)[m], Quad quad, const int32_t * strip, const I * scales) {
        constexpr int32_t middle = 0x8000;
        const I middles = Lanes::broadcast(&middle);
        for (int part = 0; part < n_parts; part++) {
            I own[m];
#pragma GCC unroll 8
            for (int c = 0; c < m; c++) {
                own[c] = Lanes::zero();
            }
#pragma GCC unroll 2
            for (int group = 1; group >= 0; group--) {
#pragma GCC unroll 8
                for (int i = group * n_quads; i < (group + 1) * n_quads; i++) {
                    const I q = quad(part, i);
#pragma GCC unroll 8
                    for (int c = 0; c < m; c++) {
                        own[c] = Own::dot(own[c], q, Lanes::broadcast(strip + i * m + c));
                    }
                }
#pragma GCC unroll 8
                for (int c = 0; c < m; c++) {
                    own[c] = group == 1 ? Lanes::add(Lanes::shift_left_32(own[c], 16), middles)
                                        : Lanes::flip_bits(own[c], middles);
                }
            }
#pragma GCC unroll 8
            for (int c = 0; c < m; c++) {
                sums[part][c] = Own::dot_pairs(sums[part][c], own[c], scales[part]);
            }
        }
    }
};

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
