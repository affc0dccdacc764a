#include "stop.h"

#include <atomic>
#include <string>

#include "error.h"
#include "stopwatch.h"

namespace pyfly {

namespace {

constexpr int64_t us_between = 50'000; // a person waits no longer; asking takes the GIL, a few microseconds

std::atomic<pyfly_stop_callback> caller = nullptr;
thread_local int64_t asked_us = 0;

} // namespace

void set_stop(pyfly_stop_callback stop) {
    caller = stop;
}

void require_wanted() {
    const pyfly_stop_callback ask = caller;
    const int64_t now = ask == nullptr ? 0 : now_us();
    if (ask == nullptr || now - asked_us < us_between) {
        return;
    }
    asked_us = now;
    if (const int32_t answer = ask(); answer != 0) {
        asked_us = 0;
        throw Error(PYFLY_STATUS_CALLBACK, "the caller wants no more (" + std::to_string(-answer) + ")");
    }
}

} // namespace pyfly
