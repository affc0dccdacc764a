// Retrieval: what followed the last n tokens where they occur in a datastore is proposed. He et al. 2023, "REST:
// Retrieval-Based Speculative Decoding", arXiv 2311.08252; a chain in place of its tree.
#pragma once

#include "datastore.h"
#include "drafter.h"

namespace pyfly {

class Retrieval : public Drafter {
  public:
    struct Config {
        int32_t max_ngram, min_ngram; // longest and shortest suffix that is looked up, 1 <= min <= max <= 64
        int32_t num_pred;             // most tokens of a proposal, >= 1
        int32_t max_matches;          // most occurrences that are looked at, 1..4096
    };

    // Throws Error(PYFLY_STATUS_INVALID) for a Config out of range.
    Retrieval(const Datastore & store, const Config & config);

    int32_t n_texts() const override { return INT32_MAX; }

    // Of the occurrences of the longest suffix (spread evenly over all, if there are too many), the token that follows
    // most of them, the lowest at a tie, and so on among those that it follows.
    void propose(const std::vector<DraftRequest> & requests) override;
    bool is_free() const override { return true; }

  private:
    void propose(const DraftRequest & request);
    std::vector<int32_t> follow(const Datastore::Range & range, size_t n, size_t n_most);

    Datastore store_;
    Config config_;
    std::vector<int64_t> positions_; // of the occurrences that still agree
    std::vector<int32_t> next_;
};

} // namespace pyfly
