// Attention of queries to cells of a cache in F16. Pure: memory in, memory out, no threads.
//
// Every sum has one order, whatever is computed beside it: a dot product adds every eighth number, then the eight sums;
// weights and values are added cell by cell. So a query's result is the same bits alone and in a batch. What a cell
// holds is converted once for all queries that see it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyfly::kernels {

constexpr int tile = 32; // cells that are taken at once

// Cells of one key/value head: n <= tile rows of F16, anywhere.
struct Cells {
    const uint16_t * const * rows;
    int n;
};

struct Attention {
    // out[q][c] receives the dot product of queries[q][size] and cell c, for c < cells.n; up to the next multiple of
    // four, out[q] is written, too. `size` is a multiple of 8. `converted` is room for tile * size floats.
    void (*dot_products)(Cells cells, int size, const float * const * queries, int n_queries, float * const * out,
                         float * converted);

    // The largest of n numbers; -infinity of none. n is a multiple of 8, as below.
    float (*largest)(const float * x, int n);

    // x becomes exp(x - most), to some 1e-7 of it; 0 where x is -infinity.
    void (*exponentials)(float * x, int n, float most);

    // out[q][size] += the sum of weights[q][c] times cell c. `size` is a multiple of 8; `converted` as above.
    void (*add_weighted)(Cells cells, int size, const float * const * weights, int n_queries, float * const * out,
                         float * converted);
};

namespace avx2 {
extern const Attention attention;
}

// For this processor; null where it has no AVX2.
const Attention * attention();

} // namespace pyfly::kernels
