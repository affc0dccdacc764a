#include "kept_log.h"

#include <deque>
#include <mutex>
#include <string_view>

#include "fork_safe.h"
#include "llama.h"

namespace pyfly {

namespace {

constexpr size_t most_lines = 10;

std::mutex mutex;
[[maybe_unused]] const bool is_held_over_forks = hold_over_forks<mutex>();
auto & lines = *new std::deque<std::string>; // llama.cpp also logs while the process ends
bool is_in_error = false;

std::string_view trimmed(std::string_view text) {
    constexpr const char * space = " \t\r\n";
    const size_t begin = text.find_first_not_of(space);
    return begin == std::string_view::npos ? "" : text.substr(begin, text.find_last_not_of(space) - begin + 1);
}

void keep(ggml_log_level level, const char * text, void * /*user_data*/) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (level != GGML_LOG_LEVEL_CONT) {
        is_in_error = level == GGML_LOG_LEVEL_ERROR;
    }
    const std::string_view line = trimmed(text);
    if (!is_in_error || line.empty()) {
        return;
    }
    lines.emplace_back(line);
    if (lines.size() > most_lines) {
        lines.pop_front();
    }
}

} // namespace

void keep_log() {
    llama_log_set(keep, nullptr);
}

std::string take_log_errors() {
    const std::lock_guard<std::mutex> lock(mutex);
    std::string out;
    for (const std::string & line : lines) {
        out += line + '\n';
    }
    lines.clear();
    return out;
}

} // namespace pyfly
