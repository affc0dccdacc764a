#include "prompt_lookup.h"

#include <algorithm>
#include <string>

#include "error.h"
#include "guard.h"
#include "handles.h"

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
}

// The longest n-gram with an earlier occurrence wins.
void PromptLookup::propose(const DraftRequest & request) {
    const size_t text = static_cast<size_t>(request.text);
    while (texts_.size() <= text) {
        texts_.emplace_back(max_ngram_, min_ngram_);
    }
    NgramIndex & index = texts_[text];
    index.sync(*request.history);
    for (int32_t n = max_ngram_; n >= min_ngram_; n--) {
        const int32_t at = index.find(n, match_);
        if (at != NgramIndex::none) {
            const std::vector<int32_t> & tokens = index.tokens();
            const auto first = tokens.begin() + at + 1;
            const std::ptrdiff_t count =
                std::min({tokens.end() - first, static_cast<std::ptrdiff_t>(std::max(request.n_max, 0)),
                          static_cast<std::ptrdiff_t>(num_pred_)});
            request.out->tokens.assign(first, first + count);
            request.out->proposal_class = std::min(n, 8) - 1;
            return;
        }
    }
}

void PromptLookup::propose(const std::vector<DraftRequest> & requests) {
    for (const DraftRequest & request : requests) {
        propose(request);
    }
}

} // namespace pyfly

extern "C" pyfly_status pyfly_drafter_lookup_new(int32_t max_ngram, int32_t min_ngram, int32_t num_pred, int32_t match,
                                                 pyfly_drafter ** out, pyfly_error * error) {
    return pyfly::guard(error, [&] {
        *out = new pyfly_drafter{std::make_unique<pyfly::PromptLookup>(max_ngram, min_ngram, num_pred,
                                                                       static_cast<pyfly_lookup_match>(match))};
    });
}
