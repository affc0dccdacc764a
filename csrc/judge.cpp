#include "judge.h"

#include <algorithm>
#include <cmath>
#include <iterator>
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

// Of the target's own choice.
pyfly_record make_record(size_t position, int32_t choice, int32_t round) {
    pyfly_record record = {};
    record.position = static_cast<int32_t>(position);
    record.token = choice;
    record.origin = PYFLY_ORIGIN_TARGET;
    record.choice = choice;
    record.reason = -1;
    record.drafter = -1;
    record.round = round;
    record.region = -1;
    record.entropy = record.margin = record.logprob = not_measured;
    std::fill(std::begin(record.features), std::end(record.features), not_measured);
    return record;
}

// The same where it is drafted token i.
void mark_matched(pyfly_record & record, const Draft & draft, size_t i) {
    record.origin = PYFLY_ORIGIN_MATCHED;
    record.reason = PYFLY_REASON_MATCH;
    record.depth = static_cast<int32_t>(i) + 1;
    record.drafter = draft.drafter;
}

} // namespace

Judge::Judge(const Vocabulary & vocabulary, Gate gate, std::vector<pyfly_window_config> windows, bool measures,
             Answer answer, const std::vector<int32_t> & history, std::unique_ptr<Sampler> sampler, Random random)
    : vocabulary_(&vocabulary), gate_(std::move(gate)), window_(windows), measures_(measures),
      answer_(std::move(answer)), sampler_(std::move(sampler)), random_(random), settled_(random) {
    for (const pyfly_window_config & window : windows) {
        gate_.require_window(window);
    }
    if (gate_.looks_at_regions()) {
        regions_.emplace(vocabulary, history, sampler_->has_grammar());
    }
}

int32_t Judge::draw_draft(const float * row, size_t n, std::vector<Weights> & drawn) {
    drawn.push_back(sampler_->distributions()->of_draft(row, n));
    return draw(drawn.back(), random_.uniform());
}

void Judge::settle(const Draft & draft, int32_t round, const Rows & rows, Transcript & transcript,
                   pyfly_stats & stats) {
    if (draws() && gate_.sampling() == Sampling::block && !draft.tokens.empty()) {
        settle_block(draft, round, rows, transcript, stats);
    } else {
        for (size_t i = 0; settle_position(draft, i, round, rows(i), transcript, stats); i++) {
        }
    }
    settled_ = random_;
}

// The target's choice at position i.
int32_t Judge::choose(const Draft & draft, size_t i, const float * row) {
    if (!draws()) {
        return sampler_->choose(row, n_vocab());
    }
    const Weights p = sampler_->distributions()->of_target(row, n_vocab());
    if (i == draft.tokens.size()) {
        return draw(p, random_.uniform());
    }
    const int32_t token = draft.tokens[i];
    return gate_.sampling() == Sampling::twice ? choose_of_two(p, token, random_)
                                               : choose_beside(p, draft.q(i), token, random_);
}

// Settles position i of a round. Returns whether the round goes on. Positions come one after the other, because what
// the sampler does at one depends on the tokens before it.
bool Judge::settle_position(const Draft & draft, size_t i, int32_t round, const float * row, Transcript & transcript,
                            pyfly_stats & stats) {
    const int64_t position = static_cast<int64_t>(transcript.n());
    transcript.keep_sampler(*sampler_);
    const int32_t choice = choose(draft, i, row);
    const bool is_drafted = i < draft.tokens.size();
    const int32_t token = is_drafted ? draft.tokens[i] : choice;
    pyfly_record record = make_record(transcript.n(), choice, round);
    record.region = regions_ ? regions_->at(transcript.history(), token, choice) : -1;
    const pyfly_region region = regions_ ? static_cast<pyfly_region>(record.region) : PYFLY_REGION_PROSE;

    if (token == choice) {
        if (is_drafted) {
            mark_matched(record, draft, i);
        }
        if (measures_) {
            measure(record, sampler_->shaped_row(), choice);
        }
        sampler_->accept(choice);
        transcript.push(record, row, {});
        Window::Outcome outcome = is_drafted ? window_.match(position) : window_.own(position);
        const bool is_last = !is_drafted || vocabulary_->is_eog(choice);
        if (!outcome && is_last) {
            outcome = end_round(choice);
        }
        conclude(outcome, transcript, stats);
        return !is_last && !outcome;
    }

    // A mismatch: safety, gate, window.
    pyfly_reason reason = PYFLY_REASON_GATE;
    const bool is_safe = !vocabulary_->is_protected(token) && !vocabulary_->is_protected(choice) &&
                         sampler_->could_draw(token) &&
                         (gate_.is_exact() || (!vocabulary_->writes_marker(transcript.history(), token) &&
                                               !vocabulary_->writes_marker(transcript.history(), choice)));
    if (keeps_shaped_rows(gate_, measures_)) {
        // Rows that its tokens were not drawn from say nothing about them.
        const float * draft_row = draws_drafts() && draft.drawn.empty() ? nullptr : draft.row(i, n_vocab());
        const Mismatch mismatch =
            judge_mismatch(gate_, sampler_->shaped_row(), n_vocab(), token, draft_row, is_safe, answer_, position,
                           transcript.history().data() + answer_.begin(), region, static_cast<int32_t>(i) + 1);
        reason = mismatch.rejected;
        record.entropy = mismatch.entropy;
        record.margin = mismatch.margin;
        std::copy(mismatch.features.begin(), mismatch.features.end(), record.features);
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

    Window::Outcome outcome = window_.rejected(position);
    if (!outcome) {
        record.reason = reason;
        count_rejection(record, stats);
        sampler_->accept(choice);
        transcript.push(record, row, {draft.tokens.begin() + static_cast<std::ptrdiff_t>(i), draft.tokens.end()});
        outcome = end_round(choice);
    }
    conclude(outcome, transcript, stats);
    return false;
}

// The drafted tokens are gone through as if all were accepted, up to the end of the text or the first that cannot be;
// then those are taken back that block verification does not keep.
void Judge::settle_block(const Draft & draft, int32_t round, const Rows & rows, Transcript & transcript,
                         pyfly_stats & stats) {
    const size_t n_before = transcript.n();
    std::unique_ptr<Sampler> before = sampler_->clone();
    std::vector<BlockStep> block;
    std::vector<std::vector<float>> shaped_rows; // where they are measured
    bool is_end = false, is_possible = true;
    while (is_possible && !is_end && block.size() < draft.tokens.size()) {
        const size_t i = block.size();
        const int32_t token = draft.tokens[i];
        transcript.keep_sampler(*sampler_);
        block.push_back({sampler_->distributions()->of_target(rows(i), n_vocab()), draft.q(i), token});
        pyfly_record record = make_record(transcript.n(), token, round);
        mark_matched(record, draft, i);
        if (measures_) {
            const float * shaped = sampler_->shaped_row();
            shaped_rows.emplace_back(shaped, shaped + n_vocab());
            measure(record, shaped, token);
        }
        is_end = vocabulary_->is_eog(token);
        is_possible = weight(block.back().p, token) > 0.0;
        if (is_possible) {
            sampler_->accept(token);
            transcript.push(record, rows(i), {});
        }
    }
    const BlockChoice choice = choose_block(block, random_);
    const size_t n = choice.n_accepted;
    if (n == block.size()) {
        if (!is_end) {
            settle_position(draft, n, round, rows(n), transcript, stats);
        }
        return;
    }
    transcript.take_back(n_before + n);
    sampler_ = std::move(before);
    for (size_t i = 0; i < n; i++) {
        sampler_->accept(draft.tokens[i]);
    }
    const int32_t token = draft.tokens[n];
    pyfly_record record = make_record(transcript.n(), draw(choice.rest, random_.uniform()), round);
    const bool is_safe = !vocabulary_->is_protected(token) && !vocabulary_->is_protected(record.choice) &&
                         weight(block[n].p, token) > 0.0;
    record.reason = is_safe ? PYFLY_REASON_GATE : PYFLY_REASON_SAFETY;
    if (measures_) {
        measure(record, shaped_rows[n].data(), token);
    }
    count_rejection(record, stats);
    sampler_->accept(record.choice);
    transcript.push(record, rows(n), {draft.tokens.begin() + static_cast<std::ptrdiff_t>(n), draft.tokens.end()});
}

// A round ends with the target's choice; so may the text, with which no window stays open.
Window::Outcome Judge::end_round(int32_t choice) {
    return vocabulary_->is_eog(choice) ? window_.give_up() : window_.end_of_round();
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

// Entropy and probability of a token that needed no judgement, and the margin of what was drafted.
void Judge::measure(pyfly_record & record, const float * shaped_row, int32_t drafted) const {
    const RowStats stats = row_stats(shaped_row, n_vocab(), gate_.n_top());
    record.entropy = reported_entropy(gate_, stats);
    record.margin = static_cast<double>(stats.max.logit) - static_cast<double>(shaped_row[drafted]);
    record.logprob = stats.log_prob(shaped_row[record.token]);
}

} // namespace pyfly
