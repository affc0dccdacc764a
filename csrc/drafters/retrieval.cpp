#include "retrieval.h"

#include <algorithm>
#include <string>

#include "error.h"
#include "guard.h"
#include "handles.h"

namespace pyfly {

Retrieval::Retrieval(const Datastore & store, const Config & config) : store_(store), config_(config) {
    if (config.min_ngram < 1 || config.max_ngram < config.min_ngram || config.max_ngram > 64) {
        throw Error(PYFLY_STATUS_INVALID, "retrieval needs 1 <= min_ngram_size <= max_ngram_size <= 64");
    }
    if (config.num_pred < 1) {
        throw Error(PYFLY_STATUS_INVALID, "retrieval needs num_pred_tokens >= 1");
    }
    if (config.max_matches < 1 || config.max_matches > 4096) {
        throw Error(PYFLY_STATUS_INVALID, "retrieval needs max_matches in 1..4096");
    }
}

void Retrieval::propose(const DraftRequest & request) {
    const std::vector<int32_t> & history = *request.history;
    const size_t n_most = static_cast<size_t>(std::max(0, std::min(request.n_max, config_.num_pred)));
    const auto find = [&](size_t n) { return store_.find(history.data() + history.size() - n, n); };
    // Where n tokens occur, so do the last n - 1 of them: the longest is found by halving.
    size_t n = static_cast<size_t>(config_.min_ngram) - 1;
    size_t n_too_long = std::min(static_cast<size_t>(config_.max_ngram), history.size()) + 1;
    Datastore::Range range = {};
    while (n + 1 < n_too_long) {
        const size_t middle = n + (n_too_long - n) / 2;
        const Datastore::Range found = find(middle);
        if (found.size() > 0) {
            n = middle;
            range = found;
        } else {
            n_too_long = middle;
        }
    }
    // It may only occur where documents end.
    for (; n >= static_cast<size_t>(config_.min_ngram); range = --n > 0 ? find(n) : Datastore::Range{}) {
        request.out->tokens = follow(range, n, n_most);
        if (!request.out->tokens.empty()) {
            request.out->proposal_class = static_cast<int32_t>(std::min<size_t>(n, 8)) - 1;
            return;
        }
    }
}

// At most n_most tokens that follow the n of these suffixes.
std::vector<int32_t> Retrieval::follow(const Datastore::Range & range, size_t n, size_t n_most) {
    const int64_t n_looked_at = std::min<int64_t>(range.size(), config_.max_matches);
    positions_.clear();
    for (int64_t i = 0; i < n_looked_at; i++) {
        const int64_t rank = range.begin + range.size() * i / n_looked_at;
        positions_.push_back(store_.suffix(rank) + static_cast<int64_t>(n));
    }
    std::vector<int32_t> out;
    while (out.size() < n_most) {
        const int64_t depth = static_cast<int64_t>(out.size());
        next_.clear();
        for (const int64_t position : positions_) {
            next_.push_back(store_.token(position + depth));
        }
        std::sort(next_.begin(), next_.end());
        int32_t best = Datastore::separator;
        std::ptrdiff_t n_best = 0;
        for (auto begin = next_.begin(); begin != next_.end();) {
            const auto end = std::upper_bound(begin, next_.end(), *begin);
            if (*begin != Datastore::separator && end - begin > n_best) {
                best = *begin;
                n_best = end - begin;
            }
            begin = end;
        }
        if (n_best == 0) {
            break;
        }
        out.push_back(best);
        positions_.erase(std::remove_if(positions_.begin(), positions_.end(),
                                        [&](int64_t position) { return store_.token(position + depth) != best; }),
                         positions_.end());
    }
    return out;
}

void Retrieval::propose(const std::vector<DraftRequest> & requests) {
    for (const DraftRequest & request : requests) {
        propose(request);
    }
}

} // namespace pyfly

extern "C" pyfly_status pyfly_drafter_retrieval_new(const void * data, size_t n_bytes, uint64_t vocabulary,
                                                    int32_t max_ngram, int32_t min_ngram, int32_t num_pred,
                                                    int32_t max_matches, pyfly_drafter ** out, pyfly_error * error) {
    return pyfly::guard(error, [&] {
        const pyfly::Datastore store(data, n_bytes);
        if (store.info().vocabulary != vocabulary) {
            throw pyfly::Error(PYFLY_STATUS_INCOMPATIBLE,
                               "the datastore was built for another vocabulary; build one with this model");
        }
        *out = new pyfly_drafter{std::make_unique<pyfly::Retrieval>(
            store, pyfly::Retrieval::Config{max_ngram, min_ngram, num_pred, max_matches})};
    });
}
