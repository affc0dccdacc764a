#include "attention.h"

#include <cmath>

#include <immintrin.h>

#define PYFLY_INLINE inline __attribute__((always_inline))

namespace pyfly::kernels {
namespace avx2 {

namespace {

constexpr int worth_converting = 3; // queries: below, a cell is converted for each of them

PYFLY_INLINE __m256 load(const float * p) {
    return _mm256_loadu_ps(p);
}

PYFLY_INLINE __m256 load(const uint16_t * p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}

// The same cells as floats.
struct Converted {
    const float * rows[tile];

    Converted(Cells cells, int size, float * room) {
        for (int c = 0; c < cells.n; c++, room += size) {
            for (int i = 0; i < size; i += 8) {
                _mm256_storeu_ps(room + i, load(cells.rows[c] + i));
            }
            rows[c] = room;
        }
    }
};

// The sums of the lanes of four vectors.
PYFLY_INLINE __m128 sums_of_lanes(const __m256 * v) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
}

// Dot products of m queries with four cells.
template <int m, class Number>
PYFLY_INLINE void dot_four(const Number * const * rows, int size, const float * const * queries, float * const * out,
                           int c) {
    __m256 sums[m][4];
    for (int q = 0; q < m; q++) {
        for (int k = 0; k < 4; k++) {
            sums[q][k] = _mm256_setzero_ps();
        }
    }
    for (int i = 0; i < size; i += 8) {
        for (int k = 0; k < 4; k++) {
            const __m256 cell = load(rows[k] + i);
            for (int q = 0; q < m; q++) {
                sums[q][k] = _mm256_fmadd_ps(load(queries[q] + i), cell, sums[q][k]);
            }
        }
    }
    for (int q = 0; q < m; q++) {
        _mm_storeu_ps(out[q] + c, sums_of_lanes(sums[q]));
    }
}

template <class Number>
void dot_rows(const Number * const * cells, int n, int size, const float * const * queries, int n_queries,
              float * const * out) {
    for (int c = 0; c < n; c += 4) {
        const Number * rows[4];
        for (int k = 0; k < 4; k++) {
            rows[k] = cells[c + k < n ? c + k : n - 1];
        }
        int q = 0;
        for (; q + 2 <= n_queries; q += 2) {
            dot_four<2>(rows, size, queries + q, out + q, c);
        }
        if (q < n_queries) {
            dot_four<1>(rows, size, queries + q, out + q, c);
        }
    }
}

void dot_products(Cells cells, int size, const float * const * queries, int n_queries, float * const * out,
                  float * converted) {
    if (n_queries < worth_converting) {
        dot_rows(cells.rows, cells.n, size, queries, n_queries, out);
    } else {
        dot_rows(Converted(cells, size, converted).rows, cells.n, size, queries, n_queries, out);
    }
}

float largest(const float * x, int n) {
    __m256 most = _mm256_set1_ps(-INFINITY);
    for (int i = 0; i < n; i += 8) {
        most = _mm256_max_ps(most, load(x + i));
    }
    float lanes[8];
    _mm256_storeu_ps(lanes, most);
    for (int i = 1; i < 8; i++) {
        lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    }
    return lanes[0];
}

// 2^n exp(r), with n = round(x / ln 2) and |r| <= ln 2 / 2; exp(r) by Taylor's sum of seven terms after the first,
// whose rest is below 2^-27. x in -87..0.
PYFLY_INLINE __m256 exp_of(__m256 x) {
    const __m256 n =
        _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x); // ln 2 in two parts
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    constexpr float terms[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
    __m256 sum = _mm256_set1_ps(1.0f / 5040.0f);
#pragma GCC unroll 7
    for (const float term : terms) {
        sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(term));
    }
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(sum, _mm256_castsi256_ps(power));
}

void exponentials(float * x, int n, float most) {
    const __m256 least = _mm256_set1_ps(-87.0f);
    for (int i = 0; i < n; i += 8) {
        const __m256 v = _mm256_sub_ps(load(x + i), _mm256_set1_ps(most));
        const __m256 counts = _mm256_cmp_ps(v, least, _CMP_NLT_UQ); // NaN as well
        _mm256_storeu_ps(x + i, _mm256_and_ps(exp_of(_mm256_max_ps(least, v)), counts));
    }
}

// out[q][at..at + 8 w - 1] += the weighted cells, for m queries.
template <int m, int w, class Number>
PYFLY_INLINE void add_columns(const Number * const * cells, int n, int at, const float * const * weights,
                              float * const * out) {
    __m256 sums[m][w];
    for (int q = 0; q < m; q++) {
        for (int k = 0; k < w; k++) {
            sums[q][k] = load(out[q] + at + 8 * k);
        }
    }
    for (int c = 0; c < n; c++) {
        const Number * row = cells[c] + at;
        __m256 values[w];
        for (int k = 0; k < w; k++) {
            values[k] = load(row + 8 * k);
        }
        for (int q = 0; q < m; q++) {
            const __m256 weight = _mm256_broadcast_ss(weights[q] + c);
            for (int k = 0; k < w; k++) {
                sums[q][k] = _mm256_fmadd_ps(weight, values[k], sums[q][k]);
            }
        }
    }
    for (int q = 0; q < m; q++) {
        for (int k = 0; k < w; k++) {
            _mm256_storeu_ps(out[q] + at + 8 * k, sums[q][k]);
        }
    }
}

template <int m, int w, class Number>
void add_rows(const Number * const * cells, int n, int size, const float * const * weights, float * const * out) {
    int at = 0;
    for (; at + 8 * w <= size; at += 8 * w) {
        add_columns<m, w>(cells, n, at, weights, out);
    }
    for (; at < size; at += 8) {
        add_columns<m, 1>(cells, n, at, weights, out);
    }
}

template <class Number>
void add_all(const Number * const * cells, int n, int size, const float * const * weights, int n_queries,
             float * const * out) {
    int q = 0;
    for (; q + 4 <= n_queries; q += 4) {
        add_rows<4, 2>(cells, n, size, weights + q, out + q);
    }
    switch (n_queries - q) {
        case 3:
            return add_rows<3, 2>(cells, n, size, weights + q, out + q);
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
    if (n_queries < worth_converting) {
        add_all(cells.rows, cells.n, size, weights, n_queries, out);
    } else {
        add_all(Converted(cells, size, converted).rows, cells.n, size, weights, n_queries, out);
    }
}

} // namespace

const Attention attention = {dot_products, largest, exponentials, add_weighted};

} // namespace avx2
} // namespace pyfly::kernels
