// Rows times packed weights. Pure: memory in, memory out, no threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "formats.h"

namespace pyfly::kernels {

constexpr size_t most_rows = 128; // of one multiplication, on any instruction set

constexpr size_t read_behind = 1024; // bytes behind rows that may be read

constexpr size_t strip_alignment = 64; // bytes; not required, but multiplication is slower without it

// What there is for one type on one instruction set. Rows are quantised into strips of `strip_rows` consecutive rows,
// the last one of fewer; strip s of rows with n_in inputs begins at word s * strip_rows * row_words(n_in).
struct Products {
    size_t strip_rows;
    size_t rows_together;             // most rows of one multiplication: whole strips, and at most `most_rows`
    size_t (*row_words)(size_t n_in); // int32 that a row takes

    // Writes x[n_in] as row `row` of a strip of m rows. A row with a NaN or an infinity gives products that are not
    // finite.
    void (*quantise)(const float * x, size_t n_in, int32_t * strip, int m, int row);

    // out[r][16 * n_panels] receives the products of the outputs of consecutive panels with row r, for 1 <= n_rows <=
    // rows_together rows of strips. Up to `read_behind` bytes behind the last strip are read, whatever they are.
    void (*multiply)(const uint8_t * panels, size_t n_panels, size_t n_in, const int32_t * strips, size_t n_rows,
                     float * const * out);
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
namespace dotprod {
const Products * products(WeightType type);
}
namespace i8mm {
const Products * products(WeightType type);
}
namespace amx {
const Products * products(WeightType type, size_t n_rows); // null where avx512vnni's are used
}

// The instruction set in use, or "none": the best that this processor has, or at most the one that the environment
// variable PYFLY_ISA names. Best first: "amx", "avx512vnni", "avxvnni", "avx2" for x86-64; "i8mm", "dotprod" for 64-bit
// ARM. With "amx" few rows and floats are multiplied as with "avx512vnni".
const char * instruction_set();

// Why it is "none", without a full stop.
std::string why_no_instruction_set();

// For this many rows of a type on that instruction set. Null for a type without products, whatever the number of rows.
const Products * products(WeightType type, size_t n_rows);

// The most int32 that a row of a type takes, whatever the number of rows. Requires that there are products for it.
size_t most_row_words(WeightType type, size_t n_in);

} // namespace pyfly::kernels
