#include "ngram_index.h"

#include <algorithm>

#include "stretch.h"

namespace pyfly {

NgramIndex::NgramIndex(int32_t max_ngram, int32_t min_ngram)
    : max_ngram_(max_ngram), min_ngram_(min_ngram), index_(static_cast<size_t>(max_ngram - min_ngram) + 1) {}

// FNV-1a over the token ids of the n-gram that ends before `end`.
uint64_t NgramIndex::hash_at(int32_t n, size_t end) const {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = end - static_cast<size_t>(n); i < end; i++) {
        hash = (hash ^ static_cast<uint32_t>(tokens_[i])) * 1099511628211u;
    }
    return hash;
}

bool NgramIndex::same_ngram(int32_t n, size_t a, size_t b) const {
    const auto end_at = [&](size_t last) { return tokens_.begin() + static_cast<std::ptrdiff_t>(last) + 1; };
    return std::equal(end_at(a) - n, end_at(a), end_at(b) - n);
}

void NgramIndex::append(int32_t token) {
    tokens_.push_back(token);
    const size_t end = tokens_.size();
    for (int32_t n = min_ngram_; n <= max_ngram_; n++) {
        Occurrences & index = index_[static_cast<size_t>(n - min_ngram_)];
        index.previous.push_back(none);
        if (end < static_cast<size_t>(n)) {
            continue;
        }
        const auto [it, is_new] = index.newest.try_emplace(hash_at(n, end), none);
        index.previous.back() = it->second;
        it->second = static_cast<int32_t>(end) - 1;
    }
}

void NgramIndex::remove_last() {
    const size_t end = tokens_.size();
    for (int32_t n = min_ngram_; n <= max_ngram_; n++) {
        Occurrences & index = index_[static_cast<size_t>(n - min_ngram_)];
        if (end >= static_cast<size_t>(n)) {
            const uint64_t hash = hash_at(n, end);
            if (index.previous.back() == none) {
                index.newest.erase(hash);
            } else {
                index.newest[hash] = index.previous.back();
            }
        }
        index.previous.pop_back();
    }
    tokens_.pop_back();
}

void NgramIndex::sync(const std::vector<int32_t> & history) {
    const size_t common = n_staying(0, tokens_.data(), tokens_.size(), history.data(), history.size());
    if (common == 0) {
        tokens_.clear();
        for (Occurrences & index : index_) {
            index.newest.clear();
            index.previous.clear();
        }
    }
    while (tokens_.size() > common) {
        remove_last();
    }
    for (size_t i = common; i < history.size(); i++) {
        append(history[i]);
    }
}

int32_t NgramIndex::find(int32_t n, pyfly_lookup_match match) const {
    const size_t end = tokens_.size();
    if (end <= static_cast<size_t>(n)) {
        return none;
    }
    const std::vector<int32_t> & previous = index_[static_cast<size_t>(n - min_ngram_)].previous;
    int32_t found = none;
    for (int32_t at = previous[end - 1]; at != none; at = previous[static_cast<size_t>(at)]) {
        const size_t last = static_cast<size_t>(at);
        if (!same_ngram(n, last, end - 1)) {
            continue; // another n-gram with this hash
        }
        if (match == PYFLY_LOOKUP_LATEST) {
            return at;
        }
        if (last + static_cast<size_t>(n) < end) {
            found = at; // ends before the pattern begins; keep the earliest
        }
    }
    return found;
}

} // namespace pyfly
