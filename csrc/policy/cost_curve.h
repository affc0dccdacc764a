// What n of something cost: rows of a target batch, tokens of a draft, requests in a step of a draft. It is no straight
// line (kernels work on blocks of rows), so sizes are kept apart. Sizes that were measured with care beforehand are
// expected; what comes later scales all of them (load, context length) and corrects each a little.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyfly {

class CostCurve {
  public:
    static constexpr int32_t n_max = 512;

    struct Rates {
        double all = 0.3;   // how far all sizes follow a time of one of them
        double own = 0.1;   // how much further its own does, at least
        double most = 1.25; // what one time counts for, at most: another process woke up
    };

    // Before two sizes are known: either nothing costs nothing, and n cost n times one, or each more than one costs
    // `slope` times one.
    static CostCurve from_zero(Rates rates) { return {0, 1.0, rates}; }
    static CostCurve from_one(double slope, Rates rates) { return {1, slope, rates}; }

    // Microseconds > 0 that n took, 1 <= n; ignored beyond n_max. expect: measured with care, beforehand.
    void expect(int32_t n, double us);
    void observe(int32_t n, double us);

    // Microseconds expected of n >= 0: measured, a straight line between measured sizes, and behind the largest one the
    // slope from the smallest. While nothing is known: in units of one.
    double at(int32_t n) const { return n <= largest_ ? us_[static_cast<size_t>(n)] : beyond(n); }

    // Of n on average.
    double at_mean(double n) const {
        const int32_t below = static_cast<int32_t>(n);
        const double more = n - below;
        return more > 0.0 ? (1.0 - more) * at(below) + more * at(below + 1) : at(below);
    }

    bool is_known() const { return n_known_ > 0; }

  private:
    CostCurve(int32_t first, double slope, Rates rates);
    void set(int32_t n, double us);
    void fill_in();
    double beyond(int32_t n) const;
    double line(int32_t n) const { return first_ == 0 ? n : n == 0 ? 0.0 : 1.0 + slope_ * (n - 1); }

    int32_t first_;
    double slope_;
    Rates rates_;
    std::vector<double> us_;         // [n_max + 1], up to the largest measured size
    std::vector<double> n_measured_; // [n_max + 1]
    int32_t n_known_ = 0;            // measured sizes
    int32_t smallest_ = 0, largest_ = 0;
};

} // namespace pyfly
