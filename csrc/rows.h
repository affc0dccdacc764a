// Statistics of one logits row: what gates and samplers at temperature 0 need to know of it. No llama.h.
//
// A row is float[n_vocab]: unnormalised log-probabilities. -inf is a value here (a forbidden token). A row that holds
// a NaN, a +inf, or nothing but -inf is not finite: it has no distribution, and every function says so.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pyfly.h"

namespace pyfly {

// Largest n of a top-n entropy.
constexpr int32_t max_top = PYFLY_MAX_TOP;

struct TokenLogit {
    int32_t token;
    float logit;
};

// The largest logit. At a tie the lowest token wins, as in llama.cpp's greedy sampler.
struct RowMax {
    int32_t token;
    float logit;
    bool finite; // false: the row has no distribution; token and logit mean nothing
};

struct RowStats {
    RowMax max;
    double log_sum_exp;                  // ln sum exp(row), nats
    double entropy;                      // -sum p ln p over the whole row, nats, 0 <= entropy <= ln n_vocab
    int32_t n_top;                       // entries in `top`: min(requested, n_vocab)
    std::array<TokenLogit, max_top> top; // by falling logit, then rising token

    // ln p of a token with this logit; -inf for a forbidden one.
    double log_prob(float logit) const { return static_cast<double>(logit) - log_sum_exp; }

    // -sum p ln p over the n most probable tokens, not renormalised, nats (FLy reference code, fly/models/FLy.py).
    // Requires 1 <= n <= n_top.
    double top_entropy(int32_t n) const;
};

// Requires n_vocab >= 1.
RowMax row_max(const float * row, size_t n_vocab);

// Full statistics. Requires n_vocab >= 1 and 0 <= n_top <= max_top. Where max.finite is false only `max` is set.
RowStats row_stats(const float * row, size_t n_vocab, int32_t n_top);

// The n largest logits, or all if there are no more, by falling logit, then rising token. Requires a row with a
// distribution and n >= 1.
void top_tokens(const float * row, size_t n_vocab, size_t n, std::vector<TokenLogit> & top);

// The instruction set chosen for this processor: "avx512", "avx2" or "baseline".
const char * simd_level();

} // namespace pyfly
