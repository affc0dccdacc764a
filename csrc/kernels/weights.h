// Packed weights as vectors. Included behind simd_<level>.h, which defines `Simd`, by files that are compiled for its
// instruction set.

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

// Weights are asked for this many bytes before they are used: a block, and at least 2 KB. Each unit asks for the same
// unit there, and with two parts each part does (one of them alone was slower): a block that asks for all of the next
// one before it begins fills the queue of loads. Measured on Zen 4, two cores, Qwen2.5-Coder-1.5B Q4_K_M, in ms for
// 1, 2, 4, 8 and 11 rows:
//   AVX-512 VNNI, by the unit 23.7, 25.2, 31.5, 58.0, 74.9; by the block 24.8, 31.5, 38.5, 76.2, 94.0;
//     not asked for 22.3, 24.7, 32.2, 55.1 to 67.0, 71.6 to 83.3
//   AVX2, by the unit 30.9, 31.3, 43.6, 83.0, 113; by the block 31.3, 34.3, 57.3, 101, 134;
//     not asked for 23 to 24.7, 29.3, 45 to 52, 93 to 103, 122 to 137
// On Zen 1 one row took 0.76 to 0.9 of its time when asked for by the block, two 0.87 to 0.95. 1 to 8 KB make no
// difference.
//
// In the unpacked way, too, a block asks for the next one while its first strip is multiplied: 16 rows of Q4_K took
// 0.82 of their time, of Q6_K 0.72 (Zen 3).
template <class P> constexpr int prefetched = P::bytes > 2048 ? P::bytes : 2048;

constexpr int dense_prefetched = 2048; // 4 rows of F16 took 0.67 of their time, 16 of them 0.85 (Zen 3)

PYFLY_INLINE void prefetch(const uint8_t * begin, int bytes) { // may be behind the end, which does no harm
    for (int line = 0; line < bytes; line += 64) {
        __builtin_prefetch(begin + line);
    }
}

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
