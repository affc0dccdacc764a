#include "engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <string>

#include "error.h"
#include "verify.h"

namespace pyfly {

namespace {

constexpr double not_measured = std::numeric_limits<double>::quiet_NaN();
constexpr pyfly_gate_node exact_gate = {PYFLY_GATE_EXACT, 0, 0.0};
constexpr pyfly_window_config default_window = {6, PYFLY_WINDOW_AGREE, -1, 0};

// Adds the microseconds of its own life to a counter.
class Stopwatch {
  public:
    explicit Stopwatch(int64_t & counter) : counter_(counter), start_(std::chrono::steady_clock::now()) {}
    ~Stopwatch() {
        counter_ +=
            std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start_).count();
    }
    Stopwatch(const Stopwatch &) = delete;
    Stopwatch & operator=(const Stopwatch &) = delete;

  private:
    int64_t & counter_;
    std::chrono::steady_clock::time_point start_;
};

} // namespace

Engine::Engine(Target & target)
    : target_(target), config_{Gate(&exact_gate, 1), default_window, 0, false, false}, window_(default_window) {}

void Engine::configure(EngineConfig config, Drafter * drafter) {
    if (config.draft_max < 0 || config.draft_max > target_.n_batch() - 1) {
        throw Error(PYFLY_STATUS_INVALID,
                    "draft_max is " + std::to_string(config.draft_max) + ", but one batch of " +
                        std::to_string(target_.n_batch()) +
                        " tokens holds the last token and the draft; keep draft_max under n_batch");
    }
    if (is_active_) {
        throw Error(PYFLY_STATUS_INVALID, "gate, window and drafter can be changed between requests, not during one");
    }
    window_ = Window(config.window); // throws before anything changed
    config_ = std::move(config);
    drafter_ = drafter;
}

void Engine::begin(std::vector<int32_t> history, size_t n_evaluated, std::unique_ptr<Sampler> sampler) {
    if (history.empty() || n_evaluated >= history.size()) {
        throw Error(PYFLY_STATUS_INVALID, "a sequence needs at least one token that is not evaluated yet");
    }
    if (history.size() > static_cast<size_t>(target_.n_ctx())) {
        throw Error(PYFLY_STATUS_CONTEXT_FULL, "the prompt has " + std::to_string(history.size()) +
                                                   " tokens and the context holds " + std::to_string(target_.n_ctx()) +
                                                   "; shorten the prompt or raise n_ctx");
    }
    for (const int32_t token : history) {
        if (token < 0 || token >= target_.n_vocab()) {
            throw Error(PYFLY_STATUS_INVALID, "token " + std::to_string(token) + " is outside the vocabulary of " +
                                                  std::to_string(target_.n_vocab()));
        }
    }
    is_active_ = false;
    target_.truncate(static_cast<int32_t>(n_evaluated));
    n_memory_ = n_evaluated;
    history_ = std::move(history);
    sampler_ = std::move(sampler);
    window_ = Window(config_.window);
    pending_.clear();
    open_.clear();
    records_.clear();
    rejected_.clear();
    record_rows_.clear();
    prompt_row_begin_ = prompt_row_end_ = 0;
    round_ = 0;
    is_active_ = true;
}

size_t Engine::prefill(bool all_rows) {
    if (!is_active_) {
        throw Error(PYFLY_STATUS_INVALID, "no sequence was begun");
    }
    const Stopwatch stopwatch(stats_.us_prefill);
    const size_t n_batch = static_cast<size_t>(target_.n_batch());
    // The first round evaluates the last batch together with its draft; if every row is wanted, only the last token.
    const size_t n_first_round = all_rows ? 1 : n_batch;
    size_t n_left = history_.size() - n_memory_;
    if (n_left > n_first_round) {
        const size_t n = std::min(n_batch, n_left - (all_rows ? 1 : 0));
        target_.evaluate(history_.data() + n_memory_, n, static_cast<int32_t>(n_memory_), all_rows ? 0 : n);
        prompt_row_begin_ = static_cast<int32_t>(n_memory_);
        n_memory_ += n;
        prompt_row_end_ = all_rows ? static_cast<int32_t>(n_memory_) : prompt_row_begin_;
        stats_.prefilled += static_cast<int64_t>(n);
        n_left -= n;
        return n_left; // > 0: the caller reads the rows before it asks again
    }
    prompt_row_begin_ = prompt_row_end_ = 0;
    return drafter_ && config_.draft_max > 0 && target_.can_rewind() ? drafter_->prepare(history_) : 0;
}

const float * Engine::prompt_row(int32_t position) const {
    if (position < prompt_row_begin_ || position >= prompt_row_end_) {
        return nullptr;
    }
    return target_.row(static_cast<size_t>(position - prompt_row_begin_));
}

std::vector<int32_t> Engine::propose(int32_t n_room) {
    std::vector<int32_t> draft;
    const size_t n_unevaluated = history_.size() - n_memory_;
    const int64_t n_max = std::min({static_cast<int64_t>(config_.draft_max), static_cast<int64_t>(n_room) - 1,
                                    static_cast<int64_t>(target_.n_ctx()) - static_cast<int64_t>(history_.size()),
                                    static_cast<int64_t>(target_.n_batch()) - static_cast<int64_t>(n_unevaluated)});
    if (drafter_ == nullptr || n_max < 1 || !target_.can_rewind()) {
        return draft;
    }
    const Stopwatch stopwatch(stats_.us_draft);
    drafter_->draft(history_, static_cast<int32_t>(n_max), draft);
    for (const int32_t token : draft) {
        if (token < 0 || token >= target_.n_vocab()) {
            throw Error(PYFLY_STATUS_INVALID, "the drafter proposed token " + std::to_string(token) +
                                                  ", which is outside the target's vocabulary of " +
                                                  std::to_string(target_.n_vocab()) + "; fix or remove the drafter");
        }
    }
    return draft;
}

size_t Engine::round(int32_t n_room) {
    if (!is_active_) {
        throw Error(PYFLY_STATUS_INVALID, "no sequence was begun");
    }
    if (n_room < 1) {
        throw Error(PYFLY_STATUS_INVALID, "a round needs room for at least one token");
    }
    if (history_.size() > static_cast<size_t>(target_.n_ctx())) {
        throw Error(PYFLY_STATUS_CONTEXT_FULL, "the context of " + std::to_string(target_.n_ctx()) +
                                                   " tokens is full; raise n_ctx or start a new sequence");
    }
    records_.clear();
    rejected_.clear();
    record_rows_.clear();
    const size_t n_before = history_.size();
    try {
        const std::vector<int32_t> draft = propose(n_room);
        const size_t first_row = n_before - n_memory_ - 1;
        {
            const Stopwatch stopwatch(first_row > 0 && round_ == 0 ? stats_.us_prefill : stats_.us_verify);
            std::vector<int32_t> batch(history_.begin() + static_cast<std::ptrdiff_t>(n_memory_), history_.end());
            batch.insert(batch.end(), draft.begin(), draft.end());
            target_.evaluate(batch.data(), batch.size(), static_cast<int32_t>(n_memory_), first_row);
            n_memory_ += batch.size();
        }
        stats_.prefilled += static_cast<int64_t>(first_row);
        stats_.rounds++;
        stats_.drafted += static_cast<int64_t>(draft.size());
        for (size_t i = 0; i < draft.size(); i++) {
            stats_.drafted_at[std::min<size_t>(i, PYFLY_MAX_DEPTH - 1)]++;
        }
        const Stopwatch stopwatch(stats_.us_gate);
        verify(draft, first_row);
        truncate_memory(history_.size() - 1);
        round_++;
        commit();
    } catch (...) {
        // The sequence ends here, but the target's memory stays a true prefix of it.
        is_active_ = false;
        history_.resize(std::min(history_.size(), n_before));
        records_.clear();
        truncate_memory(std::min(n_memory_, n_before - 1));
        throw;
    }
    return records_.size();
}

// Positions are settled one after the other, because what the sampler does at one depends on the tokens before it.
void Engine::verify(const std::vector<int32_t> & draft, size_t first_row) {
    for (size_t i = 0; verify_position(draft, i, target_.row(first_row + i)); i++) {
    }
}

// Settles position i of the round (i = draft.size(): the bonus). Returns whether the round goes on.
bool Engine::verify_position(const std::vector<int32_t> & draft, size_t i, const float * row) {
    const size_t n_vocab = static_cast<size_t>(target_.n_vocab());
    const int64_t position = static_cast<int64_t>(history_.size());
    const int32_t choice = sampler_->choose(row, n_vocab);
    const bool is_drafted = i < draft.size();
    const int32_t token = is_drafted ? draft[i] : choice;

    pyfly_record record = {};
    record.position = static_cast<int32_t>(position);
    record.token = choice;
    record.origin = PYFLY_ORIGIN_TARGET;
    record.choice = choice;
    record.reason = -1;
    record.round = round_;
    record.entropy = record.margin = record.logprob = not_measured;

    if (token == choice) {
        if (is_drafted) {
            record.origin = PYFLY_ORIGIN_MATCHED;
            record.reason = PYFLY_REASON_MATCH;
            record.depth = static_cast<int32_t>(i) + 1;
        }
        if (config_.trace) {
            measure(record);
        }
        sampler_->accept(choice);
        push(record, row, {});
        Window::Outcome outcome;
        const bool is_end = target_.is_eog(choice);
        if (is_end) {
            window_.end_of_text();
        } else {
            outcome = is_drafted ? window_.match(position) : window_.own(position);
        }
        if (!outcome && (!is_drafted || is_end)) {
            outcome = window_.end_of_round();
        }
        settle(outcome);
        return is_drafted && !is_end && !outcome;
    }

    // A mismatch: safety, gate, window.
    pyfly_reason reason = PYFLY_REASON_GATE;
    const bool is_safe = !target_.is_protected(token) && !target_.is_protected(choice) && sampler_->could_draw(token);
    if (keeps_shaped_rows()) {
        const Mismatch mismatch = judge_mismatch(config_.gate, sampler_->shaped_row(), n_vocab, token, is_safe);
        reason = mismatch.rejected;
        record.entropy = mismatch.entropy;
        record.margin = mismatch.margin;
        record.logprob = static_cast<double>(sampler_->shaped_row()[choice]) - mismatch.log_sum_exp;
    } else if (!is_safe) {
        reason = PYFLY_REASON_SAFETY;
    }
    if (reason == PYFLY_REASON_LOOSE && !window_.fits(static_cast<int64_t>(draft.size() - 1 - i))) {
        reason = PYFLY_REASON_BOUNDARY;
    }
    const auto rejected_drafts = [&] {
        return std::vector<int32_t>(draft.begin() + static_cast<std::ptrdiff_t>(i), draft.end());
    };

    if (reason == PYFLY_REASON_LOOSE) {
        if (const Window::Outcome outcome = window_.deferred(position)) {
            settle(outcome);
            return false;
        }
        if (window_.is_open(position)) {
            Open open = {position, sampler_->clone(), record};
            open.sampler->accept(choice);
            open_.push_back(std::move(open));
        }
        pyfly_record loose = record;
        loose.token = token;
        loose.origin = PYFLY_ORIGIN_LOOSE;
        loose.reason = PYFLY_REASON_LOOSE;
        loose.depth = static_cast<int32_t>(i) + 1;
        loose.logprob = record.logprob + (static_cast<double>(sampler_->shaped_row()[token]) -
                                          static_cast<double>(sampler_->shaped_row()[choice]));
        sampler_->accept(token);
        push(loose, row, {});
        return true;
    }

    Window::Outcome outcome;
    if (target_.is_eog(choice)) {
        window_.end_of_text(); // the target ends the text here: it agreed to what stands before
    } else {
        outcome = window_.rejected(position);
    }
    if (!outcome) {
        record.reason = reason;
        count_rejection(record);
        sampler_->accept(choice);
        push(record, row, rejected_drafts());
        outcome = window_.end_of_round();
    }
    settle(outcome);
    return false;
}

void Engine::push(const pyfly_record & record, const float * row, std::vector<int32_t> rejected) {
    history_.push_back(record.token);
    Pending pending = {record, std::move(rejected), {}};
    if (config_.keep_rows && row != nullptr) {
        pending.row.assign(row, row + target_.n_vocab());
    }
    pending_.push_back(std::move(pending));
}

// Acts on what the window decided, and forgets the snapshots of mismatches that stand now.
void Engine::settle(const Window::Outcome & outcome) {
    if (outcome) {
        roll_back(*outcome);
    }
    open_.erase(
        std::remove_if(open_.begin(), open_.end(), [&](const Open & o) { return !window_.is_open(o.position); }),
        open_.end());
}

void Engine::roll_back(const Window::Rejection & rejection) {
    const auto open =
        std::find_if(open_.begin(), open_.end(), [&](const Open & o) { return o.position == rejection.position; });
    const auto first = std::find_if(pending_.begin(), pending_.end(),
                                    [&](const Pending & p) { return p.record.position == rejection.position; });
    if (open == open_.end() || first == pending_.end()) {
        throw Error(PYFLY_STATUS_INTERNAL, "a window was broken that is not open");
    }
    const size_t n_keep = static_cast<size_t>(rejection.position);
    std::vector<int32_t> rejected(history_.begin() + static_cast<std::ptrdiff_t>(n_keep), history_.end());
    stats_.rollbacks++;
    stats_.rolled_back += static_cast<int64_t>(rejected.size());
    std::vector<float> row = std::move(first->row);
    pending_.erase(first, pending_.end());
    history_.resize(n_keep);
    sampler_ = std::move(open->sampler);
    pyfly_record record = open->choice;
    record.reason = rejection.reason;
    open_.clear();
    count_rejection(record);
    push(record, row.empty() ? nullptr : row.data(), std::move(rejected));
}

void Engine::count_rejection(const pyfly_record & record) {
    switch (record.reason) {
        case PYFLY_REASON_GATE:
            stats_.rejected_gate++;
            break;
        case PYFLY_REASON_WINDOW:
            stats_.rejected_window++;
            break;
        case PYFLY_REASON_BOUNDARY:
            stats_.rejected_boundary++;
            break;
        default:
            stats_.rejected_safety++;
    }
    if (std::isfinite(record.margin)) {
        stats_.sum_margin_rejected += record.margin;
        stats_.n_margin_rejected++;
    }
}

// Entropy and probability of a token that needed no judgement, for the trace.
void Engine::measure(pyfly_record & record) const {
    const float * row = sampler_->shaped_row();
    const RowStats stats = row_stats(row, static_cast<size_t>(target_.n_vocab()), config_.gate.n_top());
    record.entropy = stats.n_top > 0 ? stats.top_entropy(stats.n_top) : stats.entropy;
    record.margin = static_cast<double>(stats.max.logit) - static_cast<double>(row[record.token]);
    record.logprob = stats.log_prob(row[record.token]);
}

// Gives out every token before the oldest open mismatch.
void Engine::commit() {
    const int64_t end = window_.oldest_open().value_or(static_cast<int64_t>(history_.size()));
    size_t n = 0;
    for (; n < pending_.size() && pending_[n].record.position < end; n++) {
        Pending & pending = pending_[n];
        pyfly_record record = pending.record;
        record.rejected_begin = static_cast<int32_t>(rejected_.size());
        rejected_.insert(rejected_.end(), pending.rejected.begin(), pending.rejected.end());
        record.rejected_end = static_cast<int32_t>(rejected_.size());
        records_.push_back(record);
        if (config_.keep_rows) {
            record_rows_.push_back(std::move(pending.row));
        }
        stats_.committed++;
        stats_.matched += record.origin == PYFLY_ORIGIN_MATCHED;
        if (record.origin == PYFLY_ORIGIN_LOOSE) {
            stats_.loose_accepted++;
            stats_.sum_margin_loose += record.margin;
        }
        if (record.depth > 0) {
            stats_.accepted_at[std::min(record.depth, PYFLY_MAX_DEPTH) - 1]++;
        }
    }
    pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(n));
}

const float * Engine::record_row(size_t i) const {
    return i < record_rows_.size() && !record_rows_[i].empty() ? record_rows_[i].data() : nullptr;
}

void Engine::truncate_memory(size_t n) {
    if (n < n_memory_) {
        target_.truncate(static_cast<int32_t>(n));
        n_memory_ = n;
    }
}

void Engine::end(size_t n_keep) {
    is_active_ = false;
    open_.clear();
    pending_.clear();
    window_.clear();
    sampler_.reset(); // it may hold callbacks that live no longer than the request
    if (target_.can_rewind()) {
        truncate_memory(n_keep);
    }
}

} // namespace pyfly
