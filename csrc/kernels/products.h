// Rows times packed weights. Pure: memory in, memory out, no threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats.h"

namespace pyfly::kernels {

// Most rows of one multiplication: a whole number of strips for every instruction set.
constexpr size_t most_rows = 48;

// What there is for one type on one instruction set. Rows are quantised into strips of `strip_rows` consecutive rows,
// the last one of fewer; strip s of rows with n_in inputs begins at word s * strip_rows * row_words(n_in).
struct Products {
    size_t strip_rows;                // divides most_rows
    size_t (*row_words)(size_t n_in); // int32 that a row takes

    // Writes x[n_in] as row `row` of a strip of m rows. A row with a NaN or an infinity gives products that are not
    // finite.
    void (*quantise)(const float * x, size_t n_in, int32_t * strip, int m, int row);

    // out[r][16] receives the products of the panel's 16 outputs with row r, for 1 <= n_rows <= most_rows rows of
    // strips.
    void (*multiply)(const uint8_t * panel, size_t n_in, const int32_t * strips, size_t n_rows, float * const * out);
};

namespace avx2 {
const Products * products(WeightType type);
}
namespace avxvnni {
const Products * products(WeightType type);
}
namespace avx512vnni {
const Products * products(WeightType type);
}

// The instruction set in use: "avx512vnni", "avxvnni", "avx2", or "none" where there is none of them: the best that
// this processor has, or at most the one that the environment variable PYFLY_ISA names.
const char * instruction_set();

// For a type on that instruction set; null where there are none.
const Products * products(WeightType type);

} // namespace pyfly::kernels
