// Speculative sampling: drafts are drawn from the drafter's distribution q, and the target's choices so that they are
// the drafted tokens as often as they can be, while each is still distributed as the target's p. No llama.h.
//
// p is the target's distribution after the whole sampler chain: what forbids and reweighs tokens, truncation,
// temperature. q may be any distribution, as long as the drafted token was drawn from it; a token that nobody drew has
// a q with everything on it. Every number of `random` is used once: one for each drafted token where it is drawn, one
// for each acceptance test, one for each token that is drawn in place of a rejected one, one for a bonus. None is used
// again where text is taken back: later drafts and tests would not be independent of what was kept because of it.
#pragma once

#include "distribution.h"
#include "random.h"

namespace pyfly {

// The target's choice where `drafted`, drawn from q, is proposed: this token with probability min(1, p / q), or one of
// the residual. Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318),
// algorithm 2.
int32_t choose_beside(const Weights & p, const Weights & q, int32_t drafted, Random & random);

} // namespace pyfly
