#include "transcript.h"

#include <algorithm>

#include "error.h"

namespace pyfly {

namespace {

// A committed token; `sign` -1 takes it back.
void count(const pyfly_record & record, int sign, pyfly_stats & stats) {
    stats.committed += sign;
    if (record.origin == PYFLY_ORIGIN_MATCHED) {
        stats.matched += sign;
    }
    if (record.origin == PYFLY_ORIGIN_LOOSE) {
        stats.loose_accepted += sign;
        stats.sum_margin_loose += sign * record.margin;
    }
    if (record.step == 0) {
        stats.committed_first += sign;
    }
    if (record.depth > 0) {
        stats.accepted_at[std::min(record.depth, PYFLY_MAX_DEPTH) - 1] += sign;
        stats.accepted_by[record.drafter] += sign;
    }
}

} // namespace

void Transcript::begin(std::vector<int32_t> history, size_t n_vocab, Keeps keeps) {
    history_ = std::move(history);
    n_vocab_ = n_vocab;
    keeps_ = keeps;
    pending_.clear();
    open_.clear();
    begin_step();
}

void Transcript::begin_step() {
    records_.clear();
    rejected_.clear();
    rows_.clear();
    samplers_.clear();
}

void Transcript::push(const pyfly_record & record, const float * row, std::vector<int32_t> rejected) {
    history_.push_back(record.token);
    Pending pending = {record, std::move(rejected), {}, nullptr};
    if (keeps_.rows && row != nullptr) {
        pending.row.assign(row, row + n_vocab_);
    }
    pending_.push_back(std::move(pending));
}

void Transcript::keep_sampler(const Sampler & sampler) {
    if (keeps_.samplers && !pending_.empty() && !pending_.back().sampler) {
        pending_.back().sampler = sampler.clone();
    }
}

void Transcript::defer(const pyfly_record & choice, std::unique_ptr<Sampler> sampler) {
    open_.push_back({choice, std::move(sampler)});
}

void Transcript::forget_decided(const Window & window) {
    open_.erase(
        std::remove_if(open_.begin(), open_.end(), [&](const Open & o) { return !window.is_open(o.choice.position); }),
        open_.end());
}

std::unique_ptr<Sampler> Transcript::roll_back(const Window::Rejection & rejection, int64_t & rolled_back,
                                               pyfly_record & choice) {
    const auto open = std::find_if(open_.begin(), open_.end(),
                                   [&](const Open & o) { return o.choice.position == rejection.position; });
    const auto first = std::find_if(pending_.begin(), pending_.end(),
                                    [&](const Pending & p) { return p.record.position == rejection.position; });
    if (open == open_.end() || first == pending_.end()) {
        throw Error(PYFLY_STATUS_INTERNAL, "a window was broken that is not open");
    }
    const size_t n_keep = static_cast<size_t>(rejection.position);
    std::vector<int32_t> rejected(history_.begin() + static_cast<std::ptrdiff_t>(n_keep), history_.end());
    rolled_back = static_cast<int64_t>(rejected.size());
    const std::vector<float> row = std::move(first->row);
    pending_.erase(first, pending_.end());
    history_.resize(n_keep);
    std::unique_ptr<Sampler> sampler = std::move(open->sampler);
    choice = open->choice;
    choice.reason = rejection.reason;
    open_.erase(open, open_.end());
    push(choice, row.empty() ? nullptr : row.data(), std::move(rejected));
    return sampler;
}

void Transcript::take_back(size_t n) {
    while (!pending_.empty() && static_cast<size_t>(pending_.back().record.position) >= n) {
        pending_.pop_back();
    }
    history_.resize(n);
}

void Transcript::commit(int64_t end, pyfly_stats & stats) {
    size_t n = 0;
    for (; n < pending_.size() && pending_[n].record.position < end; n++) {
        Pending & pending = pending_[n];
        pyfly_record record = pending.record;
        record.rejected_begin = static_cast<int32_t>(rejected_.size());
        rejected_.insert(rejected_.end(), pending.rejected.begin(), pending.rejected.end());
        record.rejected_end = static_cast<int32_t>(rejected_.size());
        records_.push_back(record);
        if (keeps_.rows) {
            rows_.push_back(std::move(pending.row));
        }
        if (keeps_.samplers) {
            samplers_.push_back(std::move(pending.sampler));
        }
        count(record, 1, stats);
    }
    pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(n));
}

void Transcript::uncount(int64_t end, pyfly_stats & stats) const {
    for (const pyfly_record & record : records_) {
        if (record.position >= end) {
            count(record, -1, stats);
        }
    }
}

void Transcript::abandon(size_t n) {
    history_.resize(std::min(history_.size(), n));
    begin_step();
}

void Transcript::end() {
    pending_.clear();
    open_.clear();
    samplers_.clear(); // they may hold callbacks that live no longer than the request
}

const float * Transcript::row(size_t i) const {
    return i < rows_.size() && !rows_[i].empty() ? rows_[i].data() : nullptr;
}

} // namespace pyfly
