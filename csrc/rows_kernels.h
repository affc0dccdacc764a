// The row passes as compiled for each instruction set; rows.cpp picks one at run time.
#pragma once

#include <cstddef>

namespace pyfly {

constexpr size_t block_size = 1024;

// Sums over a row, with x = logit - max.
struct ExpSums {
    double exp;         // sum exp(x)
    double exp_times_x; // sum x exp(x)
};

#define PYFLY_DECLARE_ROW_KERNELS(level)                                                                               \
    namespace level {                                                                                                  \
    /* Largest logit of every block of block_size: maxima[ceil(n / block_size)]. False if the row holds a NaN. */      \
    bool block_maxima(const float * row, size_t n, float * maxima);                                                    \
    ExpSums exp_sums(const float * row, size_t n, float max);                                                          \
    }

PYFLY_DECLARE_ROW_KERNELS(baseline)
PYFLY_DECLARE_ROW_KERNELS(avx2)
PYFLY_DECLARE_ROW_KERNELS(avx512)

#undef PYFLY_DECLARE_ROW_KERNELS

struct RowKernels {
    const char * level;
    decltype(&baseline::block_maxima) block_maxima;
    decltype(&baseline::exp_sums) exp_sums;
};

// The best this processor has; the environment variable PYFLY_SIMD ("avx2", "baseline") asks for less, for tests.
extern const RowKernels row_kernels;

} // namespace pyfly
