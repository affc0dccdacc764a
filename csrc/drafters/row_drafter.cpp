#include "row_drafter.h"

#include "draft_token.h"
#include "error.h"
#include "guard.h"

namespace pyfly {

RowDrafter::RowDrafter(pyfly_row_callback row, void * user, int32_t n_vocab)
    : row_(row), user_(user), n_vocab_(static_cast<size_t>(n_vocab > 0 ? n_vocab : 0)) {
    if (row == nullptr || n_vocab < 1) {
        throw Error(PYFLY_STATUS_INVALID, "a drafter with rows needs a callback and a vocabulary");
    }
}

void RowDrafter::propose(const std::vector<DraftRequest> & requests) {
    std::vector<Proposal> proposals(requests.size()); // an error leaves no request half answered
    std::vector<float> row(n_vocab_);
    for (size_t r = 0; r < requests.size(); r++) {
        const DraftRequest & request = requests[r];
        Proposal & out = proposals[r];
        std::vector<int32_t> history = *request.history;
        for (bool is_last = false; !is_last && static_cast<int32_t>(out.tokens.size()) < request.n_max;) {
            if (row_(user_, history.data(), history.size(), row.data()) != 0) {
                throw Error(PYFLY_STATUS_CALLBACK, "the drafter's callback stopped");
            }
            const RowMax max = row_max(row.data(), n_vocab_);
            if (!max.finite) {
                throw Error(PYFLY_STATUS_NOT_FINITE, "the drafter gave a row without a distribution; check its logits");
            }
            const DraftToken next = draft_token(row.data(), n_vocab_, max, 0.0, request.draw, request.stop, out);
            if (!next.token) {
                break;
            }
            is_last = next.is_last;
            out.tokens.push_back(*next.token);
            if (request.wants_rows) {
                out.rows.insert(out.rows.end(), row.begin(), row.end());
            }
            history.push_back(out.tokens.back());
        }
    }
    for (size_t r = 0; r < requests.size(); r++) {
        *requests[r].out = std::move(proposals[r]);
    }
}

} // namespace pyfly

extern "C" pyfly_status pyfly_drafter_rows_new(pyfly_row_callback row, void * user, int32_t n_vocab,
                                               pyfly_drafter ** out, pyfly_error * error) {
    return pyfly::guard(error,
                        [&] { *out = new pyfly_drafter{std::make_unique<pyfly::RowDrafter>(row, user, n_vocab)}; });
}
