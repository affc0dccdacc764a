// llama.cpp's log, kept instead of printed.
#pragma once

#include <string>

namespace pyfly {

// From now on nothing of llama.cpp's log is printed, in the whole process; its last error lines are kept.
void keep_log();

// The kept error lines, oldest first, each with a newline; they are forgotten.
std::string take_log_errors();

} // namespace pyfly
