#include "cost_curve.h"

#include <algorithm>
#include <cmath>

namespace pyfly {

namespace {

constexpr double rate = 0.4;         // weight of a new time in its estimate
constexpr double drift_rate = 0.1;   // how far the other sizes follow: load and context length change them all alike
constexpr double trusted_after = 10; // measurements of a size after which the others follow it as far as that

} // namespace

void CostCurve::observe(int32_t n, double us) {
    if (n < 1 || n > n_max || us <= 0.0) {
        return;
    }
    n_total_++;
    double & own = us_[index(n)];
    if (++n_measured_[index(n)] <= n_confirmed) {
        own = own == 0.0 ? us : std::min(own, us);
        return;
    }
    // One slow measurement (another process woke up) must not outweigh all that was seen. Of a size that was rarely
    // measured, the estimate was wrong; of one that is known well, the machine has changed.
    const double ratio = std::clamp(us / own, 0.5, 2.0);
    const double trust = std::min(static_cast<double>(n_measured_[index(n)] - n_confirmed) / trusted_after, 1.0);
    const double for_n = std::pow(ratio, rate), for_others = std::pow(ratio, trust * drift_rate);
    for (int32_t i = 1; i <= n_max; i++) {
        us_[index(i)] *= i == n ? for_n : for_others;
    }
}

double CostCurve::at(int32_t n) const {
    int32_t below = std::min(n, n_max), above = n + 1;
    while (below > first_ && !is_known(below)) {
        below--;
    }
    if (below == n) {
        return us_[index(n)];
    }
    while (above <= n_max && !is_known(above)) {
        above++;
    }
    const double low = us_[index(below)];
    double slope = slope_ * low;
    if (above <= n_max) {
        slope = (us_[index(above)] - low) / static_cast<double>(above - below);
    } else if (below > first_) {
        int32_t start = 1;
        while (start < below && !is_known(start)) {
            start++;
        }
        start = start < below ? start : first_;
        slope = std::max((low - us_[index(start)]) / static_cast<double>(below - start), 0.0);
    }
    return low + slope * static_cast<double>(n - below);
}

} // namespace pyfly
