// The one rule for what a drafter keeps of a request. No llama.h.
//
// What is kept (cache entries, rows, an index, a translation) is of a stretch: of positions begin ... end - 1 of some
// history, whose tokens there are kept with it. It begins at 0, or further on: where a window on a long text was moved,
// where there was no room for more, where the drafter was set in the middle. Whatever history is shown next,
//
//   it has the same tokens there, and more     everything stays; what is new is behind
//   it ends within the stretch, or has another what is of the positions before stays
//       token at position n of it
//   it ends before the stretch, or has another nothing stays, and nothing is left of where the stretch began: the next
//       token at its beginning                 one begins where texts begin
//
// Nothing else moves a stretch back to where texts begin. Tokens before it are not compared: what was computed behind
// others is at worst a worse draft, as it is of a window that was moved.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common_prefix.h"

namespace pyfly {

// How many of the held[n_held] tokens of a stretch from `begin` on stay for a history of which tokens[n_tokens] are
// those from position `offset` on; none where it began before those.
inline size_t n_staying(size_t begin, const int32_t * held, size_t n_held, const int32_t * tokens, size_t n_tokens,
                        size_t offset = 0) {
    if (begin < offset || begin - offset >= n_tokens) {
        return 0;
    }
    return n_common(held, n_held, tokens + (begin - offset), n_tokens - (begin - offset));
}

} // namespace pyfly
