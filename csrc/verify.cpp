#include "verify.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "error.h"

namespace pyfly {

double reported_entropy(const Gate & gate, const RowStats & stats) {
    const int32_t n = gate.n_top_entropy();
    return n > 0 ? stats.top_entropy(std::min(n, stats.n_top)) : stats.entropy;
}

Mismatch judge_mismatch(const Gate & gate, const float * row, size_t n_vocab, int32_t draft_token,
                        const float * draft_row, bool is_safe, const Answer & answer, int64_t position,
                        pyfly_region region) {
    const RowStats stats = row_stats(row, n_vocab, gate.n_top());
    if (!stats.max.finite) {
        throw Error(PYFLY_STATUS_NOT_FINITE, "a logits row has no distribution: NaN, +inf, or -inf everywhere");
    }
    const float draft_logit = row[draft_token];
    const Evidence evidence = {
        stats, row, n_vocab, draft_token, draft_logit, draft_row, answer.n(position), answer.given_away(), region};
    Mismatch mismatch;
    mismatch.entropy = reported_entropy(gate, stats);
    mismatch.margin = evidence.margin();
    mismatch.log_sum_exp = stats.log_sum_exp;
    if (!is_safe || std::isinf(draft_logit)) {
        mismatch.rejected = PYFLY_REASON_SAFETY;
    } else {
        mismatch.rejected = gate.defers(evidence) ? PYFLY_REASON_LOOSE : PYFLY_REASON_GATE;
    }
    return mismatch;
}

namespace {

// Judges the deferred mismatch at position j (0-based) on its own: does its window hold in this round?
pyfly_reason judge_window(const pyfly_window_config & config, const std::vector<pyfly_decision> & decisions, size_t j) {
    const size_t n = decisions.size();
    Window window({config});
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

} // namespace

Round verify_round(const float * logits, size_t n_vocab, const int32_t * draft, size_t n_draft,
                   const float * draft_logits, const int32_t * choices, const int32_t * regions, const Gate & gate,
                   const pyfly_window_config & window, const std::vector<bool> & is_protected, Answer answer) {
    if (window.across_rounds) {
        throw Error(PYFLY_STATUS_INVALID,
                    "verification of one round cannot look across rounds; set across_rounds to 0");
    }
    if (gate.needs_draft_rows() && draft_logits == nullptr && n_draft > 0) {
        throw Error(PYFLY_STATUS_INVALID,
                    "the gate compares the draft's distribution with the target's; give draft_logits");
    }
    if (gate.looks_at_regions() && regions == nullptr && n_draft > 0) {
        throw Error(PYFLY_STATUS_INVALID, "the gate follows what is being written; give regions");
    }
    const Window validated({window}); // also where there is no mismatch to judge
    (void) validated;
    const auto max_of = [&](const float * rows, const std::string & what, size_t i) {
        const RowMax max = row_max(rows + i * n_vocab, n_vocab);
        if (!max.finite) {
            throw Error(PYFLY_STATUS_NOT_FINITE,
                        what + " row " + std::to_string(i) + " has no distribution: NaN, +inf, or -inf everywhere");
        }
        return max;
    };
    const auto choice_at = [&](size_t i) {
        const RowMax max = max_of(logits, "logits", i);
        return choices ? choices[i] : max.token;
    };
    for (size_t i = 0; gate.needs_draft_rows() && i < n_draft; i++) {
        max_of(draft_logits, "draft_logits", i);
    }
    Round round;
    round.decisions.resize(n_draft);
    for (size_t i = 0; i < n_draft; i++) {
        pyfly_decision & decision = round.decisions[i];
        decision.choice = choice_at(i);
        const bool is_safe =
            !is_protected[static_cast<size_t>(draft[i])] && !is_protected[static_cast<size_t>(decision.choice)];
        const Mismatch mismatch = judge_mismatch(
            gate, logits + i * n_vocab, n_vocab, draft[i], draft_logits ? draft_logits + i * n_vocab : nullptr, is_safe,
            answer, static_cast<int64_t>(i), regions ? static_cast<pyfly_region>(regions[i]) : PYFLY_REGION_PROSE);
        decision.reason = draft[i] == decision.choice ? PYFLY_REASON_MATCH : mismatch.rejected;
        if (decision.reason == PYFLY_REASON_LOOSE) {
            answer.accept_loosely(static_cast<int64_t>(i), mismatch.margin);
        }
        decision.entropy = mismatch.entropy;
        decision.margin = mismatch.margin;
    }
    // Windows look at the gates' verdicts, so the rejections they cause are written down afterwards.
    std::vector<pyfly_decision> judged = round.decisions;
    for (size_t i = 0; i < n_draft; i++) {
        if (judged[i].reason == PYFLY_REASON_LOOSE) {
            judged[i].reason = judge_window(window, round.decisions, i);
        }
    }
    round.decisions = judged;
    size_t n_accepted = 0;
    while (n_accepted < n_draft && judged[n_accepted].reason <= PYFLY_REASON_LOOSE) {
        n_accepted++;
    }
    round.tokens.assign(draft, draft + n_accepted);
    round.tokens.push_back(n_accepted < n_draft ? judged[n_accepted].choice : choice_at(n_draft));
    return round;
}

} // namespace pyfly
