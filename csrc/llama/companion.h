// What a GGUF file is to another one: could it draft for it? By the headers alone.
#pragma once

#include <string>

#include "model_file.h"

namespace pyfly {

// The word of the drafter that `file` could be for `target`: "draft" (a model of the same vocabulary), "mtp" (a head
// without its model), "eagle3", "dflash" or "dspark". A head is of the right shape then; whether it was trained for
// this very model no header says. Throws Error: INCOMPATIBLE if it could not be any, with what is in the way; INVALID
// if loading `file` would end the process.
std::string companion_word(const ModelFile & target, const ModelFile & file);

} // namespace pyfly
