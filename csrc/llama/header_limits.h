// What llama.cpp takes for granted of a GGUF header: it asserts, divides, allocates or loops without looking. What it
// checks itself, by refusing to load the file, is not here.
#pragma once

#include <string>

#include "gguf.h"

namespace pyfly {

// What of the header would end the process, or not end at all, to follow the file's name in a sentence; empty if
// nothing is known. `architecture` is general.architecture. Takes time in proportion to the header's size.
std::string header_problem(const gguf_context * gguf, const std::string & architecture);

// Whether an architecture that may rotate in sections does so in this file.
bool rotates_in_sections(const gguf_context * gguf, const std::string & architecture);

} // namespace pyfly
