#include "verify.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "error.h"
#include "random.h"
#include "speculative.h"

namespace pyfly {

double reported_entropy(const Gate & gate, const RowStats & stats) {
    const int32_t n = gate.n_top_entropy();
    return n > 0 ? stats.top_entropy(std::min(n, stats.n_top)) : stats.entropy;
}

// Nats, 32 ln 2: the target's favourite is 2^32 times as likely as the draft token. A logit bias of -100, the usual
// ban, leaves a token less than that. What the published rules accept (tests/conformance) is within 16 nats.
constexpr double impossible_margin = 22.18;

Mismatch judge_mismatch(const Gate & gate, const float * row, size_t n_vocab, int32_t draft_token,
                        const float * draft_row, bool is_safe, const int32_t * answered, int64_t n_answered) {
    const RowStats stats = row_stats(row, n_vocab, gate.n_top());
    if (!stats.max.finite) {
        throw Error(PYFLY_STATUS_NOT_FINITE, "a logits row has no distribution: NaN, +inf, or -inf everywhere");
    }
    const float draft_logit = row[draft_token];
    const Evidence evidence = {stats, row, n_vocab, draft_token, draft_logit, draft_row, answered, n_answered};
    Mismatch mismatch;
    mismatch.entropy = reported_entropy(gate, stats);
    mismatch.margin = evidence.margin();
    mismatch.log_sum_exp = stats.log_sum_exp;
    if (!is_safe || std::isinf(draft_logit)) {
        mismatch.rejected = PYFLY_REASON_SAFETY;
    } else if (!gate.defers(evidence)) {
        mismatch.rejected = PYFLY_REASON_GATE;
    } else {
        mismatch.rejected = mismatch.margin < impossible_margin ? PYFLY_REASON_LOOSE : PYFLY_REASON_SAFETY;
    }
    return mismatch;
}

namespace {

// Judges the deferred mismatch at position j (0-based) on its own: does its window hold in this round?
pyfly_reason judge_window(const pyfly_window_config & config, const std::vector<pyfly_decision> & decisions,
                          const Vocabulary & vocabulary, size_t j) {
    const size_t n = decisions.size();
    Window window(config);
    const auto at = [](size_t i) { return static_cast<int64_t>(i); };
    if (!window.fits(at(n - 1 - j))) {
        return PYFLY_REASON_BOUNDARY;
    }
    window.deferred(at(j));
    for (size_t i = j + 1; i < n && window.is_open(at(j)); i++) {
        const pyfly_reason reason = static_cast<pyfly_reason>(decisions[i].reason);
        Window::Outcome outcome;
        if (reason == PYFLY_REASON_MATCH) {
            outcome = window.match(at(i));
            if (vocabulary.is_eog(decisions[i].choice)) {
                break; // nothing comes behind the end of the text
            }
        } else if (reason == PYFLY_REASON_LOOSE && window.fits(at(n - 1 - i))) {
            outcome = window.deferred(at(i));
        } else {
            outcome = window.rejected(at(i));
            if (!outcome) {
                outcome = window.end_of_round(); // a rejection ends the round
            }
        }
        if (outcome) {
            return outcome->reason;
        }
    }
    if (const Window::Outcome outcome = window.end_of_round()) {
        return outcome->reason;
    }
    return PYFLY_REASON_LOOSE;
}

void require_row(const float * row, size_t n_vocab, const char * which, size_t i) {
    if (!row_max(row, n_vocab).finite) {
        throw Error(PYFLY_STATUS_NOT_FINITE, std::string(which) + " row " + std::to_string(i) +
                                                 " has no distribution: NaN, +inf, or -inf everywhere");
    }
}

// Choices of speculative sampling, see pyfly_verify.
class DrawnChoices {
  public:
    DrawnChoices(const float * logits, size_t n_vocab, const int32_t * draft, size_t n_draft,
                 const float * draft_logits, uint64_t seed)
        : logits_(logits), n_vocab_(n_vocab), draft_(draft), n_draft_(n_draft), draft_logits_(draft_logits),
          random_(seed) {}

    int32_t at(size_t i) {
        return i == n_draft_ ? draw(p(i), random_.uniform()) : choose_beside(p(i), q(i), draft_[i], random_);
    }

  private:
    Weights p(size_t i) const {
        require_row(logits_ + i * n_vocab_, n_vocab_, "logits", i);
        return softmax(logits_ + i * n_vocab_, n_vocab_);
    }

    // What the draft token was drawn from.
    Weights q(size_t i) const {
        Weights q = {{draft_[i], 1.0}};
        if (draft_logits_ != nullptr) {
            require_row(draft_logits_ + i * n_vocab_, n_vocab_, "draft_logits", i);
            q = softmax(draft_logits_ + i * n_vocab_, n_vocab_);
        }
        if (!(weight(q, draft_[i]) > 0.0)) {
            throw Error(PYFLY_STATUS_INVALID, "draft token " + std::to_string(draft_[i]) +
                                                  " cannot be drawn from row " + std::to_string(i) +
                                                  " of draft_logits; give the rows that the draft was drawn from");
        }
        return q;
    }

    const float * logits_;
    size_t n_vocab_;
    const int32_t * draft_;
    size_t n_draft_;
    const float * draft_logits_;
    Random random_;
};

} // namespace

Round verify_round(const float * logits, const Vocabulary & vocabulary, const int32_t * draft, size_t n_draft,
                   const float * draft_logits, const int32_t * choices, const Gate & gate,
                   const pyfly_window_config & window, const int32_t * answered, int64_t n_answered, uint64_t seed) {
    const size_t n_vocab = static_cast<size_t>(vocabulary.n());
    const auto n_until_end = [&](size_t n) { // of the first n drafted tokens, up to one that ends the text
        const auto end = std::find_if(draft, draft + n, [&](int32_t token) { return vocabulary.is_eog(token); });
        return std::min(n, static_cast<size_t>(end - draft) + 1);
    };
    if (window.across_rounds) {
        throw Error(PYFLY_STATUS_INVALID, "verification of one step cannot look across steps; set across_rounds to 0");
    }
    if (gate.needs_draft_rows() && draft_logits == nullptr && n_draft > 0) {
        throw Error(PYFLY_STATUS_INVALID,
                    "the gate compares the draft's distribution with the target's; give draft_logits");
    }
    if (gate.looks_at_answer() && answered == nullptr && n_answered > 0 && n_draft > 0) {
        throw Error(PYFLY_STATUS_INVALID, "the gate looks at the answer's tokens; give answered");
    }
    const Window validated(window); // also where there is no mismatch to judge
    (void) validated;
    gate.require_window(window);
    if (gate.draws() && choices != nullptr) {
        throw Error(PYFLY_STATUS_INVALID, "speculative sampling draws the target's tokens itself; give a seed instead");
    }
    DrawnChoices drawn(logits, n_vocab, draft, n_draft, draft_logits, seed);
    const auto choice_at = [&](size_t i) {
        require_row(logits + i * n_vocab, n_vocab, "logits", i);
        return choices ? choices[i] : gate.draws() ? drawn.at(i) : row_max(logits + i * n_vocab, n_vocab).token;
    };
    for (size_t i = 0; gate.needs_draft_rows() && i < n_draft; i++) {
        require_row(draft_logits + i * n_vocab, n_vocab, "draft_logits", i);
    }
    std::vector<int32_t> text; // the answer, and the draft behind it
    if (gate.looks_at_answer()) {
        text.assign(answered, answered + (answered != nullptr ? n_answered : 0));
        text.insert(text.end(), draft, draft + n_draft);
    }
    Round round;
    round.decisions.resize(n_draft);
    for (size_t i = 0; i < n_draft; i++) {
        pyfly_decision & decision = round.decisions[i];
        decision.choice = choice_at(i);
        const bool is_safe = !vocabulary.is_protected(draft[i]) && !vocabulary.is_protected(decision.choice);
        const Mismatch mismatch = judge_mismatch(
            gate, logits + i * n_vocab, n_vocab, draft[i], draft_logits ? draft_logits + i * n_vocab : nullptr, is_safe,
            text.empty() ? nullptr : text.data(), n_answered + static_cast<int64_t>(i));
        decision.reason = draft[i] == decision.choice ? PYFLY_REASON_MATCH : mismatch.rejected;
        decision.entropy = mismatch.entropy;
        decision.margin = mismatch.margin;
    }
    // Windows look at the gates' verdicts, so the rejections they cause are written down afterwards.
    std::vector<pyfly_decision> judged = round.decisions;
    for (size_t i = 0; i < n_draft; i++) {
        if (judged[i].reason == PYFLY_REASON_LOOSE) {
            judged[i].reason = judge_window(window, round.decisions, vocabulary, i);
        }
    }
    round.decisions = judged;
    size_t n_accepted = 0;
    while (n_accepted < n_draft && judged[n_accepted].reason <= PYFLY_REASON_LOOSE) {
        n_accepted++;
    }
    const size_t n_emitted = n_until_end(n_accepted);
    round.tokens.assign(draft, draft + n_emitted);
    if (n_emitted == 0 || !vocabulary.is_eog(round.tokens.back())) {
        round.tokens.push_back(n_accepted < n_draft ? judged[n_accepted].choice : choice_at(n_draft));
    }
    return round;
}

} // namespace pyfly
