#include "judge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "error.h"
#include "speculative.h"

namespace pyfly {

namespace {

constexpr double not_measured = std::numeric_limits<double>::quiet_NaN();

// Nats, 32 ln 2: the target's favourite is 2^32 times as likely as the draft token. A logit bias of -100, the usual
// ban, leaves a token less than that. What the published rules accept (tests/conformance) is within 16 nats.
constexpr double impossible_margin = 22.18;

// Entropy of a row, nats: of its top n if the gate measures that, else of the whole row.
double reported_entropy(const GateExpression & gate, const RowStats & stats) {
    const int32_t n = gate.n_top_entropy();
    return n > 0 ? stats.top_entropy(std::min(n, stats.n_top)) : stats.entropy;
}

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
pyfly_record make_record(size_t position, int32_t choice, int32_t step) {
    pyfly_record record = {};
    record.position = static_cast<int32_t>(position);
    record.token = choice;
    record.origin = PYFLY_ORIGIN_TARGET;
    record.choice = choice;
    record.reason = -1;
    record.drafter = -1;
    record.step = step;
    record.entropy = record.margin = record.logprob = not_measured;
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

Judge::Judge(const Vocabulary & vocabulary, GateExpression gate, const pyfly_window_config & window, bool measures,
             int64_t answer_begin, std::unique_ptr<Sampler> sampler, Random random)
    : vocabulary_(&vocabulary), gate_(std::move(gate)), window_(window), measures_(measures),
      answer_begin_(answer_begin), sampler_(std::move(sampler)), random_(random), settled_(random) {
    gate_.require_window(window);
}

int32_t Judge::draw_draft(const float * row, size_t n, std::vector<Weights> & drawn) {
    drawn.push_back(sampler_->distributions()->of_draft(row, n));
    return draw(drawn.back(), random_.uniform());
}

void Judge::settle(const Draft & draft, int32_t step, const Rows & rows, Transcript & transcript, pyfly_stats & stats) {
    bool goes_on = true;
    for (size_t i = 0; goes_on; i++) {
        try {
            goes_on = settle_position(draft, i, step, rows(i), transcript, stats);
        } catch (const Error & error) {
            // The answer may end before this row: it is the next step's.
            if (error.status() != PYFLY_STATUS_NOT_FINITE || i == 0 || window_.oldest_open()) {
                throw;
            }
            goes_on = false;
        }
    }
    settled_ = random_;
}

void Judge::settle_one(const Draft & draft, size_t i, const Rows & rows, Transcript & transcript, pyfly_stats & stats) {
    const int64_t position = static_cast<int64_t>(transcript.n());
    while (settle_position(draft, i, 0, rows(i), transcript, stats) && window_.is_open(position)) {
        i++;
    }
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
    return choose_beside(p, draft.q(i), draft.tokens[i], random_);
}

// Settles position i of a step. Returns whether the step goes on. Positions come one after the other, because what
// the sampler does at one depends on the tokens before it.
bool Judge::settle_position(const Draft & draft, size_t i, int32_t step, const float * row, Transcript & transcript,
                            pyfly_stats & stats) {
    const int64_t position = static_cast<int64_t>(transcript.n());
    transcript.keep_sampler(*sampler_);
    const int32_t choice = choose(draft, i, row);
    const bool is_drafted = i < draft.tokens.size();
    const int32_t token = is_drafted ? draft.tokens[i] : choice;
    pyfly_record record = make_record(transcript.n(), choice, step);

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
            outcome = end_step(choice);
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
        reason = judge_mismatch(draft, i, is_safe, transcript, record);
    } else if (!is_safe) {
        reason = PYFLY_REASON_SAFETY;
    }
    if (reason == PYFLY_REASON_LOOSE && !window_.fits(static_cast<int64_t>(draft.tokens.size() - 1 - i))) {
        reason = PYFLY_REASON_BOUNDARY;
    }

    if (reason == PYFLY_REASON_LOOSE) {
        if (const Window::Outcome outcome = window_.deferred(position)) {
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
        return true;
    }

    Window::Outcome outcome = window_.rejected(position);
    if (!outcome) {
        record.reason = reason;
        count_rejection(record, stats);
        sampler_->accept(choice);
        transcript.push(record, row, {draft.tokens.begin() + static_cast<std::ptrdiff_t>(i), draft.tokens.end()});
        outcome = end_step(choice);
    }
    conclude(outcome, transcript, stats);
    return false;
}

// Safety first, then the gate, and what it defers must not be as good as impossible: such a token is unsafe, too, but
// where the gate rejects it, that is the reason. Returns LOOSE if the window may decide. Measures the record of the
// choice. `is_safe`: neither the draft token nor the choice is protected, and the draft token could have been drawn.
pyfly_reason Judge::judge_mismatch(const Draft & draft, size_t i, bool is_safe, const Transcript & transcript,
                                   pyfly_record & record) const {
    const float * row = sampler_->shaped_row();
    const RowStats stats = row_stats(row, n_vocab(), gate_.n_top());
    if (!stats.max.finite) {
        throw Error(PYFLY_STATUS_NOT_FINITE, "a logits row has no distribution: NaN, +inf, or -inf everywhere");
    }
    const int32_t token = draft.tokens[i];
    // Rows that its tokens were not drawn from say nothing about them.
    const float * draft_row = draws() && draft.drawn.empty() ? nullptr : draft.row(i, n_vocab());
    const int32_t * answered = gate_.looks_at_answer() ? transcript.history().data() + answer_begin_ : nullptr;
    const Evidence evidence = {stats,      row,       n_vocab(), token,
                               row[token], draft_row, answered,  record.position - answer_begin_};
    record.entropy = reported_entropy(gate_, stats);
    record.margin = evidence.margin();
    record.logprob = stats.log_prob(row[record.choice]);
    if (!is_safe || std::isinf(row[token])) {
        return PYFLY_REASON_SAFETY;
    }
    if (!gate_.defers(evidence)) {
        return PYFLY_REASON_GATE;
    }
    return record.margin < impossible_margin ? PYFLY_REASON_LOOSE : PYFLY_REASON_SAFETY;
}

// A step ends with the target's choice; so may the request, with which no window stays open.
Window::Outcome Judge::end_step(int32_t choice) {
    return vocabulary_->is_eog(choice) ? window_.give_up() : window_.end_of_step();
}

// Acts on what the window decided.
void Judge::conclude(const Window::Outcome & outcome, Transcript & transcript, pyfly_stats & stats) {
    if (outcome) {
        int64_t rolled_back = 0;
        pyfly_record choice;
        sampler_ = transcript.roll_back(*outcome, rolled_back, choice);
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
