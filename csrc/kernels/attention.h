// Attention of queries to cells of a cache. Pure: memory in, memory out, no threads.
//
// Every sum has one order, whatever is computed beside it, or none: a dot product adds every eighth number, then the
// eight sums; weights and values are added cell by cell; weights alone are added as integers. So a query's result is
// the same bits alone and in a batch, and on every instruction set. What cells hold is converted to floats as it is
// read; where that takes long and many queries see a cell, once for all of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyfly::kernels {

constexpr int tile = 32; // cells that are taken at once

// How a cell holds numbers. Those of ggml with the same names; `size` numbers are whole blocks of 32 in the last two.
enum class CellType : int { f16, bf16, q8_0, q4_0 };

// Cells of one key/value head: 1 <= n <= tile rows of numbers, anywhere.
struct Cells {
    const void * const * rows;
    int n;
    CellType type;
};

struct Attention {
    // out[q][c] receives the dot product of queries[q][size] and cell c, for c < cells.n; what else is in out[q][tile]
    // is overwritten. `size` is a multiple of 8. `converted` is room for tile * size floats.
    void (*dot_products)(Cells cells, int size, const float * const * queries, int n_queries, float * const * out,
                         float * converted);

    // x[tile], dot products, become scores: x times `scale`, then where `cap` is not 0, cap tanh(x), then plus `bias`,
    // [tile] or null for none; -infinity, whatever x, where the bias is -infinity. Returns the largest that is a
    // number.
    float (*finish)(float * x, float scale, float cap, const float * bias);

    // x[tile] becomes exp(x - most), to some 1e-7 of it; 0 where x is -infinity. Returns the sum of the weights in
    // units of 1 / weight_unit, each rounded by itself: sums of such sums are exact. What it is where a weight is no
    // number, or above 1, is not said.
    int64_t (*exponentials)(float * x, float most);

    // out[q][size] += the sum of weights[q][c] times cell c. `size` is a multiple of 8; `converted` as above.
    void (*add_weighted)(Cells cells, int size, const float * const * weights, int n_queries, float * const * out,
                         float * converted);

    // The numbers of one cell as floats, exact but for q8_0 and q4_0 with a scale that is no number.
    void (*convert)(CellType type, const void * row, int size, float * out);
};

// 2^40: the rounding of 2^17 weights moves a sum of 1 or more by 2^-24 at most, and 2^23 of them fit in 63 bits.
constexpr double weight_unit = 1099511627776.0;

namespace avx2 {
extern const Attention attention;
}
namespace avx512vnni {
extern const Attention attention;
}
namespace neon {
extern const Attention attention;
}

// For this processor; null where there is no instruction set (products.h).
const Attention * attention();

} // namespace pyfly::kernels
