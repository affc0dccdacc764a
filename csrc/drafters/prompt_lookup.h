// Prompt lookup: what followed the last n tokens when they occurred before is proposed again.
// Saxena 2023, "Prompt Lookup Decoding"; the "earliest" rule is that of the FLy reference code.
#pragma once

#include "drafter.h"
#include "ngram_index.h"
#include "pyfly.h"

namespace pyfly {

class PromptLookup : public Drafter {
  public:
    // Requires 1 <= min_ngram <= max_ngram <= 64 and num_pred >= 1; throws Error(PYFLY_STATUS_INVALID) otherwise.
    PromptLookup(int32_t max_ngram, int32_t min_ngram, int32_t num_pred, pyfly_lookup_match match);

    int32_t n_texts() const override { return INT32_MAX; }

    // Classes go by the length of the n-gram that was found: the longer, the surer.
    void propose(const std::vector<DraftRequest> & requests) override;
    bool is_free() const override { return true; }

  private:
    void propose(const DraftRequest & request);

    int32_t max_ngram_, min_ngram_, num_pred_;
    pyfly_lookup_match match_;
    std::vector<NgramIndex> texts_;
};

} // namespace pyfly
