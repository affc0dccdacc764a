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

// How the target's choices are made.
enum class Sampling {
    alone, // by the sampler chain, whatever was drafted
    twice, // drawn from p, and a second time: a drafted token is accepted where either draw gives it, so p is not kept.
           // Drafts are the drafter's favourites: the FLy reference code (fly/models/FLy.py) at temperature > 0
    token, // a drafted token is accepted with probability min(1, p / q), else drawn from norm(max(p - q, 0)):
           // Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318), algorithm 2
    block, // the tokens of a round are accepted together: Sun et al. 2024 (arXiv 2403.10444), algorithm 2
};

// max(scale p - q, 0).
Weights residual(const Weights & p, double scale, const Weights & q);

// The target's choice where `drafted`, drawn from q, is proposed: this token, or one of the residual.
int32_t choose_beside(const Weights & p, const Weights & q, int32_t drafted, Random & random);

// The same by two draws from p: the drafted token if either gives it, else the first.
int32_t choose_of_two(const Weights & p, int32_t drafted, Random & random);

// What block verification makes of a block of drafted tokens.
struct BlockChoice {
    size_t n_accepted; // of the block
    Weights rest;      // what the next token is drawn from, not normalised; empty behind a whole block: the bonus's p
};

// Position i of a block.
struct BlockStep {
    Weights p, q; // the target's and the drafter's distribution there
    int32_t drafted;
};

// For a block that is not empty. It may have any length that follows from the text and the tokens before its end.
BlockChoice choose_block(const std::vector<BlockStep> & block, Random & random);

} // namespace pyfly
