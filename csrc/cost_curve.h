// What n of something cost: rows of a target batch, tokens of a draft. Learned from one measurement after the other. It
// is no straight line (kernels work on blocks of rows, a draft's first step takes two tokens), so sizes are kept apart.
#pragma once

#include <array>
#include <cstdint>

#include "pyfly.h"

namespace pyfly {

class CostCurve {
  public:
    static constexpr int32_t n_max = PYFLY_MAX_DEPTH + 1;

    // Of the first two measurements of a size the shorter counts: the first use of anything is slow.
    static constexpr int64_t n_confirmed = 2;

    // Either nothing costs nothing, or, while only one size is known, each more costs `slope` of what one costs.
    static CostCurve from_zero() { return {0, 0.0}; }
    static CostCurve from_one(double slope) { return {1, slope}; }

    // Microseconds > 0 that n took, 1 <= n; ignored beyond n_max.
    void observe(int32_t n, double us);

    // Microseconds expected of n >= 1: measured, a straight line between measured sizes, and behind the largest one the
    // slope from the smallest (of a single size, from where the curve begins). Requires a measurement, of one if the
    // curve begins there.
    double at(int32_t n) const;

    bool is_known(int32_t n) const { return n == 0 ? first_ == 0 : n <= n_max && n_measured_[index(n)] > 0; }
    bool knows_more_than_one() const { return n_total_ > n_measured_[1]; }
    int64_t n_measured() const { return n_total_; } // of all sizes

  private:
    CostCurve(int32_t first, double slope) : first_(first), slope_(slope) {}

    static size_t index(int32_t n) { return static_cast<size_t>(n); }

    int32_t first_; // where the curve begins
    double slope_;
    std::array<double, n_max + 1> us_ = {};
    std::array<int64_t, n_max + 1> n_measured_ = {};
    int64_t n_total_ = 0;
};

} // namespace pyfly
