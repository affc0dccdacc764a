#include "callback_drafter.h"

#include <algorithm>

#include "error.h"
#include "guard.h"
#include "handles.h"

namespace pyfly {

CallbackDrafter::CallbackDrafter(pyfly_draft_callback draft, void * user) : draft_(draft), user_(user) {
    if (draft == nullptr) {
        throw Error(PYFLY_STATUS_INVALID, "a callback drafter needs a callback");
    }
}

void CallbackDrafter::propose(const std::vector<DraftRequest> & requests) {
    for (const DraftRequest & request : requests) {
        std::vector<int32_t> & out = request.out->tokens;
        out.resize(static_cast<size_t>(request.n_max));
        const int32_t n = draft_(user_, request.history->data(), request.history->size(), out.data(), out.size());
        if (n < 0) {
            for (const DraftRequest & each : requests) {
                each.out->tokens.clear();
            }
            throw Error(PYFLY_STATUS_CALLBACK, "the drafter's callback stopped");
        }
        out.resize(static_cast<size_t>(std::min(n, request.n_max)));
    }
}

} // namespace pyfly

extern "C" pyfly_status pyfly_drafter_callback_new(pyfly_draft_callback draft, void * user, pyfly_drafter ** out,
                                                   pyfly_error * error) {
    return pyfly::guard(error,
                        [&] { *out = new pyfly_drafter{std::make_unique<pyfly::CallbackDrafter>(draft, user)}; });
}
