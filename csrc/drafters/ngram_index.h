// Where the last n tokens of a text occurred before. No llama.h.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "pyfly.h"

namespace pyfly {

// Every n-gram of the text is indexed under its hash as it is appended, with a link to its previous occurrence, so that
// a search costs one probe whatever the length, and taking tokens back undoes the index exactly.
class NgramIndex {
  public:
    static constexpr int32_t none = -1;

    // Requires 1 <= min_ngram <= max_ngram.
    NgramIndex(int32_t max_ngram, int32_t min_ngram);

    // Makes the text that is indexed this one.
    void sync(const std::vector<int32_t> & history);

    // Last position of the earlier occurrence of the last n tokens that the rule asks for, or none.
    int32_t find(int32_t n, pyfly_lookup_match match) const;

    const std::vector<int32_t> & tokens() const { return tokens_; }

  private:
    // Occurrences of the n-grams of one size. An occurrence is named by its last token's position.
    struct Occurrences {
        std::unordered_map<uint64_t, int32_t> newest; // by hash
        std::vector<int32_t> previous;                // by position: the occurrence before, or none
    };

    void append(int32_t token);
    void remove_last();
    uint64_t hash_at(int32_t n, size_t end) const;
    bool same_ngram(int32_t n, size_t a, size_t b) const;

    int32_t max_ngram_, min_ngram_;
    std::vector<int32_t> tokens_;
    std::vector<Occurrences> index_; // [n - min_ngram]
};

} // namespace pyfly
