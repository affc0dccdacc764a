#include "confidence.h"

#include <algorithm>

namespace pyfly {

namespace {

double in_range(double p) {
    return p >= 0.0 ? std::min(p, 1.0) : 0.0; // NaN: it does not know
}

} // namespace

size_t Confidence::bin(double p) {
    return std::min(static_cast<size_t>(in_range(p) * n_bins), n_bins - 1);
}

double Confidence::right(double p) const {
    const Bin & counts = own_[bin(p)];
    const double more = (all_.right + rates_.weight) / (all_.seen + rates_.weight);
    return (counts.right + rates_.weight * in_range(more * in_range(p))) / (counts.seen + rates_.weight);
}

double Confidence::next(double p) const {
    const Bin & counts = next_[bin(p)];
    return (counts.right + rates_.weight * right(p)) / (counts.seen + rates_.weight);
}

void Confidence::count(Bin & bin, bool is_right, double expected) const {
    bin.right = rates_.memory * bin.right + (is_right ? 1.0 : 0.0);
    bin.seen = rates_.memory * bin.seen + expected;
}

void Confidence::observe(const std::vector<float> & p, size_t n_right, bool is_refuted) {
    const size_t n = std::min(p.size(), n_right + (is_refuted ? 1 : 0));
    for (size_t i = 0; i < n; i++) {
        count(own_[bin(p[i])], i < n_right);
        count(all_, i < n_right, in_range(p[i]));
        if (i > 0) {
            count(next_[bin(p[i - 1])], i < n_right);
        }
    }
}

} // namespace pyfly
