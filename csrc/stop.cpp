#include "stop.h"

#include <atomic>
#include <chrono>
#include <string>

#include "error.h"

namespace pyfly {

namespace {

constexpr int64_t ms_between = 50; // a person waits no longer; asking takes the GIL, a few microseconds

std::atomic<pyfly_stop_callback> caller = nullptr;
thread_local int64_t asked_ms = 0;

int64_t now_ms() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

} // namespace

void set_stop(pyfly_stop_callback stop) {
    caller = stop;
}

void require_wanted() {
    const pyfly_stop_callback ask = caller;
    const int64_t now = ask == nullptr ? 0 : now_ms();
    if (ask == nullptr || now - asked_ms < ms_between) {
        return;
    }
    asked_ms = now;
    if (const int32_t answer = ask(); answer != 0) {
        asked_ms = 0;
        throw Error(PYFLY_STATUS_CALLBACK, "the caller wants no more (" + std::to_string(-answer) + ")");
    }
}

} // namespace pyfly
