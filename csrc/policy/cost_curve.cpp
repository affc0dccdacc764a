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
    : first_(first), slope_(slope), rates_(rates), us_(n_max + 1), n_measured_(n_max + 1) {
    fill_in();
}

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
        // What is believed of a size is worth one measurement before the first, and most when it was measured with
        // care.
        const double ratio = std::clamp(us / at(n), 1.0 / rates_.most, rates_.most);
        const double own = std::max(rates_.own, 1.0 / (2.0 + n_measured) - rates_.all);
        const double for_all = std::pow(ratio, rates_.all);
        set(n, us_[index(n)] * std::pow(ratio, own));
        for (double & each : us_) {
            each *= for_all;
        }
    }
    n_measured++;
    fill_in();
}

// The sizes that were not measured.
void CostCurve::fill_in() {
    if (n_known_ < 2) {
        const double unit = n_known_ == 0 ? 1.0 : us_[index(largest_)] / line(largest_);
        for (int32_t n = 0; n <= n_max; n++) {
            us_[index(n)] = unit * line(n);
        }
        return;
    }
    for (int32_t n = 0; n < smallest_; n++) {
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
    const double high = us_[index(largest_)];
    const double slope = std::max((high - us_[index(smallest_)]) / (largest_ - smallest_), 0.0);
    for (int32_t n = largest_ + 1; n <= n_max; n++) {
        us_[index(n)] = high + slope * (n - largest_);
    }
}

double CostCurve::at(int32_t n) const {
    const double last = us_[n_max];
    return n <= n_max ? us_[index(n)] : last + (n - n_max) * (last - us_[n_max - 1]);
}

} // namespace pyfly
