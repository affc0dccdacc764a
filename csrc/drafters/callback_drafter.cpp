#include "callback_drafter.h"

#include <algorithm>

#include "error.h"

namespace pyfly {

CallbackDrafter::CallbackDrafter(pyfly_draft_callback draft, void * user) : draft_(draft), user_(user) {
    if (draft == nullptr) {
        throw Error(PYFLY_STATUS_INVALID, "a callback drafter needs a callback");
    }
}

void CallbackDrafter::draft(const std::vector<int32_t> & history, int32_t n_max, std::vector<int32_t> & out) {
    out.resize(static_cast<size_t>(n_max));
    const int32_t n = draft_(user_, history.data(), history.size(), out.data(), out.size());
    if (n < 0) {
        out.clear();
        throw Error(PYFLY_STATUS_CALLBACK, "the drafter's callback stopped");
    }
    out.resize(static_cast<size_t>(std::min(n, n_max)));
}

} // namespace pyfly
