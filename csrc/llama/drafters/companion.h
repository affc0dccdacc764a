// How a file could draft for a model.
#pragma once

#include <string>

#include "llama.h"

namespace pyfly {

// The word of the drafter that the file at `path` could be for `target`, which may be loaded without its weights:
// "draft" (a model of the same vocabulary), "mtp" (a head without its model), "eagle3", "dflash" or "dspark". It opens
// the file as that drafter does, but without its weights, and throws the Error that the drafter would throw. Whether a
// head was trained for this very model no file says.
std::string companion_word(const llama_model * target, const std::string & path);

} // namespace pyfly
