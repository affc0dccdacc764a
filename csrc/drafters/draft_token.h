// The token that a row of a drafter's logits proposes.
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

// The proposal of a row [n_vocab] with this maximum: its most probable token, or, with `draw`, the one that it draws;
// none if the most probable one is less probable than p_min, or if `stop` ends the draft before it. `confidence`:
// passed to `stop`, 0..1; by default the probability of the most probable token. Fills in out.drawn, out.confidence
// and out.dropped, not the tokens.
DraftToken draft_token(const float * row, size_t n_vocab, const RowMax & max, double p_min, const DrawDraft & draw,
                       const DraftStop & stop, Proposal & out, std::optional<double> confidence = std::nullopt);

} // namespace pyfly
