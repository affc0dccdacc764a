#include "token_recycling.h"

#include <algorithm>
#include <cmath>

#include "error.h"
#include "guard.h"
#include "handles.h"

namespace pyfly {

namespace {

constexpr int32_t none = -1;

} // namespace

TokenRecycling::TokenRecycling(int32_t n_vocab, int32_t n_candidates, int32_t num_pred)
    : n_vocab_(n_vocab), n_candidates_(n_candidates), num_pred_(num_pred) {
    if (n_candidates < 1 || n_candidates > max_top) {
        throw Error(PYFLY_STATUS_INVALID, "token recycling needs n_candidates in 1..32");
    }
    if (num_pred < 1) {
        throw Error(PYFLY_STATUS_INVALID, "token recycling needs num_pred_tokens >= 1");
    }
    next_.assign(static_cast<size_t>(n_vocab) * static_cast<size_t>(n_candidates), none);
}

const int32_t * TokenRecycling::candidates(int32_t token) const {
    return next_.data() + static_cast<size_t>(token) * static_cast<size_t>(n_candidates_);
}

void TokenRecycling::observe(Model & target, const std::vector<Span> & spans, const std::vector<bool> & wanted) {
    for (size_t span = 0; span < spans.size(); span++) {
        for (size_t i = spans[span].first_row; wanted[span] && i < spans[span].n; i++) {
            const float * row = target.row(span, i);
            auto next = next_.begin() + (candidates(spans[span].tokens[i]) - next_.data());
            std::fill_n(next, n_candidates_, none);
            if (!row_max(row, static_cast<size_t>(n_vocab_)).finite) {
                continue;
            }
            top_tokens(row, static_cast<size_t>(n_vocab_), static_cast<size_t>(n_candidates_), top_);
            for (const TokenLogit & candidate : top_) {
                if (std::isfinite(candidate.logit)) {
                    *next++ = candidate.token;
                }
            }
        }
    }
}

// The first candidate of `token` that was one of the token before, other than itself; null: none.
const int32_t * TokenRecycling::thought_of(int32_t before, int32_t token) const {
    const int32_t * mine = candidates(token);
    const int32_t * theirs = candidates(before);
    const int32_t * end = std::find(mine, mine + n_candidates_, none);
    const int32_t * found = std::find_if(mine, end, [&](int32_t candidate) {
        return candidate != token && std::find(theirs, theirs + n_candidates_, candidate) != theirs + n_candidates_;
    });
    return found == end ? nullptr : found;
}

void TokenRecycling::propose(const DraftRequest & request) const {
    const std::vector<int32_t> & history = *request.history;
    const size_t n_most = static_cast<size_t>(std::max(0, std::min(request.n_max, num_pred_)));
    const auto is_known = [&](int32_t token) { return token >= 0 && token < n_vocab_; };
    int32_t token = history.back();
    int32_t before = history.size() > 1 ? history[history.size() - 2] : token;
    if (!is_known(token) || !is_known(before)) {
        return;
    }
    std::vector<int32_t> & out = request.out->tokens;
    while (out.size() < n_most && candidates(token)[0] != none) {
        const int32_t * first = candidates(token);
        const int32_t * found = thought_of(before, token);
        if (out.empty()) {
            request.out->proposal_class = found == nullptr ? 0 : found == first ? 2 : 1;
        }
        out.push_back(found == nullptr ? *first : *found);
        before = token;
        token = out.back();
    }
}

void TokenRecycling::propose(const std::vector<DraftRequest> & requests) {
    for (const DraftRequest & request : requests) {
        propose(request);
    }
}

} // namespace pyfly

extern "C" pyfly_status pyfly_drafter_recycling_new(const pyfly_target * target, int32_t n_candidates, int32_t num_pred,
                                                    pyfly_drafter ** out, pyfly_error * error) {
    return pyfly::guard(error, [&] {
        *out = new pyfly_drafter{
            std::make_unique<pyfly::TokenRecycling>(target->model->n_vocab(), n_candidates, num_pred)};
    });
}
