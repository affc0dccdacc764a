#include "callback_drafter.h"

#include <algorithm>
#include <string>

#include "error.h"
#include "guard.h"

namespace pyfly {

CallbackDrafter::CallbackDrafter(pyfly_draft_callback draft, void * user, int32_t n_vocab)
    : draft_(draft), user_(user), n_vocab_(static_cast<size_t>(std::max(n_vocab, 0))) {
    if (draft == nullptr) {
        throw Error(PYFLY_STATUS_INVALID, "a callback drafter needs a callback");
    }
}

void CallbackDrafter::propose(const std::vector<DraftRequest> & requests) {
    for (const DraftRequest & request : requests) {
        std::vector<int32_t> & out = request.out->tokens;
        out.resize(static_cast<size_t>(request.n_max));
        std::vector<float> & rows = request.out->rows;
        rows.resize(request.wants_rows ? out.size() * n_vocab_ : 0);
        const int32_t n = draft_(user_, request.history->data(), request.history->size(), out.data(),
                                 rows.empty() ? nullptr : rows.data(), out.size());
        if (n < 0) {
            for (const DraftRequest & each : requests) {
                *each.out = {};
            }
            throw Error(PYFLY_STATUS_CALLBACK, "the drafter's callback stopped (" + std::to_string(-n) + ")");
        }
        out.resize(static_cast<size_t>(std::min(n, request.n_max)));
    }
}

} // namespace pyfly

extern "C" pyfly_status pyfly_drafter_callback_new(pyfly_draft_callback draft, void * user, int32_t n_vocab,
                                                   pyfly_drafter ** out, pyfly_error * error) {
    return pyfly::guard(
        error, [&] { *out = new pyfly_drafter{std::make_unique<pyfly::CallbackDrafter>(draft, user, n_vocab)}; });
}
