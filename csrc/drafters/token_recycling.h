// Token recycling: what the target thought might follow a token is proposed behind it the next time. Luo et al. 2024,
// "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling", arXiv
// 2408.08696; a chain in place of its tree. No llama.h.
#pragma once

#include <vector>

#include "drafter.h"
#include "pyfly.h"
#include "rows.h"

namespace pyfly {

// For each token of the vocabulary, the most probable tokens of the row that followed it last, whichever text it was
// in and whether or not the token survived: a hint, which no rollback makes wrong. It outlives texts, so what is
// drafted depends on what was decoded before.
class TokenRecycling : public Drafter {
  public:
    // Keeps n_candidates of each of n_vocab tokens (4 bytes each) and proposes num_pred tokens at most. Throws
    // Error(PYFLY_STATUS_INVALID) unless 1 <= n_candidates <= 32 and num_pred >= 1.
    TokenRecycling(int32_t n_vocab, int32_t n_candidates, int32_t num_pred);

    int32_t n_texts() const override { return INT32_MAX; }
    void observe(Model & target, const std::vector<Span> & spans, const std::vector<bool> & wanted) override;

    // A chain needs one candidate of each token. It is the most probable one that was a candidate one position before,
    // too: what the target had in mind already. Else it is the most probable one. Classes: no such candidate, one
    // further down, the most probable one.
    void propose(const std::vector<DraftRequest> & requests) override;
    bool is_free() const override { return true; }

  private:
    void propose(const DraftRequest & request) const;
    const int32_t * candidates(int32_t token) const; // [n_candidates_], none behind the last
    const int32_t * thought_of(int32_t before, int32_t token) const;

    int32_t n_vocab_, n_candidates_, num_pred_;
    std::vector<int32_t> next_; // [n_vocab][n_candidates], by falling probability
    std::vector<TokenLogit> top_;
};

} // namespace pyfly
