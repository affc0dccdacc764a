#include "judge.h"

#include <cmath>
#include <limits>

#include "verify.h"

namespace pyfly {

namespace {

constexpr double not_measured = std::numeric_limits<double>::quiet_NaN();

void count_rejection(const pyfly_record & record, pyfly_stats & stats) {
    switch (record.reason) {
        case PYFLY_REASON_GATE:
            stats.rejected_gate++;
            break;
        case PYFLY_REASON_WINDOW:
            stats.rejected_window++;
            break;
        case PYFLY_REASON_BOUNDARY:
            stats.rejected_boundary++;
            break;
        default:
            stats.rejected_safety++;
    }
    if (std::isfinite(record.margin)) {
        stats.sum_margin_rejected += record.margin;
        stats.n_margin_rejected++;
    }
}

} // namespace

Judge::Judge(const Vocabulary & vocabulary, Gate gate, std::vector<pyfly_window_config> windows, bool measures,
             Answer answer, const std::vector<int32_t> & history, std::unique_ptr<Sampler> sampler)
    : vocabulary_(&vocabulary), gate_(std::move(gate)), window_(std::move(windows)), measures_(measures),
      answer_(std::move(answer)), sampler_(std::move(sampler)) {
    if (gate_.looks_at_regions()) {
        regions_.emplace(vocabulary, history, sampler_->has_grammar());
    }
}

bool Judge::settle(const Draft & draft, size_t i, int32_t round, const float * row, Transcript & transcript,
                   pyfly_stats & stats) {
    const size_t n_vocab = static_cast<size_t>(vocabulary_->n());
    const int64_t position = static_cast<int64_t>(transcript.n());
    transcript.keep_sampler(*sampler_);
    const int32_t choice = sampler_->choose(row, n_vocab);
    const bool is_drafted = i < draft.tokens.size();
    const int32_t token = is_drafted ? draft.tokens[i] : choice;

    pyfly_record record = {};
    record.position = static_cast<int32_t>(position);
    record.token = choice;
    record.origin = PYFLY_ORIGIN_TARGET;
    record.choice = choice;
    record.reason = -1;
    record.drafter = -1;
    record.round = round;
    record.region = regions_ ? regions_->at(transcript.history(), token, choice) : -1;
    record.entropy = record.margin = record.logprob = not_measured;
    const pyfly_region region = regions_ ? static_cast<pyfly_region>(record.region) : PYFLY_REGION_PROSE;

    if (token == choice) {
        if (is_drafted) {
            record.origin = PYFLY_ORIGIN_MATCHED;
            record.reason = PYFLY_REASON_MATCH;
            record.depth = static_cast<int32_t>(i) + 1;
            record.drafter = draft.drafter;
        }
        if (measures_) {
            measure(record);
        }
        sampler_->accept(choice);
        transcript.push(record, row, {});
        Window::Outcome outcome;
        const bool is_end = vocabulary_->is_eog(choice);
        if (is_end) {
            window_.end_of_text();
        } else {
            outcome = is_drafted ? window_.match(position) : window_.own(position);
        }
        if (!outcome && (!is_drafted || is_end)) {
            outcome = window_.end_of_round();
        }
        conclude(outcome, transcript, stats);
        return is_drafted && !is_end && !outcome;
    }

    // A mismatch: safety, gate, window.
    pyfly_reason reason = PYFLY_REASON_GATE;
    const bool is_safe =
        !vocabulary_->is_protected(token) && !vocabulary_->is_protected(choice) && sampler_->could_draw(token);
    if (keeps_shaped_rows(gate_, measures_)) {
        const Mismatch mismatch = judge_mismatch(gate_, sampler_->shaped_row(), n_vocab, token, draft.row(i, n_vocab),
                                                 is_safe, answer_, position, region);
        reason = mismatch.rejected;
        record.entropy = mismatch.entropy;
        record.margin = mismatch.margin;
        record.logprob = static_cast<double>(sampler_->shaped_row()[choice]) - mismatch.log_sum_exp;
    } else if (!is_safe) {
        reason = PYFLY_REASON_SAFETY;
    }
    if (reason == PYFLY_REASON_LOOSE && !window_.fits(static_cast<int64_t>(draft.tokens.size() - 1 - i), region)) {
        reason = PYFLY_REASON_BOUNDARY;
    }

    if (reason == PYFLY_REASON_LOOSE) {
        if (const Window::Outcome outcome = window_.deferred(position, region)) {
            conclude(outcome, transcript, stats);
            return false;
        }
        if (window_.is_open(position)) {
            std::unique_ptr<Sampler> after_choice = sampler_->clone();
            after_choice->accept(choice);
            transcript.defer(record, std::move(after_choice));
        }
        pyfly_record loose = record;
        loose.token = token;
        loose.origin = PYFLY_ORIGIN_LOOSE;
        loose.reason = PYFLY_REASON_LOOSE;
        loose.depth = static_cast<int32_t>(i) + 1;
        loose.drafter = draft.drafter;
        loose.logprob = record.logprob + (static_cast<double>(sampler_->shaped_row()[token]) -
                                          static_cast<double>(sampler_->shaped_row()[choice]));
        sampler_->accept(token);
        transcript.push(loose, row, {});
        answer_.accept_loosely(position, record.margin);
        return true;
    }

    Window::Outcome outcome;
    if (vocabulary_->is_eog(choice)) {
        window_.end_of_text(); // the target ends the text here: it agreed to what stands before
    } else {
        outcome = window_.rejected(position);
    }
    if (!outcome) {
        record.reason = reason;
        count_rejection(record, stats);
        sampler_->accept(choice);
        transcript.push(record, row, {draft.tokens.begin() + static_cast<std::ptrdiff_t>(i), draft.tokens.end()});
        outcome = window_.end_of_round();
    }
    conclude(outcome, transcript, stats);
    return false;
}

// Acts on what the window decided.
void Judge::conclude(const Window::Outcome & outcome, Transcript & transcript, pyfly_stats & stats) {
    if (outcome) {
        int64_t rolled_back = 0;
        pyfly_record choice;
        sampler_ = transcript.roll_back(*outcome, rolled_back, choice);
        answer_.truncate(outcome->position);
        if (regions_) {
            regions_->truncate(outcome->position);
        }
        stats.rollbacks++;
        stats.rolled_back += rolled_back;
        count_rejection(choice, stats);
    }
    transcript.forget_decided(window_);
}

// Entropy and probability of a token that needed no judgement.
void Judge::measure(pyfly_record & record) const {
    const float * row = sampler_->shaped_row();
    const RowStats stats = row_stats(row, static_cast<size_t>(vocabulary_->n()), gate_.n_top());
    record.entropy = reported_entropy(gate_, stats);
    record.margin = static_cast<double>(stats.max.logit) - static_cast<double>(row[record.token]);
    record.logprob = stats.log_prob(row[record.token]);
}

} // namespace pyfly
