// The tiles of Intel's AMX: eight registers of up to 16 rows of 64 bytes, and one product of two of them. Instructions
// are written out, not the compiler's intrinsics: GCC 12 drops stores to what a tile reads (GCC bug 114098).
#pragma once

#include <cstddef>
#include <cstdint>

#include "lanes.h"

namespace pyfly::kernels {

namespace PYFLY_KERNELS_LEVEL {
namespace {

constexpr int tile_rows = 16;
constexpr int tile_bytes = 1024; // 16 rows of 64

// The shapes of the tiles until release_tiles(), of this thread. Contents become zero.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

PYFLY_INLINE void set_tiles(const TileShapes & shapes) {
    asm volatile("ldtilecfg %0" ::"m"(shapes));
}

PYFLY_INLINE void release_tiles() {
    asm volatile("tilerelease");
}

template <int tile> PYFLY_INLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

// A tile whose rows of `row_bytes` lie one behind the other; they are not more than `bytes`.
template <int tile, int row_bytes, int bytes = tile_bytes> PYFLY_INLINE void load_tile(const void * p) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(tile), "r"(p), "r"(size_t{row_bytes}),
                 "m"(*static_cast<const uint8_t(*)[bytes]>(p)));
}

template <int tile> PYFLY_INLINE void store_tile(int32_t * p) {
    asm volatile("tilestored %%tmm%c1, (%2,%3,1)"
                 : "=m"(*reinterpret_cast<int32_t(*)[tile_bytes / 4]>(p))
                 : "i"(tile), "r"(p), "r"(size_t{64}));
}

// sums[row][output] += the product of rows[row][64], signed bytes, with weights[64 / 4][output][4], bytes.
template <int sums, int rows, int weights, bool is_signed> PYFLY_INLINE void multiply_tiles() {
    if constexpr (is_signed) {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(weights));
    } else {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(weights));
    }
}

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
