// The row passes as compiled for each instruction set; rows.cpp picks one at run time.
#pragma once

#include <cstddef>

#include "divergence.h"

namespace pyfly {

constexpr size_t block_size = 1024;

// Sums over a row, with x = logit - max.
struct ExpSums {
    double exp;         // sum exp(x)
    double exp_times_x; // sum x exp(x)
};

// Of a row: probabilities are exp(logit - max) / sum.
struct RowScale {
    float max;
    double sum, ln_sum; // sum exp(logit - max), and its logarithm
};

// Over some tokens of two rows.
struct PairSums {
    double divergence = 0.0; // its terms, each >= 0; of the total variation those where p >= q
    double tv_below = 0.0;   // total variation only: the terms where p < q
    double p_above = 0.0;    // total variation only: p where p > q
    double p = 0.0, q = 0.0; // probabilities
};

// Largest difference of two rows' logits; +inf where one forbids what the other does not.
struct LogitGaps {
    float q_over_p, p_over_q;
};

#define PYFLY_DECLARE_ROW_KERNELS(level)                                                                               \
    namespace level {                                                                                                  \
    /* Largest logit of every block of block_size: maxima[ceil(n / block_size)]. False if the row holds a NaN. */      \
    bool block_maxima(const float * row, size_t n, float * maxima);                                                    \
    ExpSums exp_sums(const float * row, size_t n, float max);                                                          \
    /* What n tokens add to a divergence. */                                                                           \
    PairSums divergence_sums(Divergence kind, const float * p_row, const float * q_row, size_t n, const RowScale & p,  \
                             const RowScale & q);                                                                      \
    LogitGaps logit_gaps(const float * p_row, const float * q_row, size_t n);                                          \
    }

PYFLY_DECLARE_ROW_KERNELS(baseline)
PYFLY_DECLARE_ROW_KERNELS(avx2)
PYFLY_DECLARE_ROW_KERNELS(avx512)

#undef PYFLY_DECLARE_ROW_KERNELS

struct RowKernels {
    const char * level;
    decltype(&baseline::block_maxima) block_maxima;
    decltype(&baseline::exp_sums) exp_sums;
    decltype(&baseline::divergence_sums) divergence_sums;
    decltype(&baseline::logit_gaps) logit_gaps;
};

// The best this processor has; the environment variable PYFLY_SIMD ("avx2", "baseline") asks for less, for tests.
extern const RowKernels row_kernels;

} // namespace pyfly
