// Distributions that tokens are drawn from. No llama.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace pyfly {

struct Weight {
    int32_t token;
    double p; // > 0
};

// Weights of tokens, each token once, rising; what is not there has none. A distribution, where they add up to 1.
using Weights = std::vector<Weight>;

// Draws a draft from a drafter's row [n] of the first n tokens, which has a distribution, and adds what it was drawn
// from to `drawn`.
using DrawDraft = std::function<int32_t(const float * row, size_t n, std::vector<Weights> & drawn)>;

// Where tokens, each once and in any order, have these logits, none of them NaN: their softmax. A logit of -inf has no
// weight, and beside logits of +inf, which share the weight, no other one has; no weights are left if all are -inf.
// Takes `logits` apart.
Weights softmax(Weights logits);

// Of a row [n_vocab] with a distribution.
Weights softmax(const float * row, size_t n_vocab);

// Of a token.
double weight(const Weights & weights, int32_t token);

// Of all tokens.
double sum(const Weights & weights);

// A token, drawn in proportion to its weight; u in [0, 1). The weights are not empty.
int32_t draw(const Weights & weights, double u);

} // namespace pyfly
