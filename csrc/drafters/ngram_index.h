// Tokens, and where each n-gram of them occurred. No llama.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pyfly.h"

namespace pyfly {

// An occurrence is indexed once the token that follows it is known, under a hash of the n-gram, with a link to the one
// before, so that taking tokens back undoes the index exactly. A token takes 4 bytes, and 8 to 12 for each size of
// n-grams. `separator` stands between two texts: no n-gram contains it, and no occurrence is followed by it.
class NgramIndex {
  public:
    static constexpr int32_t separator = -1;
    static constexpr int32_t none = -1;

    // How many tokens of an occurrence are compared, at most.
    static constexpr int32_t longest = 64;

    // Requires 1 <= min_ngram <= max_ngram <= longest.
    NgramIndex(int32_t max_ngram, int32_t min_ngram);

    // Holds fewer than 2^31 tokens.
    void append(int32_t token);
    void remove_last();

    // Takes out the first n tokens, which takes as long as appending all others.
    void remove_first(size_t n);

    const std::vector<int32_t> & tokens() const { return tokens_; }

    struct Match {
        int32_t next = none; // position of the token that follows the occurrence; none: there is none
        int32_t n = 0;       // how many tokens before it are the last n of the text, at most `longest`
    };

    // An occurrence of the largest n-gram, max_ngram ... min_ngram, that text[n_text] ends with. LATEST: of the latest
    // ones that which has most tokens before it in common with the text, the latest of those. EARLIEST: the first one
    // that ends before the n-gram of this very text begins.
    Match find(const int32_t * text, size_t n_text, pyfly_lookup_match match = PYFLY_LOOKUP_LATEST) const;

  private:
    // Occurrences of the n-grams of one size, each named by the position of the token that follows it.
    struct Occurrences {
        std::vector<int32_t> newest;   // [n_buckets_]
        std::vector<int32_t> previous; // [position]: the one before in its bucket, or none
    };
    using Hashes = std::array<uint64_t, longest + 1>; // [n]

    size_t hash(const int32_t * text, size_t n_text, Hashes & hashes) const;
    Occurrences & of_size(size_t n) { return index_[n - min_ngram_]; }
    const Occurrences & of_size(size_t n) const { return index_[n - min_ngram_]; }
    int32_t n_common(const int32_t * text, size_t n_text, int32_t next) const;
    void insert(size_t position);
    void rebuild();

    size_t max_ngram_, min_ngram_;
    size_t n_buckets_ = 64; // a power of two, at least as many as tokens
    std::vector<int32_t> tokens_;
    std::vector<Occurrences> index_; // [n - min_ngram]
};

} // namespace pyfly
