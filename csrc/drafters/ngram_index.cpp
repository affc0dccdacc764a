#include "ngram_index.h"

#include <algorithm>

namespace pyfly {

namespace {

constexpr int most_looked_at = 256; // of a bucket, for the latest

} // namespace

NgramIndex::NgramIndex(int32_t max_ngram, int32_t min_ngram)
    : max_ngram_(static_cast<size_t>(max_ngram)), min_ngram_(static_cast<size_t>(min_ngram)),
      index_(max_ngram_ - min_ngram_ + 1) {
    rebuild();
}

// Hashes of the n-grams that a text ends with, by their sizes; returns the largest size that there is.
size_t NgramIndex::hash(const int32_t * text, size_t n_text, Hashes & hashes) const {
    uint64_t hash = 0;
    size_t n = 0;
    while (n < max_ngram_ && n < n_text && text[n_text - n - 1] != separator) {
        hash = (hash ^ static_cast<uint32_t>(text[n_text - n - 1])) * 0x9e3779b97f4a7c15u; // 2^64 / the golden ratio
        hash ^= hash >> 32;
        hashes[++n] = hash;
    }
    return n;
}

void NgramIndex::insert(size_t position) {
    Hashes hashes;
    const size_t n_largest = tokens_[position] == separator ? 0 : hash(tokens_.data(), position, hashes);
    for (size_t n = min_ngram_; n <= max_ngram_; n++) {
        Occurrences & all = of_size(n);
        all.previous.push_back(none);
        if (n <= n_largest) {
            std::swap(all.previous.back(), all.newest[hashes[n] & (n_buckets_ - 1)]);
            all.newest[hashes[n] & (n_buckets_ - 1)] = static_cast<int32_t>(position);
        }
    }
}

void NgramIndex::rebuild() {
    for (Occurrences & all : index_) {
        all.newest.assign(n_buckets_, none);
        all.previous.clear();
    }
    for (size_t i = 0; i < tokens_.size(); i++) {
        insert(i);
    }
}

void NgramIndex::append(int32_t token) {
    tokens_.push_back(token);
    if (tokens_.size() > n_buckets_) {
        n_buckets_ *= 2;
        rebuild();
    } else {
        insert(tokens_.size() - 1);
    }
}

void NgramIndex::remove_last() {
    Hashes hashes;
    const size_t position = tokens_.size() - 1;
    const size_t n_largest = tokens_.back() == separator ? 0 : hash(tokens_.data(), position, hashes);
    for (size_t n = min_ngram_; n <= max_ngram_; n++) {
        Occurrences & all = of_size(n);
        if (n <= n_largest) {
            all.newest[hashes[n] & (n_buckets_ - 1)] = all.previous.back();
        }
        all.previous.pop_back();
    }
    tokens_.pop_back();
}

void NgramIndex::remove_first(size_t n) {
    tokens_.erase(tokens_.begin(), tokens_.begin() + static_cast<std::ptrdiff_t>(n));
    rebuild();
}

// How many tokens before position `next` are the last ones of a text.
int32_t NgramIndex::n_common(const int32_t * text, size_t n_text, int32_t next) const {
    const size_t n_most = std::min({n_text, static_cast<size_t>(next), static_cast<size_t>(longest)});
    size_t n = 0;
    while (n < n_most && text[n_text - n - 1] == tokens_[static_cast<size_t>(next) - n - 1]) {
        n++;
    }
    return static_cast<int32_t>(n);
}

NgramIndex::Match NgramIndex::find(const int32_t * text, size_t n_text, pyfly_lookup_match match) const {
    Hashes hashes;
    Match found;
    for (size_t n = hash(text, n_text, hashes); n >= min_ngram_ && found.next == none; n--) {
        const Occurrences & all = of_size(n);
        int n_looked_at = 0;
        for (int32_t at = all.newest[hashes[n] & (n_buckets_ - 1)]; at != none;
             at = all.previous[static_cast<size_t>(at)]) {
            const int32_t n_alike = n_common(text, n_text, at);
            if (static_cast<size_t>(n_alike) < n) {
                continue; // another n-gram in this bucket
            }
            if (match == PYFLY_LOOKUP_LATEST) {
                found = n_alike > found.n ? Match{at, n_alike} : found;
                if (found.n == longest || ++n_looked_at == most_looked_at) {
                    break;
                }
            } else if (static_cast<size_t>(at) + n <= n_text) {
                found = {at, n_alike};
            }
        }
    }
    return found;
}

} // namespace pyfly
