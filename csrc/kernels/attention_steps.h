// The steps of attention, written once for all instruction sets. Every attention_<level>.cpp includes
// attention_<lanes>.h, says which vectors are `Wide`, and then includes this file.
//
// No templates of the standard library, as in product.h.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "attention.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {

namespace {

constexpr int worth_converting = 3; // queries: below, cells in F16 are converted for each of them

// Cells are multiplied in fours of vectors; vector k of a four has the eights of cells k, k + 4, ...
constexpr int of_vector = Wide::lanes / 8, of_four = 4 * of_vector;

// ---- What cells hold ------------------------------------------------------------------------------------------------

template <CellType type> PYFLY_INLINE void for_each_eight(const void * row, int size, float * out, int stride) {
    using L = Eight;
    const uint8_t * bytes = static_cast<const uint8_t *>(row);
    if constexpr (type == CellType::f16 || type == CellType::bf16) {
        for (int i = 0; i < size; i += 8, bytes += 16, out += stride) {
            L::store(out, type == CellType::f16 ? L::from_halves(bytes) : L::from_bfloats(bytes));
        }
    } else {
        constexpr int n_bytes = type == CellType::q8_0 ? 32 : 16; // behind the scale, F16
        for (int i = 0; i < size; i += 32, bytes += 2 + n_bytes) {
            const L::F scale = L::fill_with_half(bytes);
            for (int k = 0; k < 4; k++, out += stride) {
                const L::I q = type == CellType::q8_0 ? L::from_bytes(bytes + 2 + 8 * k)
                                                      : L::from_nibbles(bytes + 2 + 8 * (k % 2), k > 1);
                L::store(out, L::multiply(scale, L::to_float(q)));
            }
        }
    }
}

// Eight numbers after eight at out, out + stride, ...
PYFLY_INLINE void convert_row(CellType type, const void * row, int size, float * out, int stride) {
    switch (type) {
        case CellType::f16:
            return for_each_eight<CellType::f16>(row, size, out, stride);
        case CellType::bf16:
            return for_each_eight<CellType::bf16>(row, size, out, stride);
        case CellType::q8_0:
            return for_each_eight<CellType::q8_0>(row, size, out, stride);
        case CellType::q4_0:
            return for_each_eight<CellType::q4_0>(row, size, out, stride);
    }
}

void convert(CellType type, const void * row, int size, float * out) {
    convert_row(type, row, size, out, 8);
}

// ---- Queries by keys ------------------------------------------------------------------------------------------------

// Dot products of m queries with a four of vectors. cell(k, i): the eights at i of the cells of vector k.
template <int m, class Cell>
PYFLY_INLINE void dot_four(int size, const float * const * queries, float * const * out, int c, Cell cell) {
    Wide::F sums[m][4];
    for (int q = 0; q < m; q++) {
        for (int k = 0; k < 4; k++) {
            sums[q][k] = Wide::zero_float();
        }
    }
    for (int i = 0; i < size; i += 8) {
        Wide::F query[m];
        for (int q = 0; q < m; q++) {
            query[q] = Wide::repeat_eight(queries[q] + i);
        }
        for (int k = 0; k < 4; k++) {
            const Wide::F own = cell(k, i);
            for (int q = 0; q < m; q++) {
                sums[q][k] = Wide::multiply_add(query[q], own, sums[q][k]);
            }
        }
    }
    for (int q = 0; q < m; q++) {
        Wide::store_sums_of_eights(out[q] + c, sums[q]);
    }
}

// m queries with all cells that are converted: [n / of_four][size / 8][4] vectors.
template <int m>
PYFLY_INLINE void dot_converted(const float * converted, int n, int size, const float * const * queries,
                                float * const * out) {
    for (int c = 0; c < n; c += of_four, converted += of_four * size) {
        dot_four<m>(size, queries, out, c,
                    [&](int k, int i) { return Wide::load_float(converted + (i / 8 * 4 + k) * Wide::lanes); });
    }
}

template <int m>
PYFLY_INLINE void dot_halves(Cells cells, int size, const float * const * queries, float * const * out) {
    for (int c = 0; c < cells.n; c += of_four) {
        const uint16_t * rows[of_four];
        for (int k = 0; k < of_four; k++) {
            rows[k] = static_cast<const uint16_t *>(cells.rows[c + k < cells.n ? c + k : cells.n - 1]);
        }
        dot_four<m>(size, queries, out, c, [&](int k, int i) { return Wide::eights_of_halves(rows + k, i); });
    }
}

void dot_products(Cells cells, int size, const float * const * queries, int n_queries, float * const * out,
                  float * converted) {
    if (cells.type == CellType::f16 && n_queries < worth_converting) {
        return n_queries == 2   ? dot_halves<2>(cells, size, queries, out)
               : n_queries == 1 ? dot_halves<1>(cells, size, queries, out)
                                : void();
    }
    for (int c = 0; c < (cells.n + of_four - 1) / of_four * of_four; c++) {
        const int k = c % of_four; // in its four: of vector k % 4
        convert_row(cells.type, cells.rows[c < cells.n ? c : cells.n - 1], size,
                    converted + (c - k) * size + k % 4 * Wide::lanes + k / 4 * 8, 4 * Wide::lanes);
    }
    constexpr int m = Wide::queries_together;
    int q = 0;
    for (; q + m <= n_queries; q += m) {
        dot_converted<m>(converted, cells.n, size, queries + q, out + q);
    }
    switch (n_queries - q) {
        case 3:
            return dot_converted<3>(converted, cells.n, size, queries + q, out + q);
        case 2:
            return dot_converted<2>(converted, cells.n, size, queries + q, out + q);
        case 1:
            return dot_converted<1>(converted, cells.n, size, queries + q, out + q);
        default:
            return;
    }
}

// ---- Scores and weights ---------------------------------------------------------------------------------------------

float finish(float * x, float scale, float cap, const float * bias) {
    const Wide::F scales = Wide::fill(scale), nothing = Wide::fill(-INFINITY);
    Wide::F most = nothing;
    for (int i = 0; i < tile; i += Wide::lanes) {
        Wide::F v = Wide::multiply(Wide::load_float(x + i), scales);
        if (cap != 0.0f) {
            Wide::store(x + i, v);
            for (int c = i; c < i + Wide::lanes; c++) {
                x[c] = cap * tanhf(x[c]);
            }
            v = Wide::load_float(x + i);
        }
        if (bias != nullptr) {
            const Wide::F own = Wide::load_float(bias + i);
            v = Wide::equal_or(own, nothing, Wide::add_floats(v, own));
        }
        Wide::store(x + i, v);
        most = Wide::larger(v, most);
    }
    return Wide::largest_lane(most);
}

// 2^n exp(r), with n = round(x / ln 2) and |r| <= ln 2 / 2; exp(r) by Taylor's sum of seven terms after the first,
// whose rest is below 2^-27. x in -87..0.
PYFLY_INLINE Wide::F exp_of(Wide::F x) {
    const Wide::F n = Wide::round(Wide::multiply(x, Wide::fill(1.44269504f)));
    Wide::F r = Wide::multiply_subtract(n, Wide::fill(0.693359375f), x); // ln 2 in two parts
    r = Wide::multiply_subtract(n, Wide::fill(-2.12194440e-4f), r);
    constexpr float terms[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
    Wide::F sum = Wide::fill(1.0f / 5040.0f);
#pragma GCC unroll 7
    for (const float term : terms) {
        sum = Wide::multiply_add(sum, r, Wide::fill(term));
    }
    return Wide::multiply(sum, Wide::power_of_two(n));
}

int64_t exponentials(float * x, float most) {
    const Wide::F least = Wide::fill(-87.0f), own = Wide::fill(most);
    Wide::Sum sum = Wide::zero_sum();
    for (int i = 0; i < tile; i += Wide::lanes) {
        const Wide::F v = Wide::subtract_floats(Wide::load_float(x + i), own);
        // Below the least nothing; what is no number stays so.
        const Wide::F weights = Wide::zero_below(v, least, exp_of(Wide::larger(least, v)));
        Wide::store(x + i, weights);
        sum = Wide::add_rounded(sum, weights);
    }
    return Wide::total(sum, tile);
}

// ---- Weights by values ----------------------------------------------------------------------------------------------

// out[q][at..at + lanes w - 1] += the weighted cells, for m queries.
template <class L, int m, int w, class Number>
PYFLY_INLINE void add_columns(const Number * const * cells, int n, int at, const float * const * weights,
                              float * const * out) {
    typename L::F sums[m][w];
    for (int q = 0; q < m; q++) {
        for (int k = 0; k < w; k++) {
            sums[q][k] = L::load_float(out[q] + at + L::lanes * k);
        }
    }
    for (int c = 0; c < n; c++) {
        typename L::F values[w];
        for (int k = 0; k < w; k++) {
            values[k] = L::numbers(cells[c] + at + L::lanes * k);
        }
        for (int q = 0; q < m; q++) {
            const typename L::F weight = L::fill(weights[q][c]);
            for (int k = 0; k < w; k++) {
                sums[q][k] = L::multiply_add(weight, values[k], sums[q][k]);
            }
        }
    }
    for (int q = 0; q < m; q++) {
        for (int k = 0; k < w; k++) {
            L::store(out[q] + at + L::lanes * k, sums[q][k]);
        }
    }
}

template <int m, int w, class Number>
PYFLY_INLINE void add_rows(const Number * const * cells, int n, int size, const float * const * weights,
                           float * const * out) {
    constexpr int lanes = Wide::lanes;
    int at = 0;
    for (; at + lanes * w <= size; at += lanes * w) {
        add_columns<Wide, m, w>(cells, n, at, weights, out);
    }
    for (; at + lanes <= size; at += lanes) {
        add_columns<Wide, m, 1>(cells, n, at, weights, out);
    }
    for (; at < size; at += 8) {
        add_columns<Eight, m, 1>(cells, n, at, weights, out);
    }
}

template <class Number>
PYFLY_INLINE void add_all(const Number * const * cells, int n, int size, const float * const * weights, int n_queries,
                          float * const * out) {
    constexpr int w = Wide::lanes == 16 ? 4 : 2;
    int q = 0;
    for (; q + 4 <= n_queries; q += 4) {
        add_rows<4, w>(cells, n, size, weights + q, out + q);
    }
    switch (n_queries - q) {
        case 3:
            return add_rows<3, w>(cells, n, size, weights + q, out + q);
        case 2:
            return add_rows<2, 4>(cells, n, size, weights + q, out + q);
        case 1:
            return add_rows<1, 8>(cells, n, size, weights + q, out + q);
        default:
            return;
    }
}

void add_weighted(Cells cells, int size, const float * const * weights, int n_queries, float * const * out,
                  float * converted) {
    if (cells.type == CellType::f16 && n_queries < worth_converting) {
        const uint16_t * rows[tile];
        for (int c = 0; c < cells.n; c++) {
            rows[c] = static_cast<const uint16_t *>(cells.rows[c]);
        }
        return add_all(rows, cells.n, size, weights, n_queries, out);
    }
    const float * rows[tile];
    for (int c = 0; c < cells.n; c++) {
        float * const room = converted + c * size;
        convert(cells.type, cells.rows[c], size, room);
        rows[c] = room;
    }
    add_all(rows, cells.n, size, weights, n_queries, out);
}

} // namespace

const Attention attention = {dot_products, finish, exponentials, add_weighted, convert};

} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
