#include "loop_guard.h"

#include <algorithm>

namespace pyfly {

void LoopGuard::begin(size_t n_prompt) {
    run_.fill(0);
    n_prompt_ = n_ = n_prompt;
    loop_begin_ = -1;
}

// One comparison for each period: linear in the text, whatever repeats in it.
void LoopGuard::push(const std::vector<int32_t> & history, size_t position) {
    loop_begin_ = -1;
    for (int32_t period = 1; period <= max_period; period++) {
        int32_t & run = run_[static_cast<size_t>(period)];
        const size_t p = static_cast<size_t>(period);
        run = position >= n_prompt_ + p && history[position] == history[position - p] ? run + 1 : 0;
        if (run >= std::max(2 * period, min_run) && loop_begin_ < 0) {
            loop_begin_ = static_cast<int64_t>(position) + 1 - run;
        }
    }
    n_ = position + 1;
}

void LoopGuard::follow(const std::vector<int32_t> & history, size_t n_same) {
    n_same = std::min({n_same, n_, history.size()});
    if (n_same < n_) {
        // Tokens were taken back. A run is at most as long as the text; it is counted again from where it can matter.
        const size_t reach = static_cast<size_t>(3 * max_period + min_run);
        const size_t from = std::max(n_prompt_, n_same > reach ? n_same - reach : 0);
        run_.fill(0);
        loop_begin_ = -1;
        for (size_t i = from; i < n_same; i++) {
            push(history, i);
        }
        n_ = n_same;
    }
    for (size_t i = std::max(n_, n_prompt_); i < history.size(); i++) {
        push(history, i);
    }
}

} // namespace pyfly
