// The judgement of one mismatch and of one round. No llama.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "rules/gate.h"
#include "vocabulary.h"
#include "window.h"

namespace pyfly {

// What one mismatch looks like before its window is considered.
struct Mismatch {
    pyfly_reason rejected; // SAFETY or GATE: rejected now; LOOSE: deferred
    double entropy;        // reported_entropy()
    double margin;         // nats; +inf for a forbidden draft token
    double log_sum_exp;    // of the row; NaN where it was not measured
};

// Of a row, nats: the top-n entropy if the gate measures that, else the full one.
double reported_entropy(const Gate & gate, const RowStats & stats);

// Safety first, then the gate, and what it defers must not be as good as impossible: such a token is unsafe, too, but
// where the gate rejects it, that is the reason. `row` is the target's row after everything that forbids tokens and
// before temperature and truncation; `is_safe` says that neither the draft token nor the target's choice is protected
// and that the draft token could have been drawn; `draft_row` is the drafter's own, or null; `answered`[n_answered]:
// the answer's tokens before it, or null where the gate does not look at them. Throws Error(PYFLY_STATUS_NOT_FINITE)
// for a row without a distribution.
Mismatch judge_mismatch(const Gate & gate, const float * row, size_t n_vocab, int32_t draft_token,
                        const float * draft_row, bool is_safe, const int32_t * answered, int64_t n_answered);

struct Round {
    std::vector<pyfly_decision> decisions; // one for each drafted position, each judged on its own
    std::vector<int32_t> tokens;           // what is emitted: accepted drafts and the target's own token
};

// One round on its own, see pyfly_verify. logits[n_draft + 1][n_vocab]; draft_logits[n_draft][n_vocab] or null;
// choices[n_draft + 1] or null for the argmax, or what speculative sampling draws with this seed; answered[n_answered]:
// what came before in the answer, or null.
Round verify_round(const float * logits, const Vocabulary & vocabulary, const int32_t * draft, size_t n_draft,
                   const float * draft_logits, const int32_t * choices, const Gate & gate,
                   const pyfly_window_config & window, const int32_t * answered, int64_t n_answered, uint64_t seed);

} // namespace pyfly
