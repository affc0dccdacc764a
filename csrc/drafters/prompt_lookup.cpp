#include "prompt_lookup.h"

#include <algorithm>
#include <string>

#include "error.h"

namespace pyfly {

PromptLookup::PromptLookup(int32_t max_ngram, int32_t min_ngram, int32_t num_pred, pyfly_lookup_match match)
    : max_ngram_(max_ngram), min_ngram_(min_ngram), num_pred_(num_pred), match_(match) {
    if (min_ngram < 1 || max_ngram < min_ngram || max_ngram > 64) {
        throw Error(PYFLY_STATUS_INVALID, "prompt lookup needs 1 <= min_ngram_size <= max_ngram_size <= 64");
    }
    if (num_pred < 1) {
        throw Error(PYFLY_STATUS_INVALID, "prompt lookup needs num_pred_tokens >= 1");
    }
    if (match != PYFLY_LOOKUP_LATEST && match != PYFLY_LOOKUP_EARLIEST) {
        throw Error(PYFLY_STATUS_INVALID, "unknown lookup rule " + std::to_string(match));
    }
    index_.resize(static_cast<size_t>(max_ngram - min_ngram) + 1);
}

// FNV-1a over the token ids of the n-gram that ends before `end`.
uint64_t PromptLookup::hash_at(int32_t n, size_t end) const {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = end - static_cast<size_t>(n); i < end; i++) {
        hash = (hash ^ static_cast<uint32_t>(tokens_[i])) * 1099511628211u;
    }
    return hash;
}

bool PromptLookup::same_ngram(int32_t n, size_t a, size_t b) const {
    const auto end_at = [&](size_t last) { return tokens_.begin() + static_cast<std::ptrdiff_t>(last) + 1; };
    return std::equal(end_at(a) - n, end_at(a), end_at(b) - n);
}

void PromptLookup::append(int32_t token) {
    tokens_.push_back(token);
    const size_t end = tokens_.size();
    for (int32_t n = min_ngram_; n <= max_ngram_; n++) {
        Index & index = index_[static_cast<size_t>(n - min_ngram_)];
        index.previous.push_back(none);
        if (end < static_cast<size_t>(n)) {
            continue;
        }
        const auto [it, is_new] = index.newest.try_emplace(hash_at(n, end), none);
        index.previous.back() = it->second;
        it->second = static_cast<int32_t>(end) - 1;
    }
}

void PromptLookup::remove_last() {
    const size_t end = tokens_.size();
    for (int32_t n = min_ngram_; n <= max_ngram_; n++) {
        Index & index = index_[static_cast<size_t>(n - min_ngram_)];
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

void PromptLookup::sync(const std::vector<int32_t> & history) {
    const size_t n = std::min(history.size(), tokens_.size());
    const size_t common = static_cast<size_t>(
        std::mismatch(history.begin(), history.begin() + static_cast<std::ptrdiff_t>(n), tokens_.begin()).first -
        history.begin());
    if (common == 0) {
        tokens_.clear();
        for (Index & index : index_) {
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

// Last position of the earlier occurrence of the last n tokens that the rule asks for, or none.
int32_t PromptLookup::find(int32_t n) const {
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
        if (match_ == PYFLY_LOOKUP_LATEST) {
            return at;
        }
        if (last + static_cast<size_t>(n) < end) {
            found = at; // ends before the pattern begins; keep the earliest
        }
    }
    return found;
}

void PromptLookup::draft(const std::vector<int32_t> & history, int32_t n_max, std::vector<int32_t> & out) {
    sync(history);
    for (int32_t n = max_ngram_; n >= min_ngram_; n--) {
        const int32_t at = find(n);
        if (at != none) {
            const size_t begin = static_cast<size_t>(at) + 1;
            const size_t count = std::min(
                {tokens_.size() - begin, static_cast<size_t>(std::max(n_max, 0)), static_cast<size_t>(num_pred_)});
            const auto first = tokens_.begin() + static_cast<std::ptrdiff_t>(begin);
            out.assign(first, first + static_cast<std::ptrdiff_t>(count));
            proposal_class_ = std::min(n, 8) - 1;
            return;
        }
    }
}

} // namespace pyfly
