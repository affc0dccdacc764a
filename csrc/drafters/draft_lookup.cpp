#include "draft_lookup.h"

#include <algorithm>

namespace pyfly {

namespace {

constexpr size_t first_length = 2;
constexpr size_t most = 64; // tokens of a guess

} // namespace

DraftLookup::DraftLookup()
    : lookup_({/*max_ngram=*/4, /*min_ngram=*/2, static_cast<int32_t>(most), PYFLY_LOOKUP_LATEST, /*n_memory=*/0},
              nullptr, {}, {}) {}

size_t & DraftLookup::length(int32_t slot) {
    if (static_cast<size_t>(slot) >= lengths_.size()) {
        lengths_.resize(static_cast<size_t>(slot) + 1, first_length);
    }
    return lengths_[static_cast<size_t>(slot)];
}

std::vector<int32_t> DraftLookup::guess(int32_t slot, const std::vector<int32_t> & text, size_t n_max) {
    Proposal found;
    if (n_max > 0) {
        const size_t n = std::min(n_max, length(slot));
        lookup_.propose({{slot, &text, static_cast<int32_t>(n), &found}});
    }
    return found.tokens;
}

void DraftLookup::learn(int32_t slot, size_t n_guessed, size_t n_right) {
    size_t & n = length(slot);
    // A draft that had room for fewer than might have been guessed says nothing against that number.
    n = n_right == n_guessed ? std::min(std::max(n, 2 * n_guessed), most) : std::max<size_t>(n_right, 1);
}

void DraftLookup::forget(int32_t slot) {
    length(slot) = first_length;
    lookup_.forget(slot);
}

} // namespace pyfly
