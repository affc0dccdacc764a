#include "cost_curve.h"

#include <algorithm>
#include <cmath>

namespace pyfly {

namespace {

size_t index(int32_t n) {
    return static_cast<size_t>(n);
}

} // namespace

CostCurve::CostCurve(int32_t first, double slope, Rates rates)
    : first_(first), slope_(slope), rates_(rates), us_(n_max + 1), n_measured_(n_max + 1) {}

void CostCurve::set(int32_t n, double us) {
    if (n_measured_[index(n)] == 0.0) {
        smallest_ = n_known_ > 0 ? std::min(smallest_, n) : n;
        largest_ = std::max(largest_, n);
        n_known_++;
    }
    us_[index(n)] = us;
}

void CostCurve::expect(int32_t n, double us) {
    if (n < 1 || n > n_max || !(us > 0.0)) {
        return;
    }
    set(n, us);
    n_measured_[index(n)] = 1.0 / rates_.own;
    fill_in();
}

void CostCurve::observe(int32_t n, double us) {
    if (n < 1 || n > n_max || !(us > 0.0)) {
        return;
    }
    double & n_measured = n_measured_[index(n)];
    if (n_known_ < 2 && n_measured == 0.0) {
        set(n, us); // what was expected of this size was a guess
    } else {
        // What is believed of a size before it was measured is worth one measurement.
        const double expected = at(n), ratio = std::clamp(us / expected, 1.0 / rates_.most, rates_.most);
        const double own = std::max(rates_.own, 1.0 / (2.0 + n_measured) - rates_.all);
        const double for_all = std::pow(ratio, rates_.all);
        set(n, expected * std::pow(ratio, own));
        for (int32_t i = 1; i <= largest_; i++) {
            us_[index(i)] *= for_all;
        }
    }
    n_measured++;
    fill_in();
}

// The sizes up to the largest measured one that were not measured themselves.
void CostCurve::fill_in() {
    for (int32_t n = 1; n < smallest_; n++) {
        us_[index(n)] = us_[index(smallest_)] * line(n) / line(smallest_);
    }
    for (int32_t below = smallest_; below < largest_;) {
        int32_t above = below + 1;
        while (n_measured_[index(above)] == 0.0) {
            above++;
        }
        const double low = us_[index(below)], slope = (us_[index(above)] - low) / (above - below);
        for (int32_t n = below + 1; n < above; n++) {
            us_[index(n)] = low + slope * (n - below);
        }
        below = above;
    }
}

// Behind the largest measured size.
double CostCurve::beyond(int32_t n) const {
    if (n_known_ < 2) {
        return n_known_ == 0 ? line(n) : us_[index(largest_)] * line(n) / line(largest_);
    }
    const double high = us_[index(largest_)];
    return high + std::max((high - us_[index(smallest_)]) / (largest_ - smallest_), 0.0) * (n - largest_);
}

} // namespace pyfly
