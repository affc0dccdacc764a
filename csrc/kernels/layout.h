// How weights lie in memory for the products: 16 outputs side by side, so that one broadcast of four activations serves
// 16 dot products, and all that a block needs in one ascending stream.
//
// A matrix of n_out rows with n_in weights each becomes n_out / 16 panels; a panel is n_in / block packed blocks. The
// weights of a block are units of 32 consecutive inputs of 16 outputs; a unit is eight quads of four consecutive
// inputs, and a quad has 16 lanes of four bytes, one lane for each output. Of each byte only the bits are kept that
// Format names: vectors of 64 bytes hold the low parts of 8 / low consecutive quads, then those that hold the high
// parts of 8 / high, the first quad in the lowest bits.
//
// Scales lie in pairs: those of groups 2p and 2p + 1 of an output are neighbours, ready for a multiplication of pairs.
#pragma once

#include "formats.h"

namespace pyfly::kernels {

constexpr int panel = 16;     // outputs side by side
constexpr int unit = 32;      // inputs
constexpr int unit_quads = 8; // of four inputs
constexpr int vector = 64;    // bytes: 16 lanes of four

// The vectors of a unit.
template <class F> constexpr int unit_vectors = F::low + F::high;

// Where things are in a packed block, in bytes.
template <class F> struct PackedBlock {
    static constexpr int n_units = F::block / unit;
    static constexpr int n_pairs = F::has_groups ? F::block / F::group / 2 : 0;
    static constexpr int pair_bytes = 2 * panel;
    static constexpr int d = 0;                                      // [16] of d_bytes
    static constexpr int m = F::d_bytes * panel;                     // [16] F16, where the type has minima
    static constexpr int scales = m + (F::has_mins ? 2 * panel : 0); // [n_pairs][16][2] bytes
    static constexpr bool has_own_mins = F::has_mins && !F::has_short_scales;
    static constexpr int mins = scales + pair_bytes * n_pairs; // [n_pairs][16][2] bytes, where they are own
    static constexpr int units = mins + (has_own_mins ? pair_bytes * n_pairs : 0); // [n_units][unit_vectors][64]
    static constexpr int bytes = units + n_units * unit_vectors<F> * vector;
};

// A type of floats: blocks of 32 inputs, [input][16 outputs].
constexpr int dense_block = 32;

} // namespace pyfly::kernels
