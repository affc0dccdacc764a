// Packed weights as vectors. Included behind simd_<level>.h, which defines `Simd`, by files that are compiled for its
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lanes.h"
#include "layout.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {
namespace {

using I = Simd::I; // lanes of int32

// Parts of n_bits bits of quad `i` of a unit, moved to bit `to`.
template <int n_bits, int to> PYFLY_INLINE I bits_of(const uint8_t * vectors, int i) {
    constexpr int n_quads = 8 / n_bits;
    const I v = Simd::load(vectors + i / n_quads * vector);
    if constexpr (n_bits == 8) {
        return v;
    } else {
        return Simd::and_bytes(Simd::shift_right_16(v, i % n_quads * n_bits - to), ((1 << n_bits) - 1) << to);
    }
}

// Quad `i` of a unit of packed weights: bytes, in the unsigned form if `offset` is the type's and otherwise, with 0, as
// stored: signed for bytes and tables, and for numbers the unsigned form again.
template <WeightType type, int offset> PYFLY_INLINE I unpack_quad(const uint8_t * vectors, int i) {
    using F = Format<type>;
    I q = bits_of<F::low, 0>(vectors, i);
    if constexpr (F::high > 0) {
        q = Simd::or_bits(q, bits_of < F::high == 0 ? 1 : F::high, F::low > (vectors + F::low * vector, i));
    }
    if constexpr (F::values == Values::table) {
        return Simd::look_up(F::table, offset, q);
    } else if constexpr (F::values == Values::byte && offset != 0) {
        return Simd::flip_sign(q);
    } else {
        return q;
    }
}

// The minima of groups 2p and 2p + 1 of a packed block, as pairs of int16, of the outputs from `first` on.
template <WeightType type> PYFLY_INLINE I load_mins(const uint8_t * block, int p, int first) {
    using F = Format<type>;
    using P = PackedBlock<F>;
    const int at = p * P::pair_bytes + 2 * first;
    if constexpr (F::has_short_scales) {
        return Simd::shift_right_16(Simd::template load_pairs<false>(block + P::scales + at), 4);
    } else {
        return Simd::template load_pairs<false>(block + P::mins + at);
    }
}

PYFLY_INLINE void prefetch(const uint8_t * begin, int bytes) { // may be behind the end, which does no harm
    for (int line = 0; line < bytes; line += 64) {
        __builtin_prefetch(begin + line);
    }
}

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
