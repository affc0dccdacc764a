// Verification of one step on arrays: the judge of generation, without a model. No llama.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gates/expression.h"
#include "vocabulary.h"

namespace pyfly {

struct Verified {
    std::vector<pyfly_decision> decisions; // one for each drafted position, each judged on its own
    std::vector<int32_t> tokens;           // what is emitted: accepted drafts and the target's own token
};

// One step on its own, see pyfly_verify. logits[n_draft + 1][n_vocab]; draft_logits[n_draft][n_vocab] or null;
// choices[n_draft + 1] or null for the argmax, or what speculative sampling draws with this seed; answered[n_answered]:
// what came before in the answer, or null.
Verified verify_step(const float * logits, const Vocabulary & vocabulary, const int32_t * draft, size_t n_draft,
                     const float * draft_logits, const int32_t * choices, const GateExpression & gate,
                     const pyfly_window_config & window, const int32_t * answered, int64_t n_answered, uint64_t seed);

} // namespace pyfly
