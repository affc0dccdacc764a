// What a row of a drafter's logits proposes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "drafter.h"
#include "rows.h"

namespace pyfly {

struct DraftToken {
    std::optional<int32_t> token; // none: the draft ends here
    bool is_last = false;         // the draft ends behind it
};

// The maximum of a row [n_vocab] of a drafter of our own. Throws Error(PYFLY_STATUS_NOT_FINITE), naming `who`, for one
// without a distribution.
RowMax require_row(const float * row, size_t n_vocab, const char * who);

// What a row [n_vocab] with this maximum proposes: its most probable token, or, with `draw`, what that draws; nothing
// where the most probable one falls under p_min, or where `stop` ends the draft. `confidence`: what `stop` is asked
// with; by default the probability of the most probable token. Adds to out.drawn, out.confidence and out.dropped, not
// to the tokens.
DraftToken draft_token(const float * row, size_t n_vocab, const RowMax & max, double p_min, const DrawDraft & draw,
                       const DraftStop & stop, Proposal & out, std::optional<double> confidence = std::nullopt);

} // namespace pyfly
