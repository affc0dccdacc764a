// Prompt lookup: what followed the last n tokens when they occurred before is proposed again.
// Saxena 2023, "Prompt Lookup Decoding"; the "earliest" rule is that of the FLy reference code.
#pragma once

#include <unordered_map>

#include "drafter.h"
#include "pyfly.h"

namespace pyfly {

// Every n-gram of the history is indexed under its hash as it is appended, with a link to its previous occurrence, so
// that a lookup costs max_ngram probes whatever the length, and taking tokens back undoes the index exactly.
class PromptLookup : public Drafter {
  public:
    // Requires 1 <= min_ngram <= max_ngram <= 64 and num_pred >= 1; throws Error(PYFLY_STATUS_INVALID) otherwise.
    PromptLookup(int32_t max_ngram, int32_t min_ngram, int32_t num_pred, pyfly_lookup_match match);

    void draft(const std::vector<int32_t> & history, int32_t n_max, std::vector<int32_t> & out) override;
    bool is_free() const override { return true; }

    // By the length of the n-gram that was found: the longer, the surer.
    int32_t proposal_class() const override { return proposal_class_; }

  private:
    static constexpr int32_t none = -1;

    // Occurrences of the n-grams of one size. An occurrence is named by its last token's position.
    struct Index {
        std::unordered_map<uint64_t, int32_t> newest; // by hash
        std::vector<int32_t> previous;                // by position: the occurrence before, or none
    };

    void sync(const std::vector<int32_t> & history);
    void append(int32_t token);
    void remove_last();
    uint64_t hash_at(int32_t n, size_t end) const;
    bool same_ngram(int32_t n, size_t a, size_t b) const;
    int32_t find(int32_t n) const;

    int32_t max_ngram_, min_ngram_, num_pred_;
    pyfly_lookup_match match_;
    int32_t proposal_class_ = 0;
    std::vector<int32_t> tokens_;
    std::vector<Index> index_; // [n - min_ngram]
};

} // namespace pyfly
