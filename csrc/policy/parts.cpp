#include "parts.h"

#include <algorithm>

namespace pyfly {

namespace {

constexpr int32_t n_first = 2;        // times that each way is tried to begin with
constexpr double rate = 0.3;          // how far what is known follows a batch ...
constexpr double rate_of_trial = 0.5; // ... and a trial, since the last one is long ago
constexpr double most = 1.5;          // what one batch counts for, at most: another process woke up

} // namespace

size_t BatchParts::choose(size_t n_rows, size_t n_requests) {
    n_rows_ = 0;
    if (n_rows < n_rows_least || n_requests < 2) {
        return 1;
    }
    n_rows_ = n_rows;
    if (n_seen_[whole] < n_first || n_seen_[cut] < n_first) {
        way_ = n_seen_[cut] < n_seen_[whole] ? cut : whole;
    } else {
        way_ = (faster() == cut) != (n_until_trial_ == 0) ? cut : whole;
    }
    return way_ == whole ? 1 : std::min((n_rows + n_rows_wanted - 1) / n_rows_wanted, n_requests);
}

void BatchParts::observe(double us) {
    if (n_rows_ == 0) {
        return;
    }
    const double of_row = us / static_cast<double>(n_rows_);
    const bool is_known = n_seen_[whole] >= n_first && n_seen_[cut] >= n_first;
    const Way before = faster();
    double & known = us_of_row_[way_];
    const int32_t n_seen = n_seen_[way_]++;
    if (n_seen < n_first) {
        known = n_seen == 0 ? of_row : std::min(known, of_row);
    } else {
        known += (way_ == before ? rate : rate_of_trial) * (std::min(of_row, most * known) - known);
    }
    if (!is_known) {
        return;
    }
    if (faster() != before) {
        wait_ = n_until_trial_ = wait_least;
    } else if (way_ == before) {
        n_until_trial_ = std::max(n_until_trial_ - 1, 0);
    } else if (of_row >= us_of_row_[before]) { // else it is tried once more at once
        wait_ = std::min(2 * wait_, wait_most);
        n_until_trial_ = wait_;
    }
}

} // namespace pyfly
