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

constexpr int worth_converting = 7; // queries: below, quantised keys are converted for every few of them

// Keys are multiplied in fours of vectors; vector k of a four has the eights of cells k, k + 4, ...
constexpr int of_vector = Wide::lanes / 8, of_four = 4 * of_vector;

// A number that is a type.
template <class T, T of> struct Constant {
    static constexpr T value = of;
};

// ---- What cells hold ------------------------------------------------------------------------------------------------

// Eight numbers of a cell from the i-th on, a multiple of eight.
template <CellType type> PYFLY_INLINE Eight::F eight_of(const void * row, int i) {
    using L = Eight;
    const uint8_t * bytes = static_cast<const uint8_t *>(row);
    if constexpr (type == CellType::f16) {
        return L::from_halves(bytes + 2 * i);
    } else if constexpr (type == CellType::bf16) {
        return L::from_bfloats(bytes + 2 * i);
    } else {
        constexpr int n_bytes = type == CellType::q8_0 ? 32 : 16; // behind the scale, F16
        bytes += i / 32 * (2 + n_bytes);
        const int k = i % 32 / 8;
        const L::I q =
            type == CellType::q8_0 ? L::from_bytes(bytes + 2 + 8 * k) : L::from_nibbles(bytes + 2 + 8 * (k % 2), k > 1);
        return L::multiply(L::fill_with_half(bytes), L::to_float(q));
    }
}

// Calls what(type), with a type that is known when this is compiled.
template <class What> PYFLY_INLINE void with_type(CellType type, What what) {
    switch (type) {
        case CellType::f16:
            return what(Constant<CellType, CellType::f16>());
        case CellType::bf16:
            return what(Constant<CellType, CellType::bf16>());
        case CellType::q8_0:
            return what(Constant<CellType, CellType::q8_0>());
        case CellType::q4_0:
            return what(Constant<CellType, CellType::q4_0>());
    }
}

void convert(CellType type, const void * row, int size, float * out) {
    with_type(type, [&](auto of) {
        for (int i = 0; i < size; i += 8) {
            Eight::store(out + i, eight_of<of.value>(row, i));
        }
    });
}

// Cell after cell at `converted`; rows[c] is where cell c begins.
template <class Row> PYFLY_INLINE void convert_all(Cells cells, int size, float * converted, Row * rows) {
    for (int c = 0; c < cells.n; c++, converted += size) {
        convert(cells.type, cells.rows[c], size, converted);
        rows[c] = converted;
    }
}

// Calls what(n), with an n <= most that is known when this is compiled, for 1 <= n.
template <int most, class What> PYFLY_INLINE void with_number(int n, What what) {
    if (n == most) {
        what(Constant<int, most>());
    } else if constexpr (most > 1) {
        with_number<most - 1>(n, what);
    }
}

// ---- Queries by keys ------------------------------------------------------------------------------------------------

// Dot products of m queries with the cells of a tile. eight_of(row, i): numbers i to i + 7 of a cell.
template <int m, class EightOf>
PYFLY_INLINE void multiply_keys(Cells cells, int size, const float * const * queries, float * const * out,
                                EightOf eight_of) {
    for (int c = 0; c < cells.n; c += of_four) {
        const void * rows[of_four];
        for (int k = 0; k < of_four; k++) {
            rows[k] = cells.rows[c + k < cells.n ? c + k : cells.n - 1];
        }
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
                Eight::F eights[of_vector];
                for (int part = 0; part < of_vector; part++) {
                    eights[part] = eight_of(rows[k + 4 * part], i);
                }
                const Wide::F own = Wide::join(eights);
                for (int q = 0; q < m; q++) {
                    sums[q][k] = Wide::multiply_add(query[q], own, sums[q][k]);
                }
            }
        }
        for (int q = 0; q < m; q++) {
            Wide::store_sums_of_eights(out[q] + c, sums[q]);
        }
    }
}

void dot_products(Cells cells, int size, const float * const * queries, int n_queries, float * const * out,
                  float * converted) {
    const auto multiply = [&](const void * const * rows, auto eight_of) {
        constexpr int most = Wide::queries_together;
        for (int q = 0; q < n_queries; q += most) {
            with_number<most>(n_queries - q < most ? n_queries - q : most, [&](auto m) {
                multiply_keys<m.value>({rows, cells.n, cells.type}, size, queries + q, out + q, eight_of);
            });
        }
    };
    const bool is_cheap = cells.type == CellType::f16 || cells.type == CellType::bf16;
    if (is_cheap || n_queries < worth_converting) {
        return with_type(cells.type, [&](auto of) {
            constexpr CellType type = decltype(of)::value;
            multiply(cells.rows, [](const void * row, int i) { return eight_of<type>(row, i); });
        });
    }
    const void * rows[tile];
    convert_all(cells, size, converted, rows);
    multiply(rows, [](const void * row, int i) { return Eight::load_float(static_cast<const float *>(row) + i); });
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
        if constexpr (m < w) {
            typename L::F own[m];
            for (int q = 0; q < m; q++) {
                own[q] = L::fill(weights[q][c]);
            }
            for (int k = 0; k < w; k++) {
                const typename L::F value = L::numbers(cells[c] + at + L::lanes * k);
                for (int q = 0; q < m; q++) {
                    sums[q][k] = L::multiply_add(own[q], value, sums[q][k]);
                }
            }
        } else {
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
    constexpr int most = 6;
    for (int q = 0; q < n_queries; q += most) {
        with_number<most>(n_queries - q < most ? n_queries - q : most, [&](auto m) {
            constexpr int w = m.value == 1 ? 8 : m.value < 4 || Wide::lanes == 16 ? 4 : 2;
            add_rows<m.value, w>(cells, n, size, weights + q, out + q);
        });
    }
}

void add_weighted(Cells cells, int size, const float * const * weights, int n_queries, float * const * out,
                  float * converted) {
    if (cells.type == CellType::f16) {
        const uint16_t * rows[tile];
        for (int c = 0; c < cells.n; c++) {
            rows[c] = static_cast<const uint16_t *>(cells.rows[c]);
        }
        return add_all(rows, cells.n, size, weights, n_queries, out);
    }
    const float * rows[tile];
    convert_all(cells, size, converted, rows);
    add_all(rows, cells.n, size, weights, n_queries, out);
}

} // namespace

const Attention attention = {dot_products, finish, exponentials, add_weighted, convert};

} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
