// Loops that another part of the program has to bring to an end. No llama.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "error.h"
#include "stop.h"

namespace pyfly {

// Calls next() until it returns 0: what is left to do. It may grow, as where a window moves, but not for ever: after
// 16 calls in a row without less left than ever before this throws Error(PYFLY_STATUS_INTERNAL). Throws also where the
// caller wants no more (stop.h).
template <typename Next> void until_none_is_left(Next && next) {
    constexpr int32_t most_in_vain = 16;
    size_t least = SIZE_MAX;
    for (int32_t in_vain = 0; in_vain < most_in_vain; in_vain++) {
        require_wanted();
        const size_t n_left = next();
        if (n_left == 0) {
            return;
        }
        if (n_left < least) {
            least = n_left;
            in_vain = -1;
        }
    }
    throw Error(PYFLY_STATUS_INTERNAL, "a drafter does not catch up with the request; remove it");
}

} // namespace pyfly
