#include "thread_policy.h"

#include <algorithm>
#include <cmath>

namespace pyfly {

namespace {

// Each was varied in simulated worlds (docs/design/threads.md, "Constants").
constexpr double window_us = 100e3;      // of evaluating that is judged together: many time slices of the scheduler
constexpr int32_t low_windows = 2;       // in a row before a trial: a moment's work of others is not worth one
constexpr double long_us = 1e6;          // an evaluation that takes this long is reason enough, once
constexpr double missing_core = 0.4;     // cores fewer than threads that make a window low; a neighbour takes 0.5 to 1
constexpr double worth_it = 0.95;        // share of its former time under which a step down stays
constexpr double spent_on_trials = 0.01; // of the time, at most, on trials that fail
constexpr int32_t most_evaluations = 32; // of a trial, where kinds hardly repeat: an end, no tuning
constexpr int32_t exact_rows = 16;       // kernels work on blocks of rows: smaller batches have no cost per row

} // namespace

ThreadPolicy::ThreadPolicy(int32_t n_max, bool sees_cores) : n_max_(n_max), sees_cores_(sees_cores), n_(n_max) {}

void ThreadPolicy::begin_with(double n_cores) {
    n_ = std::clamp(static_cast<int32_t>(n_cores + missing_core), 1, n_max_);
}

int32_t ThreadPolicy::size_class(int32_t n_rows) {
    return n_rows <= exact_rows ? n_rows : exact_rows + 1 + std::ilogb(n_rows);
}

void ThreadPolicy::add(Kinds & kinds, const Evaluation & e) {
    const auto found = std::find_if(kinds.begin(), kinds.end(), [&](const Kind & kind) { return kind.is_of(e); });
    Kind & kind = found != kinds.end() ? *found : kinds.emplace_back(Kind{e.context, size_class(e.n_rows), 0.0, 0.0});
    kind.us += e.us;
    kind.n_rows += e.n_rows;
}

// What `kinds` let expect of an evaluation, in microseconds; 0: they have none of its kind.
double ThreadPolicy::expected(const Kinds & kinds, const Evaluation & e) {
    const auto found = std::find_if(kinds.begin(), kinds.end(), [&](const Kind & kind) { return kind.is_of(e); });
    return found != kinds.end() ? found->us / found->n_rows * e.n_rows : 0.0;
}

void ThreadPolicy::observe(const Evaluation & e) {
    if (n_max_ < 2 || e.us <= 0.0) {
        return;
    }
    wait_us_ -= e.us;
    if (trial_ > 0) {
        observe_trial(e);
        return;
    }
    add(window_, e);
    us_ += e.us;
    cpu_us_ += e.cpu_us;
    if (const double with_other = expected(with_other_, e); with_other > 0.0) {
        comparable_us_ += e.us;
        with_other_us_ += with_other;
    }
    if (us_ >= window_us) {
        close_window();
    }
}

void ThreadPolicy::observe_trial(const Evaluation & e) {
    add(on_trial_, e);
    n_evaluated_++;
    if (const double before = expected(reference_, e); before > 0.0) {
        spent_us_ += e.us;
        expected_us_ += before;
    } else {
        unknown_us_ += e.us;
    }
    const bool is_hopeless = spent_us_ - expected_us_ > window_us || unknown_us_ > long_us;
    if (is_hopeless || expected_us_ >= window_us || n_evaluated_ >= most_evaluations) {
        // n_max is what a free machine is best with, so upwards it is enough that nothing is lost.
        end_trial(trial_ < n_ ? spent_us_ < worth_it * expected_us_ : spent_us_ <= expected_us_ && expected_us_ > 0.0);
    }
}

void ThreadPolicy::close_window() {
    const double n_cores = cpu_us_ / us_;
    const bool is_missing_cores = n_ > 1 && n_cores < n_ - missing_core;
    const bool is_other_better = other_ > 0 && with_other_us_ < worth_it * comparable_us_;
    const bool is_long = us_ >= long_us;
    us_ = cpu_us_ = 0.0;
    if (is_missing_cores && ++n_low_ < low_windows && !is_long) {
        return;
    }
    n_low_ = 0;
    // What a failed trial cost is not paid again, unless there is more room than it had.
    const bool may_rise = wait_us_ <= 0.0 || seen_cores_ >= cores_of_failure_ + missing_core;
    const int32_t n_room = sees_cores_ ? static_cast<int32_t>(seen_cores_ + missing_core) : n_max_;
    if (is_other_better && (is_missing_cores || (other_ > n_ && other_ <= n_room))) {
        start_trial(other_);
    } else if (is_missing_cores && wait_us_ <= 0.0) {
        const int32_t n = std::max(1, static_cast<int32_t>(n_cores));
        start_trial(other_ > 1 && other_ <= n ? other_ / 2 : n);
    } else if (n_ < n_max_ && may_rise) {
        const int32_t n = sees_cores_ ? n_room : n_ + std::max(1, n_ / 4);
        if (n > n_) {
            start_trial(std::min(n, n_max_));
        }
    }
    window_.clear();
    seen_cores_ = comparable_us_ = with_other_us_ = 0.0;
}

void ThreadPolicy::start_trial(int32_t n) {
    trial_ = n;
    trial_cores_ = seen_cores_;
    reference_ = window_;
    on_trial_.clear();
    spent_us_ = expected_us_ = unknown_us_ = 0.0;
    n_evaluated_ = 0;
    n_trials_++;
}

void ThreadPolicy::end_trial(bool stays) {
    if (stays) {
        other_ = n_;
        with_other_ = std::move(reference_);
        n_ = trial_;
        n_changes_++;
    } else {
        other_ = trial_;
        with_other_ = std::move(on_trial_);
        // Of what nothing is known, twice the time it took: a prompt's batches do not all run on trial.
        wait_us_ = std::max(0.0, spent_us_ - expected_us_) / spent_on_trials + 2.0 * unknown_us_;
        cores_of_failure_ = trial_ > n_ ? trial_cores_ : n_max_;
    }
    trial_ = 0;
}

} // namespace pyfly
